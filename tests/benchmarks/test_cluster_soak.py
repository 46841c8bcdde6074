"""benchmarks/cluster.py soak, in short: real worker processes that are killed, also while others are coming back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_answer_changes_and_no_block_is_lost_under_overlapping_kills() -> None:
    options = ["--requests", "120", "--tokens", "160", "--kill-every", "1.5", "--seed", "4"]
    command = [sys.executable, "benchmarks/cluster.py", "soak", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert found["wrong"] == found["failed"] == found["tokens lost"] == found["doubled"] == 0
    assert found["all blocks back"]
    assert found["killed streams"] > 0 and found["decode killed"] > 1, "nothing was hit: the test shows nothing"
