"""What the fused kernels must hold over weights of 4 and 8 bits. Run by test_triton_packed.py in a process of its own:
in Triton's interpreter on a CPU (float32 and float16), or on a GPU.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.weights import QuantizedTensor
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from paceline.models.fused_decoder import FusedDecoder
from paceline.models.quantized.grouped import rows_of
from paceline.ops import fused_reference
from paceline.ops.packed import PackedWeight
from paceline.ops.triton import widen
from paceline.ops.triton.fused_head import head_logits, head_tiles, head_tokens
from paceline.ops.triton.fused_linear import linear_residual, split_sizes
from paceline.ops.triton.fused_mlp import norm_gate_up_silu
from paceline.ops.triton.fused_qkv import Heads, norm_qkv_rope
from paceline.ops.triton.norm_rows import scale_rows
from paceline.ops.triton.tiles import Tile
from tests.forward_batches import Pool, Rows
from tests.models.small_models import hf_config_dict, random_weights
from tests.ops.packed_values import FORMATS, random_packed, random_values
from tests.ops.triton_fused_cases import (
    DEVICE,
    DTYPES,
    EPS,
    INTERPRETED,
    assert_close,
    ints,
    normed,
    random,
    with_gains,
)

HEADS = Heads(num_q=1, num_kv=1, dim=16)
OUTPUTS, HIDDEN = 48, 96  # inputs of 96 are one and a half steps of 64


def tile(form: str, splits: int = 1) -> Tile:
    return Tile(16, FORMATS[form][2], 2, 3, splits)


def weight(form: str, dtype: torch.dtype, num_in: int = HIDDEN) -> PackedWeight:
    return random_packed(form, OUTPUTS, num_in, dtype, device=DEVICE)


def norm_of(dtype: torch.dtype) -> Tensor:
    return 1.0 + 0.2 * random(HIDDEN, seed=8, dtype=dtype)


def run_qkv(x: Tensor, form: str, reference: bool = False) -> Tensor:
    count, dtype = len(x), x.dtype
    angles, positions = random(50, HEADS.dim // 2, seed=5), ints([9] * count)
    kv = torch.zeros(2, count, 1, HEADS.dim, dtype=dtype, device=DEVICE)
    given = (weight(form, dtype), None, None, angles.cos(), angles.sin(), positions)
    slots = ints(list(range(count)))
    if reference:
        query = fused_reference.norm_qkv_rope(x, norm_of(dtype), *given, slots, kv, HEADS.num_q, EPS)
    else:
        query = torch.zeros(count, HEADS.num_q, HEADS.dim, dtype=dtype, device=DEVICE)
        norm_qkv_rope(with_gains(x, norm_of(dtype)), x, *given, slots, query, kv, HEADS, EPS, tile(form))
    return torch.cat([query.flatten(1), kv[0].flatten(1), kv[1].flatten(1)], dim=1)


def run_residual(x: Tensor, form: str, reference: bool = False, splits: int = 1) -> Tensor:
    own, hidden = weight(form, x.dtype, x.shape[1]), x[:, :OUTPUTS].clone()
    if reference:
        return fused_reference.linear_residual(x, own, None, hidden)
    num_parts, num_arrivals = split_sizes(len(x), OUTPUTS, tile(form, splits))
    parts = torch.full((num_parts,), torch.nan, device=DEVICE)
    arrivals = torch.zeros(num_arrivals, dtype=torch.int32, device=DEVICE)
    linear_residual(x, own, None, hidden, parts, arrivals, tile(form, splits))
    return hidden


def run_gate_up(x: Tensor, form: str, reference: bool = False) -> Tensor:
    norm, given = norm_of(x.dtype), (weight(form, x.dtype), random(OUTPUTS, seed=10, dtype=x.dtype))
    if reference:
        return fused_reference.norm_gate_up_silu(x, norm, *given, EPS)
    out = torch.zeros(len(x), OUTPUTS // 2, dtype=x.dtype, device=DEVICE)
    norm_gate_up_silu(with_gains(x, norm), x, *given, out, EPS, tile(form))
    return out


def run_logits(x: Tensor, form: str, reference: bool = False) -> Tensor:
    if reference:
        return fused_reference.norm_linear(x, norm_of(x.dtype), weight(form, x.dtype), None, EPS)
    logits = torch.zeros(len(x), OUTPUTS, device=DEVICE)
    head_logits(normed(x, norm_of(x.dtype)), weight(form, x.dtype), logits, tile(form))
    return logits


KERNELS = {"qkv": run_qkv, "residual": run_residual, "gate and up": run_gate_up, "logits": run_logits}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_computes_what_its_twin_does(form: str, kernel: str, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.float16 and kernel not in ("qkv", "residual"):
        pytest.skip("the same product: float32 shows it")
    x = 0.5 * random(3, HIDDEN, seed=0, dtype=dtype)
    assert_close(KERNELS[kernel](x, form), KERNELS[kernel](x, form, reference=True), dtype)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_of_a_row_do_not_depend_on_the_other_rows(form: str, kernel: str) -> None:
    x = random(17, HIDDEN, seed=0, dtype=torch.float32 if INTERPRETED else torch.bfloat16)
    counts = [1, 17] if INTERPRETED else [1, 2, 16, 17]
    rows = [KERNELS[kernel](x[-count:].contiguous(), form)[-1] for count in counts]
    assert all(torch.equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize("form", ["int4, group 32", "int8, group 16", "fp8, row"])
def test_a_split_sum_is_that_of_its_twin_whatever_the_rows(form: str) -> None:
    x = random(2, 1312, seed=0)  # the last part of three is a short one
    found = run_residual(x, form, splits=3)
    assert_close(found, run_residual(x, form, reference=True), torch.float32)
    assert torch.equal(run_residual(x[1:].contiguous(), form, splits=3)[0], found[1])


@pytest.mark.parametrize("form", FORMATS)
def test_scales_found_before_give_what_those_found_inside_do(form: str) -> None:
    """With programs of more rows and outputs, as passes of many rows have them. On a GPU to the bit."""
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    x = random(19, HIDDEN, seed=0, dtype=dtype)
    scales = torch.full((19,), torch.nan, device=DEVICE)
    scale_rows(x, scales, EPS)
    found = torch.zeros(19, OUTPUTS // 2, dtype=dtype, device=DEVICE)
    wide, bias = Tile(32, FORMATS[form][2], 2, 3), random(OUTPUTS, seed=10, dtype=dtype)
    gained = with_gains(x, norm_of(dtype))
    norm_gate_up_silu(gained, x, weight(form, dtype), bias, found, EPS, wide, scales=scales, row_tile=32)
    expected = run_gate_up(x, form)
    if INTERPRETED:
        assert_close(found, expected, dtype)
    else:
        assert torch.equal(found, expected)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's products are numpy's, and it has no bfloat16")
@pytest.mark.parametrize("form", [form for form in FORMATS if "row" not in form and "whole" not in form])
def test_a_packed_weight_gives_the_bits_of_the_plain_one_with_its_values(form: str) -> None:
    x, own = random(5, HIDDEN, seed=0, dtype=torch.bfloat16), weight(form, torch.bfloat16)
    plain = own.widened().bfloat16()  # scales of rows are powers of two
    found, expected = x[:, :OUTPUTS].clone(), x[:, :OUTPUTS].clone()
    nothing, zeros = torch.zeros(1, device=DEVICE), ints([0])
    linear_residual(x, own, None, found, nothing, zeros, tile(form))
    linear_residual(x, plain, None, expected, nothing, zeros, Tile(16, 16, 2, 3))
    assert torch.equal(found, expected)


def test_tokens_are_the_argmax_of_the_logits_of_a_packed_head() -> None:
    x, form = random(3, HIDDEN, seed=0), "int8, group 16"
    scores = torch.zeros(3, head_tiles(OUTPUTS, tile(form)), device=DEVICE)
    ids, tokens, best = torch.zeros_like(scores, dtype=torch.int32), ints([0] * 3), torch.zeros(3, device=DEVICE)
    head_tokens(normed(x, norm_of(x.dtype)), weight(form, x.dtype), scores, ids, tokens, best, None, tile(form))
    assert torch.equal(tokens.long(), run_logits(x, form).argmax(-1))


def mixed_weights(weights: dict[str, Tensor]) -> dict[str, Tensor | QuantizedTensor]:
    """As in a Q4_K_M file: some matrices of 8 bits among those of 4, one layer's down matrix plain."""
    made: dict[str, Tensor | QuantizedTensor] = dict(weights)
    for i, (name, stored) in enumerate(sorted(weights.items())):
        if stored.dim() == 2 and not ("down" in name and "layers.0" in name):
            kind, group = ("int8", 16) if "v_proj" in name or "embed" in name else ("int4", 32)
            grouped = random_values(kind, *stored.shape, group, seed=i)
            grouped.scales.mul_(0.2)
            made[name] = rows_of(grouped)
    return made


