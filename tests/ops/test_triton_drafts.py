"""The Triton kernels of drafts (cases in triton_draft_cases.py): in Triton's interpreter, and on a GPU."""

from pathlib import Path

import pytest
import torch

from tests.ops.test_triton_fused import FIRST_THAT_INTERPRETS, run_cases, triton_version

CASES = Path(__file__).with_name("triton_draft_cases.py")
PARTS_OF_ROUNDS = ("round", "lookup", "product", "chain")
ROUND_CASES = [Path(__file__).with_name(f"triton_{part}_cases.py") for part in PARTS_OF_ROUNDS]
ENGINE_CASES = Path(__file__).with_name("triton_engine_cases.py")
LONGER = "padding or nan or half or norm or seven_rows"  # words of cases that take seconds in the interpreter

needs_interpreter = pytest.mark.skipif(
    triton_version() < FIRST_THAT_INTERPRETS, reason="needs a Triton whose interpreter works"
)


@needs_interpreter
def test_the_draft_kernels_hold_their_cases_in_the_interpreter() -> None:
    run_cases(CASES, only=f"not ({LONGER})", TRITON_INTERPRET="1")


@needs_interpreter
def test_the_kernels_of_rounds_hold_their_cases_in_the_interpreter() -> None:
    run_cases(*ROUND_CASES, TRITON_INTERPRET="1")


@pytest.mark.slow
@needs_interpreter
def test_the_engine_runs_in_rounds_on_the_kernels_in_the_interpreter() -> None:
    run_cases(ENGINE_CASES, TRITON_INTERPRET="1")


@pytest.mark.slow
@needs_interpreter
def test_the_draft_kernels_hold_their_longer_cases_in_the_interpreter() -> None:
    run_cases(CASES, only=LONGER, TRITON_INTERPRET="1")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_draft_kernels_hold_their_cases_on_the_gpu() -> None:
    run_cases(CASES, *ROUND_CASES, TRITON_INTERPRET="0")
