"""Keys and values in 16-bit integers: what is stored, how near it is, and where it is the default.

That bits depend on nothing else is tested with the other formats: test_native_decoder.py, test_native_long_context.py.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.core.kv_tensor import TILE_SLOTS, allocate_kv
from paceline.core.tree import EMPTY_TREE
from paceline.engine.config import EngineConfig, resolve_config
from paceline.errors import InvalidOptionError, InvalidRequestError
from paceline.kv.storage import kv_bytes_per_token, move_slots
from paceline.models.loader import load_model
from paceline.models.native import NativeDecoder
from paceline.ops import native
from tests.forward_batches import Pool, Rows
from tests.models.small_gguf import BLOCK_CONFIG, write_model
from tests.models.small_models import hf_model, random_weights, tokens
from tests.models.test_native_decoder import TREE, small_config
from tests.models.test_native_kv_bytes import stored

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))

CONFIG = small_config("llama", head_dim=48, max_position=2048)  # one and a half registers of pairs


def decoder_of(kv_dtype: torch.dtype, num_threads: int = 1) -> NativeDecoder:
    return NativeDecoder(CONFIG, random_weights(CONFIG), num_threads=num_threads, kv_dtype=kv_dtype)


def cache_of(decoder: NativeDecoder, pool: Pool) -> Tensor:
    return allocate_kv(CONFIG, pool.num_slots, decoder.dtype, decoder.device)


def widened(cache: Tensor) -> Tensor:
    """[layers, 2, slots, heads, head_dim] float32, out of the tiles of ops/native/src/kernels.h."""
    layers, _, num_slots, heads, _ = cache.shape
    tiles = cache.reshape(layers, 2, num_slots // TILE_SLOTS, heads, -1)
    size = CONFIG.head_dim * TILE_SLOTS
    scales = tiles[..., size:].contiguous().view(torch.float32).transpose(-1, -2)  # [layers, 2, tiles, slots, heads]
    keys = tiles[:, 0, ..., :size].unflatten(-1, (CONFIG.head_dim // 2, TILE_SLOTS, 2)).permute(0, 1, 4, 2, 3, 5)
    values = tiles[:, 1, ..., :size].unflatten(-1, (TILE_SLOTS // 2, CONFIG.head_dim, 2)).permute(0, 1, 3, 5, 2, 4)
    shape = (layers, num_slots, heads, CONFIG.head_dim)
    numbers = torch.stack([keys.reshape(shape), values.reshape(shape)], dim=1)
    return numbers.float() * scales.reshape(layers, 2, num_slots, heads, 1)


def test_what_is_stored_is_within_half_a_step(instruction_set: str) -> None:
    exact, cache = stored(CONFIG, torch.int16)
    found = widened(cache)[0]
    step = exact.abs().amax(-1, keepdim=True) / 8191
    assert ((exact - found).abs() <= 0.51 * step + 1e-9).all()
    assert ((found.abs().amax((-2, -1)) > 0).sum(-1) == 40).all()  # slots, of keys and of values


@pytest.mark.parametrize("context", [40, 600])  # the longer one has three stretches, and is shared by threads
def test_logits_are_nearer_than_with_float16(context: int, instruction_set: str) -> None:
    pool = Pool(1, context + 16)
    prompt = tokens(CONFIG, context)
    logits = {}
    for kv_dtype in (torch.float32, torch.float16, torch.int16):
        decoder = decoder_of(kv_dtype)
        cache = cache_of(decoder, pool)
        whole = decoder.forward(pool.batch(Rows(0, 0, prompt[:-1], EMPTY_TREE)), cache).logits
        last = decoder.forward(pool.batch(Rows(0, context - 1, prompt[-1:], TREE)), cache).logits
        logits[kv_dtype] = torch.cat([whole, last])
    exact = logits[torch.float32]
    half, short = (float((logits[dtype] - exact).square().mean()) for dtype in (torch.float16, torch.int16))
    assert 0 < short < half


def test_large_numbers_and_zeros_are_stored(instruction_set: str) -> None:
    """A head of zeros, and a value beyond float16."""
    weights = random_weights(CONFIG)
    name = next(name for name in weights if name.endswith("layers.0.self_attn.v_proj.weight"))
    weights[name] = weights[name] * 1e6
    weights[name][: CONFIG.head_dim] = 0
    pool = Pool(1, 32)
    batch = pool.batch(Rows(0, 0, tokens(CONFIG, 30), EMPTY_TREE))
    exact, found = (
        decoder.forward(batch, cache_of(decoder, pool)).logits
        for decoder in (NativeDecoder(CONFIG, weights, num_threads=1, kv_dtype=d) for d in (torch.float32, torch.int16))
    )
    assert torch.isfinite(found).all() and (found - exact).std() < 0.01 * exact.std()


def test_memory_is_little_more_than_that_of_float16() -> None:
    half, short = (kv_bytes_per_token(CONFIG, dtype) for dtype in (torch.float16, torch.int16))
    assert short == half * (1 + 2 / CONFIG.head_dim)
    assert cache_of(decoder_of(torch.int16), Pool(1, 16)).nbytes == 16 * short


def test_it_is_the_default_beside_quantized_weights_where_it_is_faster(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, hf_model("llama", **BLOCK_CONFIG), "Q4_1")
    is_fast = native.instruction_set() == "avx512-vnni"
    default = load_model(str(path), device="cpu", quiet=True)
    assert default.decoder.dtype == (torch.int16 if is_fast else torch.float16)
    assert ("int16 keys and values" in default.execution) == is_fast
    asked = load_model(str(path), device="cpu", kv_cache_dtype="float16", quiet=True)
    assert asked.decoder.dtype == torch.float16
    assert load_model(str(path), device="cpu", dtype="float32", quiet=True).decoder.dtype == torch.float32


@pytest.mark.parametrize("moves", [[(3, 5)], [(17, 2), (2, 17), (30, 31)], [(33, 32), (34, 33), (35, 34), (1, 35)]])
def test_moved_slots_hold_what_was_where_they_came_from(moves: list[tuple[int, int]]) -> None:
    cache = stored(CONFIG, torch.int16)[1]
    expected = widened(cache)
    sources, targets = zip(*moves, strict=True)
    expected[:, :, targets] = expected[:, :, sources]
    move_slots(cache, moves)
    assert torch.equal(widened(cache), expected)


def test_slots_outside_the_cache_are_not_moved() -> None:
    cache = stored(CONFIG, torch.int16)[1]
    before = cache.clone()
    with pytest.raises(InvalidRequestError, match="outside the cache"):
        move_slots(cache, [(0, 1), (0, cache.shape[2])])
    assert torch.equal(cache, before)


def test_blocks_that_are_no_whole_tiles_are_refused() -> None:
    decoder, pool = decoder_of(torch.int16), Pool(1, 32, block_size=8)
    with pytest.raises(InvalidRequestError, match="multiple of 16 slots"):
        decoder.forward(pool.batch(Rows(0, 0, tokens(CONFIG, 9), EMPTY_TREE)), cache_of(decoder, pool))
    with pytest.raises(InvalidOptionError, match="block_size 8 is no multiple of 16"):
        resolve_config(EngineConfig(block_size=8), CONFIG, torch.int16, torch.device("cpu"), 1 << 30)


def test_heads_that_fill_no_register_are_refused() -> None:
    config = small_config("llama", head_dim=8)
    with pytest.raises(InvalidOptionError, match="multiple of 16 numbers, but this model's have 8"):
        NativeDecoder(config, random_weights(config), kv_dtype=torch.int16)
