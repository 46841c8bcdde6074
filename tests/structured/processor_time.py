"""Processor time of the process that tries grammars: unlike time on the clock, it is the same on a busy machine."""

import gc
import os
import resource
from pathlib import Path

from paceline.structured.compiler import Grammars


def trial_s(grammars: Grammars) -> float:
    """Of the one that runs now, and of all children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = ended.ru_utime + ended.ru_stime
    process = grammars._trial._process
    if process is not None and process.poll() is None:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def end_processes_of_gone_engines() -> None:
    """Now, and not while something is timed: a child's whole time counts at the moment when it has ended."""
    gc.collect()