def test_the_fused_decoder_over_mixed_formats_computes_what_the_plain_one_does_whatever_the_rows() -> None:
    config = config_from_dict(hf_config_dict("qwen2", num_hidden_layers=2, vocab_size=48))
    weights = mixed_weights(random_weights(config))
    plain = Decoder(config, weights, device=DEVICE, packs=True)
    kinds = {type(linear.weight) for layer in plain.layers for linear in (layer.qkv, layer.gate_up, layer.down)}
    assert kinds == {PackedWeight, Tensor} and isinstance(plain.head.weight, PackedWeight)
    pool = Pool(2, 40)
    batch = pool.batch(Rows(1, 0, [3, 4]), Rows(0, 25, [7]), device=DEVICE)
    alone = pool.batch(Rows(0, 25, [7]), device=DEVICE)
    kv = random(2, 2, pool.num_slots, config.num_kv_heads, config.head_dim, seed=0)
    found = FusedDecoder(plain).forward(batch, kv.clone()).logits
    expected = plain.forward(batch, kv.clone()).logits
    assert_close(found, expected, torch.float32)
    assert torch.equal(FusedDecoder(plain).forward(alone, kv.clone()).logits[0], found[2])


# The instructions for a GPU, carried out here: what the interpreter runs are other ones.


def carried_out(asm: str, words: np.ndarray, num_outputs: int) -> list[np.ndarray]:
    registers = {f"${num_outputs}": words, f"${num_outputs + 1}": np.uint32(0xC308C308)}  # -136 in bfloat16, twice
    operations = {
        "shl.b32": lambda a, b: a << b,
        "shr.u32": lambda a, b: a >> b,
        "and.b32": lambda a, b: a & b,
        "mov.b32": lambda a: a,
        "lop3.b32": lambda a, b, c, table: (a & b) | c,
        "fma.rn.bf16x2": _fused_pairs,
    }
    for line in asm.strip("{} ").split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            name, _, given = line.strip().partition(" ")
            target, *sources = (part.strip() for part in given.split(","))
            assert name != "lop3.b32" or sources[3] == "0xEA"
            values = [registers[s] if s in registers else np.uint32(int(s, 0)) for s in sources]
            registers[target] = (operations[name](*values) + np.zeros_like(words)).astype(np.uint32)
    return [registers[f"${i}"] for i in range(num_outputs)]


