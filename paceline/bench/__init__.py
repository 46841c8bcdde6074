"""Measuring: workloads, load, sweeps, reports and replay, on our engine or on any OpenAI-compatible server.

workloads.py loaders.py   what is asked
backend.py                the seam: our engine in process (engine_backend.py), a server (url_backend.py)
load.py                   how it is asked: closed loop or Poisson arrivals
summary.py intervals.py   what came out of one run, and of several
grid.py records.py sweep.py   many runs, alternating, resumable
report.py recommend.py    one page with the pictures, and a configuration to serve with
curve.py predict.py oracle.py never_slower.py adapt.py   the measurements that the claims rest on
recording.py replay.py    verify once, then judge any method offline
"""
