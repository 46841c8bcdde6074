"""Every native kernel against its plain twin, on every instruction set this machine has."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from torch import Tensor

from paceline.errors import InvalidOptionError
from paceline.ops import native, reference
from paceline.ops.native.library import FORMATS, SOURCES, library

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason())),
    pytest.mark.usefixtures("instruction_set"),
]

SHAPES = [(1, 1, 1), (1, 16, 32), (3, 17, 33), (7, 40, 96), (9, 5, 100), (33, 64, 64), (64, 31, 160), (2, 200, 257)]
BYTES_PER_256 = {"Q4_K": 144, "Q5_K": 176}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matmul(
    source: str, wanted: int, weight: Tensor, shape: tuple[int, int], x: Tensor, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """(x @ weight.T by the kernel, weight as the panels hold it)"""
    out, unpacked = torch.full((x.shape[0], shape[0]), torch.nan), torch.empty(shape)
    weight, x = weight.contiguous(), x.contiguous()
    pointers = (weight.data_ptr(), x.shape[0], wide, x.data_ptr(), out.data_ptr(), unpacked.data_ptr())
    assert library().pl_test_matmul(SOURCES[source], wanted, *shape, *pointers) == 0
    return out, unpacked


def quantized_rows(x: Tensor, wide: bool) -> Tensor:
    """Activations as the quantized kernels see them: 8 or about 16 bits, with a scale per 32 values."""
    most = 127.0 * 255.0 + 127.0 if wide else 127.0
    size = x.shape[1]
    blocks = torch.nn.functional.pad(x, (0, -size % 32)).view(x.shape[0], -1, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, most) / largest, 0.0)  # scalar / x would round twice
    return ((blocks * inverse).round() * (largest / most)).flatten(1)[:, :size]


@pytest.mark.parametrize("rows, outputs, inputs", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_float_matmul(rows: int, outputs: int, inputs: int, dtype: str) -> None:
    weight = randn(outputs, inputs).to(getattr(torch, dtype))
    x = randn(rows, inputs, seed=1)
    out, unpacked = matmul(dtype, FORMATS[dtype], weight, (outputs, inputs), x)
    assert torch.equal(unpacked, weight.float())
    torch.testing.assert_close(out, reference.linear(x, weight.float()), rtol=1e-5, atol=1e-5 * inputs**0.5)


@pytest.mark.parametrize("rounded", ["bfloat16", "float16"])
def test_weights_round_as_torch_rounds(rounded: str) -> None:
    special = torch.tensor([0.0, -0.0, 1e-8, 3e-6, 6e-5, 65519.0, 65520.0, 1e30, -1e-30, float("inf"), 5.96e-8, 8.9e-8])
    weight = torch.cat([special, randn(500), randn(488) * 1e-5]).view(10, 100)
    _, unpacked = matmul("float32", FORMATS[rounded], weight, (10, 100), randn(1, 100))
    assert torch.equal(unpacked, weight.to(getattr(torch, rounded)).float())


@pytest.mark.parametrize("rows, outputs, inputs", SHAPES)
@pytest.mark.parametrize("wide", [False, True])
def test_int8_matmul(rows: int, outputs: int, inputs: int, wide: bool) -> None:
    weight, x = randn(outputs, inputs), randn(rows, inputs, seed=1)
    out, unpacked = matmul("float32", FORMATS["int8"], weight, (outputs, inputs), x, wide)
    step = torch.nn.functional.pad(weight.abs(), (0, -inputs % 32)).view(outputs, -1, 32).amax(-1) / 127
    step = step.repeat_interleave(32, dim=1)[:, :inputs]
    assert ((unpacked - weight).abs() <= 0.51 * step + 1e-7).all()
    torch.testing.assert_close(out, reference.linear(quantized_rows(x, wide), unpacked), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows, outputs, inputs", [s for s in SHAPES if s[2] % 32 == 0])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_matmul(rows: int, outputs: int, inputs: int, kind: str) -> None:
    blocks = quantize(randn(outputs, inputs).numpy(), GGMLQuantizationType[kind])
    check_blocks(blocks, kind, (outputs, inputs), randn(rows, inputs, seed=1), exact=True)


@pytest.mark.parametrize("rows, outputs, inputs", [(1, 16, 256), (5, 33, 512), (64, 20, 768)])
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_gguf_super_block_matmul(rows: int, outputs: int, inputs: int, kind: str) -> None:
    generator = np.random.default_rng(0)
    size = BYTES_PER_256[kind]
    blocks = generator.integers(0, 256, (outputs, inputs // 256, size), dtype=np.uint8)
    scales = (0.002 + 0.01 * generator.random((outputs, inputs // 256, 2))).astype(np.float16)
    blocks[:, :, :4] = scales.view(np.uint8).reshape(outputs, inputs // 256, 4)
    check_blocks(blocks.reshape(outputs, -1), kind, (outputs, inputs), randn(rows, inputs, seed=1), exact=False)


@pytest.mark.parametrize("inputs", [256, 768])
def test_six_bit_super_blocks_are_packed_as_their_widened_values_are(inputs: int) -> None:
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (20, inputs // 256, 210), dtype=np.uint8)
    scales = (0.0002 + 0.001 * generator.random((20, inputs // 256, 1))).astype(np.float16)
    blocks[:, :, -2:] = scales.view(np.uint8)
    blocks = blocks.reshape(20, -1)
    widened = torch.from_numpy(dequantize(blocks, GGMLQuantizationType.Q6_K).copy())
    x = randn(3, inputs)
    wanted = library().pl_natural_format(SOURCES["Q6_K"])
    out, unpacked = matmul("Q6_K", wanted, torch.from_numpy(blocks), (20, inputs), x)
    expected, expected_unpacked = matmul("float32", FORMATS["int8"], widened, (20, inputs), x)
    assert torch.equal(unpacked, expected_unpacked) and torch.equal(out, expected)


@pytest.mark.parametrize("rows, outputs, inputs", [s for s in SHAPES if s[2] % 32 == 0])
@pytest.mark.parametrize("bits", [4, 8])
def test_matmul_with_a_zero_per_block(rows: int, outputs: int, inputs: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2**bits, (outputs, inputs // 32, 32), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 2**bits, (outputs, inputs // 32, 1), generator=generator)
    scales = (0.01 + 0.1 * torch.rand(zeros.shape, generator=generator)).half()
    stored = values if bits == 8 else values[..., :16] | values[..., 16:] << 4
    blocks = torch.cat([scales.view(torch.uint8), zeros.half().view(torch.uint8), stored], dim=-1).flatten(1)
    meant = ((values.float() - zeros) * scales.float()).flatten(1)
    kind = f"U{bits}Z"
    wanted = library().pl_natural_format(SOURCES[kind])
    for wide in (False, True):
        x = randn(rows, inputs, seed=1)
        out, unpacked = matmul(kind, wanted, blocks, (outputs, inputs), x, wide)
        assert torch.equal(unpacked, meant)
        one_by_one = torch.cat([matmul(kind, wanted, blocks, (outputs, inputs), row[None], wide)[0] for row in x])
        assert torch.equal(out, one_by_one)
        bound = 1e-4 * inputs**0.5 * meant.abs().max().item()
        torch.testing.assert_close(out, reference.linear(quantized_rows(x, wide), meant), rtol=1e-4, atol=bound)


def check_blocks(blocks: np.ndarray, kind: str, shape: tuple[int, int], x: Tensor, *, exact: bool) -> None:
    meant = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind]).copy())
    wanted = library().pl_natural_format(SOURCES[kind])
    _, unpacked = matmul(kind, wanted, torch.from_numpy(blocks), shape, x)
    # Super-blocks have their scales rounded to f16: half a thousandth of the largest value.
    tolerance = 1e-6 if exact else 1e-3 * meant.abs().max().item()
    torch.testing.assert_close(unpacked, meant, rtol=0, atol=tolerance)
    bound = 1e-4 * shape[1] ** 0.5 * max(1.0, meant.abs().max().item())
    for wide in (False, True):
        out, _ = matmul(kind, wanted, torch.from_numpy(blocks), shape, x, wide)
        expected = reference.linear(quantized_rows(x, wide), unpacked)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=bound)


def test_blocks_of_the_wrong_size_are_refused() -> None:
    weight, x = torch.zeros(4, 20, dtype=torch.uint8), torch.zeros(1, 40)
    out, unpacked = torch.empty(1, 4), torch.empty(4, 40)
    status = library().pl_test_matmul(
        SOURCES["Q4_1"], 4, 4, 40, weight.data_ptr(), 1, False, x.data_ptr(), out.data_ptr(), unpacked.data_ptr()
    )
    assert status == 4


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 576, 1000])
def test_rms_norm(size: int) -> None:
    x, weight, out = 3 * randn(1, size), randn(size, seed=1), torch.empty(1, size)
    library().pl_test_rms_norm(x.data_ptr(), weight.data_ptr(), 1e-5, size, out.data_ptr())
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 16, 50, 1536])
def test_silu_mul(size: int) -> None:
    gate, up, out = 8 * randn(1, size), randn(1, size, seed=1), torch.empty(1, size)
    library().pl_test_silu_mul(gate.data_ptr(), up.data_ptr(), size, out.data_ptr())
    expected = reference.silu_mul(torch.cat([gate, up], dim=1))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gate", [-200.0, -90.0, 90.0, 200.0, float("nan")])
def test_silu_of_extremes(gate: float) -> None:
    one, up, out = torch.tensor([gate]), torch.ones(1), torch.empty(1)
    library().pl_test_silu_mul(one.data_ptr(), up.data_ptr(), 1, out.data_ptr())
    torch.testing.assert_close(out, torch.nn.functional.silu(one), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("head_dim", [2, 24, 64, 128, 256])
def test_rope(head_dim: int) -> None:
    x, angles = randn(1, 1, head_dim), randn(1, head_dim // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    expected = reference.rope(x, cos, sin)
    library().pl_test_rope(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), head_dim)
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("group, window", [(1, 0), (2, 5), (3, 0), (5, 20), (8, 1)])
def test_attention(head_dim: int, group: int, window: int, dtype: str) -> None:
    kv_heads, num_slots = 2, 96
    kv_layer = randn(2, num_slots, kv_heads, head_dim).to(getattr(torch, dtype))
    lengths = [1, 2, 15, 16, 17, 50, 33, 20]
    tails = torch.tensor([0, 1, 3, 16, 17, 0, 20, 4], dtype=torch.int32)
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(2))
    rows = [order[:length].tolist() for length in lengths]
    query = randn(len(rows), group * kv_heads, head_dim, seed=3)
    out = torch.full_like(query, torch.nan)
    slots = torch.cat([order[:length] for length in lengths]).int()
    cu_slots = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    pointers = [t.data_ptr() for t in (query, kv_layer, slots, cu_slots, tails)]
    sizes = (len(rows), num_slots, group * kv_heads, kv_heads, head_dim, FORMATS[dtype], window)
    library().pl_test_attention(*pointers, *sizes, head_dim**-0.5, out.data_ptr())
    expected = reference.paged_tree_attention(query, kv_layer, rows, window or None, head_dim**-0.5)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("vocab", [1, 15, 16, 1000])
def test_argmax(vocab: int) -> None:
    logits = torch.randint(-20, 20, (70, vocab), generator=torch.Generator().manual_seed(0)).float()  # many ties
    logits[3] = -torch.inf
    assert native.argmax(logits).tolist() == logits.argmax(-1).tolist()
    assert native.argmax(logits[:0]).tolist() == []


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="this machine's best"):
        native.select_instruction_set("sse9")
