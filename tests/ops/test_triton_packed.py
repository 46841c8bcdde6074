"""The fused kernels over weights of 4 and 8 bits (cases in triton_packed_cases.py), as test_triton_fused.py."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops.test_triton_fused import FIRST_THAT_INTERPRETS, run_cases, triton_version

CASES = Path(__file__).with_name("triton_packed_cases.py")
COMPILED = Path(__file__).with_name("triton_packed_compiled.py")
QUICK = "(twin and residual) or instructions"


@pytest.mark.skipif(triton_version() < FIRST_THAT_INTERPRETS, reason="needs a Triton whose interpreter works")
def test_packed_products_hold_their_cases_in_the_interpreter() -> None:
    run_cases(CASES, only=QUICK, TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.skipif(triton_version() < FIRST_THAT_INTERPRETS, reason="needs a Triton whose interpreter works")
def test_all_packed_kernels_hold_their_cases_in_the_interpreter() -> None:
    run_cases(CASES, only=f"not ({QUICK})", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.skipif(triton_version() < FIRST_THAT_INTERPRETS, reason="needs a Triton")
def test_packed_kernels_compile_for_hopper_without_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, str(COMPILED)], cwd=COMPILED.parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_packed_kernels_hold_their_cases_on_the_gpu() -> None:
    run_cases(CASES, TRITON_INTERPRET="0")
