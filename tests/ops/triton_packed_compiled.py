"""Compile the gate and up kernel over packed weights for Hopper; needs no GPU. Run by test_triton_packed.py.

It must read weights asynchronously, multiply in tensor cores with the instruction that small tiles have too, and keep
its values in registers.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.ops.triton.fused_mlp import _gate_up_kernel

POINTERS = {"weight": "*i16", "scales": "*i32"}


def compiled(form: int, group: int, rows: int, warps: int) -> str:
    constants = {
        "K": 1536, "HAS_BIAS": False, "NORM": 2 if rows == 16 else 3, "EXACT": False, "ROWS": rows, "OUT": 64,
        "IN": 32, "OUTS_FIRST": False, "FORMAT": form, "GROUP": group, "PDL": 0,
    }  # fmt: skip
    numbers = {"num_rows": "i32", "size": "i32", "eps": "fp32"}
    names = list(_gate_up_kernel.arg_names)
    signature = {
        name: "constexpr" if name in constants else numbers.get(name) or POINTERS.get(name, "*bf16") for name in names
    }
    given = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(fn=_gate_up_kernel, signature=signature, constexprs=given, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 3, "enable_fp_fusion": False}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


if __name__ == "__main__":
    for form, group in ((1, 32), (2, 32), (3, 1536), (3, 128)):
        for rows, warps in ((16, 4), (64, 2)):
            ptx = compiled(form, group, rows, warps)
            assert "cp.async" in ptx and "mma.sync" in ptx and "wgmma" not in ptx, (form, rows)
            assert "ftz" not in "".join(line for line in ptx.splitlines() if "fma.rn" in line), "small numbers are lost"
