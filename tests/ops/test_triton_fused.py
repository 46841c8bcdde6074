"""The fused Triton kernels (cases in triton_fused_cases.py): in Triton's interpreter on a CPU, and on a GPU.

Triton decides when it is imported whether it interprets, so the cases run in a process of their own.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("triton_fused_cases.py")
FIRST_THAT_INTERPRETS = (3, 7, 1)  # earlier ones trip over numpy 2


def triton_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in importlib.metadata.version("triton").split("+")[0].split(".")[:3])
    except importlib.metadata.PackageNotFoundError:
        return ()


def run_cases(*cases: Path, only: str = "", **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider"]
    warnings = ["-W", "ignore::RuntimeWarning", "-W", "ignore::UserWarning"]  # numpy's about inf, Triton's about itself
    done = subprocess.run(
        [*command, *warnings, "-k", only, *map(str, cases)],
        env=os.environ | environment,
        cwd=cases[0].parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.skipif(triton_version() < FIRST_THAT_INTERPRETS, reason="needs a Triton whose interpreter works")
def test_the_fused_kernels_hold_their_cases_in_the_interpreter() -> None:
    run_cases(CASES, only="not padded", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.skipif(triton_version() < FIRST_THAT_INTERPRETS, reason="needs a Triton whose interpreter works")
def test_padded_passes_hold_their_cases_in_the_interpreter() -> None:
    run_cases(CASES, only="padded", TRITON_INTERPRET="1")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_fused_kernels_hold_their_cases_on_the_gpu() -> None:
    run_cases(CASES, TRITON_INTERPRET="0")
