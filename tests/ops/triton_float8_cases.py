"""What FP8 keys and values must hold on the Triton kernels, at small sizes. Run by test_triton_float8.py in a process
of its own: in Triton's interpreter on a CPU, or on a GPU.
"""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.kv_tensor import FLOAT8, as_float8, raw
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from paceline.models.fused_decoder import FusedDecoder
from paceline.ops.triton.float8 import narrowed, widened_pairs
from paceline.ops.triton.fused_qkv import Heads, norm_qkv_rope
from paceline.ops.triton.tiles import Tile
from tests.forward_batches import Pool, Rows
from tests.models.small_models import hf_config_dict, kv_cache, random_weights

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"
ALL = torch.arange(256, dtype=torch.uint8).view(FLOAT8)
HEADS, HIDDEN, EPS = Heads(num_q=3, num_kv=2, dim=32), 48, 1e-5
TREE = DraftTree([3, 4, 5], [-1, 0, 0])


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@triton.jit
def _widen_kernel(words, even, odd, COUNT: tl.constexpr) -> None:
    at = tl.arange(0, COUNT)
    first, second = widened_pairs(tl.load(words + at), even.dtype.element_ty)
    tl.store(even + at, first)
    tl.store(odd + at, second)


@triton.jit
def _narrow_kernel(x, out, COUNT: tl.constexpr) -> None:
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out + at, narrowed(tl.load(x + at)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_number_is_widened_to_itself_in_both_places_of_a_word(dtype: torch.dtype) -> None:
    pairs = torch.stack([raw(ALL), raw(ALL).flip(0)], dim=1)  # [256, 2]
    even, odd = (torch.zeros(256, dtype=dtype, device=DEVICE) for _ in range(2))
    _widen_kernel[(1,)](pairs.view(torch.int16).flatten().to(DEVICE), even, odd, COUNT=256, num_warps=1)
    torch.testing.assert_close(even.cpu(), ALL.to(dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(odd.cpu(), raw(ALL).flip(0).view(FLOAT8).to(dtype), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(even.signbit().cpu()[:255], ALL.float().signbit()[:255]), "also of zeros"


def test_what_is_stored_is_the_nearest_number_ties_to_even_and_at_most_the_largest() -> None:
    numbers = ALL.float()[ALL.float().isfinite()].sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([torch.nextafter(ties, x) for x in (torch.tensor(torch.inf), torch.tensor(-torch.inf))])
    far = torch.tensor([449.0, 464.0, 480.0, 1e9, 3e38, torch.inf, -449.0, -1e30, -torch.inf, torch.nan, 0.0, -0.0])
    wide = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-12, 12, 3000, base=2.0)
    x = torch.cat([numbers, ties, near, far, wide, wide.bfloat16().float()])
    x = torch.nn.functional.pad(x, (0, -len(x) % 128))
    found = torch.zeros(len(x), dtype=torch.uint8, device=DEVICE)
    _narrow_kernel[(len(x) // 128,)](x.to(DEVICE), found, COUNT=128, num_warps=1)
    expected = raw(as_float8(x))
    is_number = ~x.isnan()
    assert torch.equal(found.cpu()[is_number], expected[is_number])
    assert bool(found.cpu()[~is_number].view(FLOAT8).float().isnan().all())
    assert as_float8(torch.tensor([448.1, -1e9])).tolist() == [448.0, -448.0], "the twin itself"


@pytest.mark.parametrize("head_norms", [False, True])
def test_keys_and_values_are_stored_as_the_nearest_fp8_numbers(head_norms: bool) -> None:
    """Of what the kernel stores without it; queries and slots of nobody stay as they are."""
    num_rows, num_slots = 18, 40
    x, weight = random(num_rows, HIDDEN, seed=0), random((3 + 2 * 2) * 32, HIDDEN, seed=1)
    angles, norms = random(50, 16, seed=2), random(2, 32, seed=3) if head_norms else None
    positions = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(num_rows, dtype=torch.int32, device=DEVICE) * 2
    slots[-1] = -1
    made = []
    for dtype in (torch.float32, FLOAT8):
        query = torch.zeros(num_rows, 3, 32, device=DEVICE)
        kv = torch.full((2, num_slots, 2, 32), 7.0, device=DEVICE).to(dtype)
        norm_qkv_rope(
            x, x, weight, None, norms, angles.cos(), angles.sin(), positions, slots, query, kv, HEADS, EPS,
            Tile(out=16, into=32, warps=2, stages=3),
        )  # fmt: skip
        made.append((query, kv))
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(raw(as_float8(made[0][1])), raw(made[1][1]))
    assert len(made[1][1].float().unique()) > 50, "it writes numbers of many sizes"


def small_decoder(device: str) -> Decoder:
    names = hf_config_dict("llama", head_dim=32)
    config = config_from_dict(names)
    return Decoder(config, random_weights(config), device=device, batch_invariant=True, kv_dtype=FLOAT8)


def test_a_pass_is_that_of_the_twin_and_a_row_does_not_depend_on_its_company() -> None:
    twin, fused = small_decoder("cpu"), FusedDecoder(small_decoder(DEVICE))
    assert fused.dtype == FLOAT8 and fused.hidden_dtype == torch.float32
    pool = Pool(2, 64)
    prompt = [5, 9, 2, 7, 11, 3, 8]
    caches: list[Any] = [kv_cache(decoder, pool.num_slots) for decoder in (twin, fused)]
    logits = [
        decoder.forward(pool.batch(Rows(0, 0, prompt, EMPTY_TREE)), cache).logits.cpu()
        for decoder, cache in zip((twin, fused), caches, strict=True)
    ]
    largest = logits[0].abs().max().item()
    # A key that lies between two FP8 numbers may be rounded to the other one: a step of one in eight.
    assert (logits[0] - logits[1]).abs().max().item() < 0.02 * largest
    assert (raw(caches[0]) != raw(caches[1]).cpu()).float().mean().item() < 0.01
    beside = [Rows(0, 7, [4], TREE), Rows(1, 0, prompt, EMPTY_TREE)]
    alone = fused.forward(pool.batch(Rows(0, 7, [4], TREE), device=DEVICE), caches[1]).logits
    company = fused.forward(pool.batch(*beside, device=DEVICE), caches[1]).logits[: len(alone)]
    again = fused.forward(pool.batch(Rows(0, 7, [4], EMPTY_TREE), device=DEVICE), caches[1]).logits
    if INTERPRETED:  # its products are numpy's, which hang on the number of lines
        torch.testing.assert_close(company, alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(again[0], alone[0], rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(company, alone) and torch.equal(again[0], alone[0])