def _fused_pairs(*registers: np.ndarray) -> np.ndarray:
    low, high = (
        [_bfloat16((np.asarray(r) >> np.uint32(shift)) & np.uint32(0xFFFF)) for r in registers] for shift in (0, 16)
    )
    made = [(a.double() * b.double() + c.double()).bfloat16() for a, b, c in (low, high)]
    bits = [np.asarray(x.view(torch.int16).numpy().astype(np.uint32) & np.uint32(0xFFFF)) for x in made]
    return np.asarray(bits[0] | bits[1] << np.uint32(16))


def _bfloat16(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(np.atleast_1d(bits).astype(np.int32)).to(torch.int16).view(torch.bfloat16)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU carries them out itself")
@pytest.mark.parametrize(
    "form, part", [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1), (4, 2), (4, 3)]
)
def test_the_instructions_for_a_gpu_take_every_word_apart(form: int, part: int) -> None:
    low = np.arange(65536, dtype=np.uint32)
    high = np.random.default_rng(0).permutation(low)
    words = low | high << np.uint32(16)
    if form >= 3:
        (pairs,) = carried_out(widen._float8_asm(part) if form == 3 else widen._whole_asm(part), words, 1)
        for shift, word in ((0, low), (16, high)):
            found = _bfloat16((pairs >> np.uint32(shift)) & np.uint32(0xFFFF)).float()
            byte = torch.from_numpy(
                ((word >> np.uint32((8 if form == 3 else 4) * part)) & np.uint32(255)).astype(np.uint8)
            )
            meant = byte.view(torch.float8_e4m3fn).float() if form == 3 else (byte & 15).float() - 8
            assert ((found == meant) | meant.isnan()).all()
        return
    bits, offset = (4, 16) if form == 1 else (8, 256)
    for found, word in zip(carried_out(widen._integers_asm(form, part), words, 2), (low, high), strict=True):
        value = (word >> np.uint32(bits * part)) & np.uint32((1 << bits) - 1)
        assert np.array_equal(found.view(np.float32), offset + value.astype(np.float32))
