"""`paceline bench`: what a user measures on a model, a machine or an OpenAI-compatible server of theirs.

workloads/   what is asked: our prompts by category, or a file
run/         asking: a backend (our engine in process, or a server's URL), a load, a sweep of them, records on disk
analyse/     from records to speedups with intervals, pictures, one page, and a recommendation by load
claims/      measurements with a verdict: never slower, follows a change of workload, expected tokens, overhead
replay/      record what the target says once, then judge any drafting method without it

This is part of the product: it is installed with the package and needs no other engine. The scripts behind our own
published figures, beside other engines or against attackers, are in `benchmarks/` of the repository. They may import
from here; nothing here knows of them.
"""
