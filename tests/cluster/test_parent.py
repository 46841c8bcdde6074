"""A worker ends with who started it, also while it still loads its model."""

import subprocess
import sys
import time

SCRIPT = """
import sys, threading, time
from paceline.cluster.parent import Parent
parent = Parent()
print("watching", flush=True)
if sys.argv[1] == "ready":
    gone = threading.Event()
    parent.when_gone(gone.set)
    gone.wait(30)
    sys.exit(7)
time.sleep(30)
"""


def ended(state: str) -> int:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    time.sleep(0.1)
    process.stdin.close()
    with process.stdout:
        return process.wait(10)


def test_while_it_loads_it_ends_at_once() -> None:
    assert ended("loading") == 0


def test_when_it_is_ready_it_is_told_and_ends_in_its_own_way() -> None:
    assert ended("ready") == 7
