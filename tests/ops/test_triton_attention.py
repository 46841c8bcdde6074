"""Attention over the paged cache in Triton (cases in triton_attention_cases.py): interpreted on a CPU, and on a GPU."""

import re
from pathlib import Path

import pytest
import torch

from tests.ops.test_triton_fused import FIRST_THAT_INTERPRETS, run_cases, triton_version

CASES = Path(__file__).with_name("triton_attention_cases.py")


@pytest.mark.skipif(triton_version() < FIRST_THAT_INTERPRETS, reason="needs a Triton whose interpreter works")
def test_attention_holds_its_cases_in_the_interpreter() -> None:
    run_cases(CASES, TRITON_INTERPRET="1")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_attention_holds_its_cases_on_the_gpu() -> None:
    run_cases(CASES, TRITON_INTERPRET="0")


def product_kinds(lines: int, warps: int, *, float8: bool = False) -> set[str]:
    """The tensor core products and the orders inside them that a Hopper GPU would run, for SmolLM2-135M's heads."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from paceline.ops.triton.split_attention_kernel import attention_kernel

    constants = {
        "Q_HEADS": 9,
        "KV_HEADS": 3,
        "DIM": 64,
        "DIM_PAD": 64,
        "BLOCK_SIZE": 16,
        "KEYS": 64,
        "LINES": 16,
        "BLOCK_LINES": lines,
        "BLOCK_ROWS": lines // 3,
        "BLOCK_ROWS_PAD": lines // 2,
        "AT_ONCE": 4,
        "PDL": 0,
        "WINDOWED": False,
        "EXACT": False,
        "FLOAT8": float8,
        "SHARED": False,
        "BLOCK_SHARED": False,
    }
    halves, wholes = ("query", "kv", "out"), ("part_best", "part_total", "part_mixed")
    numbers = ["num_rows", "table_stride", "num_slots", "max_splits", "window", "parts", "block_parts"]
    kinds = dict.fromkeys(halves, "*bf16") | dict.fromkeys(wholes, "*fp32") | dict.fromkeys(numbers, "i32")
    kinds |= dict.fromkeys(constants, "constexpr") | {"scale": "fp32"}
    kinds["kv"] = "*i16" if float8 else "*bf16"
    signature = {name: kinds.get(name, "*i32") for name in attention_kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    at = {(i,): constants[name] for i, name in enumerate(attention_kernel.arg_names) if name in constants}
    options = {"num_warps": warps, "num_stages": 3, "enable_fp_fusion": False}
    compiled = compile(
        ASTSource(attention_kernel, signature, at, aligned), target=GPUTarget("cuda", 90, 32), options=options
    )
    dots = [line for line in compiled.asm["ttgir"].splitlines() if re.search(r"= \S*(tt.dot|warp_group_dot) ", line)]
    # Three for each tile, plain or at the edge, of a row or a block; with words of two numbers five.
    assert len(dots) == (20 if float8 else 12)
    versions = set(re.findall(r"nvidia_mma<{versionMajor = (\d)", compiled.asm["ttgir"]))
    return {f"version {version}" for version in versions} | set(re.findall(r"kWidth = \d", "".join(dots)))


@pytest.mark.slow
@pytest.mark.skipif(triton_version() < FIRST_THAT_INTERPRETS, reason="needs Triton, of a version that is tested")
def test_rows_and_blocks_run_on_one_kind_of_tensor_core_product() -> None:
    """Compiled for a Hopper GPU, which none is needed for. The bits of a row hang on it."""
    from paceline.ops.triton.split_attention import block_shape

    _, lines, warps = block_shape(9, 3, 64, torch.bfloat16)
    assert product_kinds(lines, warps) == {"version 2", "kWidth = 2"}
    assert product_kinds(lines, warps, float8=True) == {"version 2", "kWidth = 2"}
    assert "version 3" in product_kinds(64, 4), "this test would not see the other kind"
