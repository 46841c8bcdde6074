"""FP8 keys and values in Triton (cases in triton_float8_cases.py): interpreted on a CPU, and on a GPU."""

from pathlib import Path

import pytest
import torch

from tests.ops.test_triton_fused import FIRST_THAT_INTERPRETS, run_cases, triton_version

CASES = Path(__file__).with_name("triton_float8_cases.py")


@pytest.mark.skipif(triton_version() < FIRST_THAT_INTERPRETS, reason="needs a Triton whose interpreter works")
def test_fp8_keys_and_values_hold_their_cases_in_the_interpreter() -> None:
    run_cases(CASES, TRITON_INTERPRET="1")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_fp8_keys_and_values_hold_their_cases_on_the_gpu() -> None:
    run_cases(CASES, TRITON_INTERPRET="0")
