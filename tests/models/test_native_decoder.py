"""The native decoder against the torch one, and its bits against themselves in every way a pass can be cut."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quantize
from torch import Tensor

from paceline.core.forward import ForwardBatch, TokenDraws
from paceline.core.kv_tensor import allocate_kv
from paceline.core.model_config import ModelConfig
from paceline.core.tree import DraftTree
from paceline.core.weights import QuantizedTensor, Weights
from paceline.errors import InvalidOptionError, InvalidRequestError
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from paceline.models.native import NativeDecoder
from paceline.ops import native
from tests.forward_batches import Pool, Rows
from tests.models.small_models import VARIANTS, hf_config_dict, random_weights, tokens
from tests.placement import NUM_THREADS, OFFSETS, at_offset, weights_at_offset
from tests.toy import drawn

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))

TREE = DraftTree([3, 4, 5, 6, 7, 8, 9], [-1, 0, 0, -1, 3, 2, 4])
# (dtype, quantization) in which bits are compared; int16: of keys and values alone
PATHS = [
    ("float32", None),
    ("bfloat16", None),
    ("float16", None),
    ("float32", "int8"),
    ("float16", "gguf"),
    ("int16", "gguf"),
]

NOT_DRAWN = -2  # PL_NOT_DRAWN


def blocks(weights: Weights, kind: str) -> dict[str, Tensor | QuantizedTensor]:
    """The same weights, matrices as GGUF blocks."""
    return {
        name: QuantizedTensor(
            torch.from_numpy(quantize(weight.numpy(), GGMLQuantizationType[kind])), kind, tuple(weight.shape)
        )
        if isinstance(weight, Tensor) and weight.dim() == 2
        else weight
        for name, weight in weights.items()
    }


def small_config(variant: str, **changes: Any) -> ModelConfig:
    return replace(config_from_dict(hf_config_dict(variant)), **changes)


def kv_cache(decoder: NativeDecoder | Decoder, num_slots: int) -> Tensor:
    return allocate_kv(decoder.config, num_slots, decoder.dtype, decoder.device)


def run(decoder: NativeDecoder | Decoder, batch: ForwardBatch, num_slots: int) -> Tensor:
    return decoder.forward(batch, kv_cache(decoder, num_slots)).logits


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith("gemma3")])
def test_families_match_the_torch_decoder(variant: str, instruction_set: str) -> None:
    config = small_config(variant)
    weights = random_weights(config)
    decoder, twin = NativeDecoder(config, weights, num_threads=2), Decoder(config, weights)
    pool = Pool(2, 80, block_size=4)  # smaller than what a kernel takes at once
    prompt = tokens(config, 40)
    batch = pool.batch(Rows(0, 0, prompt, TREE), Rows(1, 0, prompt[7:31]))
    hidden_layers = (0, 2, config.num_layers, config.num_layers + 1)
    caches = kv_cache(decoder, pool.num_slots), kv_cache(twin, pool.num_slots)
    found = decoder.forward(batch, caches[0], hidden_layers=hidden_layers)
    expected = twin.forward(batch, caches[1], hidden_layers=hidden_layers)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.hidden, expected.hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*caches, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(2, 2, 64), (4, 1, 128), (8, 1, 72), (3, 1, 256), (10, 2, 8)])
def test_head_shapes_match_the_torch_decoder(heads: int, kv_heads: int, head_dim: int) -> None:
    config = small_config("qwen3", num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, num_layers=2)
    weights = random_weights(config)
    pool = Pool(1, 80)
    batch = pool.batch(Rows(0, 0, tokens(config, 45), TREE))
    found = run(NativeDecoder(config, weights), batch, pool.num_slots)
    torch.testing.assert_close(found, run(Decoder(config, weights), batch, pool.num_slots), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_blocks_stay_close_to_their_widened_values(variant: str, kind: str) -> None:
    config = small_config(variant, hidden_size=96, intermediate_size=160, head_dim=32, num_heads=6)
    quantized = blocks(random_weights(config), kind)
    pool = Pool(1, 80)
    batch = pool.batch(Rows(0, 0, tokens(config, 45)))
    found = run(NativeDecoder(config, quantized, quantization="gguf"), batch, pool.num_slots)
    expected = run(Decoder(config, quantized), batch, pool.num_slots)
    # Activations have 8 bits: the error is a few percent of the logits' spread; a wrong scale or zero is far above.
    assert (found - expected).std() < 0.08 * expected.std()


def test_int8_stays_close_to_float_and_to_blocks() -> None:
    config = small_config("llama", hidden_size=96, intermediate_size=160, head_dim=32, num_heads=6)
    weights = random_weights(config)
    pool = Pool(1, 80)
    batch = pool.batch(Rows(0, 0, tokens(config, 45)))
    for given in (weights, blocks(weights, "Q4_1")):
        expected = run(Decoder(config, given), batch, pool.num_slots)
        found = run(NativeDecoder(config, given, quantization="int8"), batch, pool.num_slots)
        assert (found - expected).std() < 0.08 * expected.std()


def bit_decoder(
    path: tuple[str, str | None], num_threads: int = 2, variant: str = "mistral-window", offset_bytes: int = 0
) -> NativeDecoder:
    dtype, quantization = getattr(torch, path[0]), path[1]
    config = small_config(variant, hidden_size=96, intermediate_size=160, head_dim=32, num_heads=6, num_layers=2)
    weights: Weights = weights_at_offset(random_weights(config), offset_bytes)
    if quantization == "gguf":
        weights = blocks(weights, "Q4_1")
    return NativeDecoder(
        config,
        weights,
        dtype=dtype if dtype.is_floating_point else torch.float16,
        quantization=quantization,
        num_threads=num_threads,
        kv_dtype=dtype,
    )


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_a_row_has_the_same_bits_in_every_batch_size(path: tuple[str, str | None], instruction_set: str) -> None:
    decoder = bit_decoder(path)
    prompts = [tokens(decoder.config, 3 + i % 5, seed=i) for i in range(64)]
    pool = Pool(64, 8)
    cache = kv_cache(decoder, pool.num_slots)
    decoder.forward(pool.batch(*(Rows(i, 0, p[:-1]) for i, p in enumerate(prompts))), cache)
    last = [Rows(i, len(p) - 1, p[-1:]) for i, p in enumerate(prompts)]
    alone = torch.cat([decoder.forward(pool.batch(rows), cache).logits for rows in last])
    for size in range(2, 65):
        assert torch.equal(decoder.forward(pool.batch(*last[:size]), cache).logits, alone[:size]), size


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("variant", ["qwen3", "mistral-window"])
def test_every_chunking_has_the_same_bits(path: tuple[str, str | None], variant: str, instruction_set: str) -> None:
    decoder = bit_decoder(path, variant=variant)
    prompt = tokens(decoder.config, 70)
    pool = Pool(1, 80)
    whole_cache = kv_cache(decoder, pool.num_slots)
    whole = decoder.forward(pool.batch(Rows(0, 0, prompt)), whole_cache).logits
    for size in (1, 2, 3, 7, 16, 33, 69):
        cache = kv_cache(decoder, pool.num_slots)
        parts = [
            decoder.forward(pool.batch(Rows(0, start, prompt[start : start + size])), cache).logits
            for start in range(0, len(prompt), size)
        ]
        assert torch.equal(torch.cat(parts), whole), size
        assert torch.equal(cache, whole_cache), size


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("num_committed", [1, 14, 15, 16, 40])
def test_tree_rows_have_the_bits_of_committed_rows(
    path: tuple[str, str | None], num_committed: int, instruction_set: str
) -> None:
    decoder = bit_decoder(path)
    prompt = tokens(decoder.config, num_committed)
    deep = DraftTree.merge([TREE, DraftTree.chain(tokens(decoder.config, 20, seed=3))])
    pool = Pool(1, 80)
    logits = run(decoder, pool.batch(Rows(0, 0, prompt, deep)), pool.num_slots)
    for node in range(len(deep)):
        path_tokens = prompt + [deep.token_ids[i] for i in deep.ancestors(node)]
        committed = run(decoder, pool.batch(Rows(0, 0, path_tokens)), pool.num_slots)
        assert torch.equal(logits[num_committed + node], committed[-1]), node


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_threads_do_not_change_bits(path: tuple[str, str | None]) -> None:
    decoder = bit_decoder(path, num_threads=1)
    pool = Pool(3, 80)
    prompt = tokens(decoder.config, 60)
    batch = pool.batch(Rows(0, 0, prompt, TREE), Rows(1, 0, prompt[:1]), Rows(2, 0, prompt[:33]))
    one = run(decoder, batch, pool.num_slots)
    for num_threads in (2, 3, 5):
        decoder.set_num_threads(num_threads)
        assert torch.equal(run(decoder, batch, pool.num_slots), one), num_threads


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("num_threads", NUM_THREADS)
def test_bits_do_not_depend_on_where_weights_and_cache_lie(
    path: tuple[str, str | None], num_threads: int, instruction_set: str
) -> None:
    pool = Pool(2, 20)
    batch: ForwardBatch | None = None
    expected: Tensor | None = None
    for offset in OFFSETS:
        decoder = bit_decoder(path, num_threads, offset_bytes=offset)
        prompt = tokens(decoder.config, 11)
        batch = batch or pool.batch(Rows(0, 0, prompt, TREE), Rows(1, 0, prompt[:1]))
        for cache_offset in (0, offset):
            logits = decoder.forward(batch, at_offset(kv_cache(decoder, pool.num_slots), cache_offset)).logits
            expected = logits if expected is None else expected
            assert torch.equal(logits, expected), (offset, cache_offset)


def test_skipped_layers_leave_the_stream_alone() -> None:
    config = small_config("llama")
    weights = random_weights(config)
    decoder, twin = NativeDecoder(config, weights), Decoder(config, weights)
    pool = Pool(1, 80)
    batch = pool.batch(Rows(0, 0, tokens(config, 20)))
    for layers in ([], [1], [0, 2]):
        options: dict[str, Any] = {"layers": layers, "hidden_layers": (1, 2)}
        found = decoder.forward(batch, kv_cache(decoder, pool.num_slots), **options)
        expected = twin.forward(batch, kv_cache(twin, pool.num_slots), **options)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.hidden, expected.hidden, rtol=1e-4, atol=1e-4)


def test_only_wanted_logits_are_given() -> None:
    decoder = bit_decoder(("float32", None))
    pool = Pool(2, 80)
    parts = Rows(0, 0, tokens(decoder.config, 9)), Rows(1, 0, tokens(decoder.config, 5))
    every = run(decoder, pool.batch(*parts), pool.num_slots)
    last = run(decoder, pool.batch(*parts, all_logits=False), pool.num_slots)
    assert torch.equal(last, every[[8, 13]])
    none = replace(pool.batch(*parts), logits_rows=torch.zeros(0, dtype=torch.int32))
    assert run(decoder, none, pool.num_slots).shape == (0, decoder.config.vocab_size)


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_rows_without_logits_may_leave_in_the_last_layer(path: tuple[str, str | None], instruction_set: str) -> None:
    """Those whose logits are wanted, keys, values and hidden states are as if all were."""
    decoder = bit_decoder(path)
    pool = Pool(4, 90)
    long, short = tokens(decoder.config, 70), tokens(decoder.config, 9, seed=2)
    parts = Rows(0, 0, long), Rows(1, 0, short, TREE), Rows(2, 0, short[:1]), Rows(3, 0, long[:33])
    every = pool.batch(*parts)
    tree = range(78, 86)  # the second prompt's last row, and its nodes
    for wanted in ([69, *tree, 86, 119], [*tree], [0, *tree, 86], [69, 78, 119], [68, 70, *tree], [119], [118, 119]):
        some = replace(every, logits_rows=torch.tensor(wanted, dtype=torch.int32))
        for hidden_layers in ((), (0, 1), (1, 2, 3)):
            caches = [kv_cache(decoder, pool.num_slots) for _ in range(2)]
            all_rows = decoder.forward(every, caches[0], hidden_layers=hidden_layers)
            found = decoder.forward(some, caches[1], hidden_layers=hidden_layers)
            assert torch.equal(found.logits, all_rows.logits[wanted]), wanted
            assert torch.equal(caches[1], caches[0]), wanted
            assert not hidden_layers or torch.equal(found.hidden, all_rows.hidden), wanted  # type: ignore[arg-type]


def draws_of(temperatures: Sequence[float]) -> TokenDraws:
    count = len(temperatures)
    seeds = np.arange(count, dtype=np.int64) * 2**59 - 7
    return TokenDraws(np.array(temperatures, dtype=np.float32), seeds, np.arange(20, 20 + count, dtype=np.int32))


@pytest.mark.parametrize("vocab_size", [16, 63, 64, 200, 1000])
def test_tokens_are_drawn_on_the_way_as_the_host_draws_them(vocab_size: int, instruction_set: str) -> None:
    config = small_config("llama", vocab_size=vocab_size, tie_word_embeddings=False)
    decoder = NativeDecoder(config, random_weights(config))
    pool = Pool(1, 80)
    every = pool.batch(Rows(0, 0, tokens(config, 60)))
    temperatures = [(0.0, 0.3, 1.0, 1.7)[i % 4] for i in range(60)]
    batch = replace(every, draws=draws_of(temperatures))
    output = decoder.forward(batch, kv_cache(decoder, pool.num_slots))
    assert batch.draws is not None and output.tokens == drawn(output.logits, batch.draws)
    assert output.tokens != output.logits.argmax(-1).tolist()
    assert torch.equal(output.logits, decoder.forward(every, kv_cache(decoder, pool.num_slots)).logits)


def along_drafts(batch: ForwardBatch, tokens: list[int | None]) -> list[int | None]:
    """Of every row's token those that a pass draws: not those of nodes that the walk down their draft does not meet."""
    rows = batch.logits_rows.tolist()
    met: set[int] = set()
    for row, token in zip(rows, tokens, strict=True):  # a node stands behind its parent
        if not batch.is_node[row]:
            root, end, parent = row, row + 1, -1
            while end < batch.num_rows and batch.is_node[end]:
                end += 1
            while token is not None:
                met.add(root)
                nodes = range(root + 1, end)
                on = [i for i in nodes if batch.parents[i] == parent and batch.token_ids[i] == token and i in rows]
                if not on:
                    break
                root = parent = on[0]
                token = tokens[rows.index(root)]
            met.add(root)
    return [token if row in met else NOT_DRAWN for row, token in zip(rows, tokens, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_along_a_draft_only_the_nodes_on_the_way_are_drawn(temperature: float, instruction_set: str) -> None:
    """Several requests, some with drafts that hold the path that the tokens take, and others beside it."""
    config = small_config("llama", vocab_size=40, tie_word_embeddings=False)
    decoder = NativeDecoder(config, random_weights(config))
    pool = Pool(4, 80)
    prompts = [tokens(config, size, seed=size) for size in (20, 7, 1, 33)]

    def outcome(drafts: Sequence[DraftTree]) -> tuple[ForwardBatch, list[int | None], list[int | None]]:
        parts = [Rows(i, 0, prompt, draft) for i, (prompt, draft) in enumerate(zip(prompts, drafts, strict=True))]
        batch = pool.batch(*parts)
        count = batch.num_rows
        at = batch.positions.numpy() + 1  # as in the engine: keyed by the request and the place in its text
        seeds = batch.req_ids.numpy().astype(np.int64)
        batch = replace(batch, draws=TokenDraws(np.full(count, temperature, dtype=np.float32), seeds, at))
        output = decoder.forward(batch, kv_cache(decoder, pool.num_slots))
        assert batch.draws is not None and output.tokens is not None
        return batch, output.tokens, drawn(output.logits, batch.draws)

    drafts = [DraftTree([], [])] * 4
    depths = [0, 2, 3, 1]  # nodes on the way, of each request's draft
    for _ in range(max(depths)):  # one node further, by what the pass before says; beside it two that are wrong
        batch, _, every = outcome(drafts)
        for i, depth in enumerate(depths):
            path = [node for node in range(len(drafts[i])) if node % 3 == 2]
            if len(path) < depth:
                first = int(batch.cu_query[i]) + len(prompts[i])
                token = every[first - 1 if not path else first + path[-1]]
                assert token is not None
                above = path[-1] if path else -1
                wrong = [(token + 1) % 40, (token + 2) % 40]
                own = drafts[i]
                drafts[i] = DraftTree([*own.token_ids, *wrong, token], [*own.parents, above, above, above])
    batch, found, every = outcome(drafts)
    expected = along_drafts(batch, every)
    assert found == expected
    # Of a request with d right nodes: its prompt's rows and d nodes. The two wrong ones beside each are left out.
    assert found.count(NOT_DRAWN) == 2 * sum(depths)


def test_a_temperature_without_an_inverse_is_left_to_the_host() -> None:
    decoder = bit_decoder(("float32", None))
    pool = Pool(1, 80)
    batch = replace(pool.batch(Rows(0, 0, tokens(decoder.config, 3))), draws=draws_of([1e-37, 1e-20, 1.0]))
    found = decoder.forward(batch, kv_cache(decoder, pool.num_slots)).tokens
    assert found is not None and found[0] is None and None not in found[1:]


@pytest.mark.parametrize("vocab_size", [16, 63, 64, 200, 1000])
def test_the_likeliest_tokens_are_found_on_the_way(vocab_size: int, instruction_set: str) -> None:
    config = small_config("llama", vocab_size=vocab_size, tie_word_embeddings=False)
    weights = random_weights(config)
    head = weights["lm_head.weight"]
    head[vocab_size // 2] = head[3]  # ties: the first one is meant
    prompt = tokens(config, 20)
    pool = Pool(1, 80)
    batch = pool.batch(Rows(0, 0, prompt, DraftTree([3, 4], [-1, 0])))
    batch = replace(batch, draws=draws_of([0.0] * len(batch.logits_rows)))
    decoder = NativeDecoder(config, weights)
    output = decoder.forward(batch, kv_cache(decoder, pool.num_slots))
    assert output.tokens == along_drafts(batch, output.logits.argmax(-1).tolist())
    for value in (torch.nan, torch.inf, -torch.inf):
        spoilt = weights | {"lm_head.weight": head.clone()}
        spoilt["lm_head.weight"][vocab_size - 1] = value
        decoder = NativeDecoder(config, spoilt)
        found = decoder.forward(batch, kv_cache(decoder, pool.num_slots))
        finite = found.logits.isfinite().all(-1).tolist()
        best = found.logits.argmax(-1).tolist()
        expected = [token if fine else None for token, fine in zip(best, finite, strict=True)]
        assert found.tokens == along_drafts(batch, expected)
        assert not all(finite)


def test_an_empty_pass_gives_nothing() -> None:
    decoder = bit_decoder(("float32", None))
    zeros = torch.zeros(0, dtype=torch.int32)
    tables, bounds = torch.zeros(0, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    batch = ForwardBatch(zeros, zeros, zeros, zeros, zeros, zeros.bool(), zeros, tables, bounds, zeros, 4)
    assert run(decoder, batch, 16).shape == (0, decoder.config.vocab_size)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("token_ids", 10_000, "vocabulary"),
        ("token_ids", -1, "vocabulary"),
        ("slot_mapping", 10_000, "KV slot"),
        ("context_lens", 10_000, "KV slot"),
        ("block_tables", -1, "KV slot"),
        ("parents", 4, "rows"),
        ("req_ids", 3, "rows"),
        ("logits_rows", 9, "rows"),
    ],
)
def test_indices_out_of_range_are_refused(field: str, value: int, message: str) -> None:
    decoder = bit_decoder(("float32", None))
    pool = Pool(1, 80)
    batch = pool.batch(Rows(0, 0, [1, 2, 3]))
    values = getattr(batch, field).clone()
    values.view(-1)[0] = value
    with pytest.raises(InvalidRequestError, match=message):
        run(decoder, replace(batch, **{field: values}), pool.num_slots)


def test_options_that_cannot_be_honoured_are_refused() -> None:
    config = small_config("llama")
    weights = random_weights(config)
    with pytest.raises(InvalidOptionError, match="dtype"):
        NativeDecoder(config, weights, dtype=torch.float64)
    with pytest.raises(InvalidOptionError, match="unknown"):
        NativeDecoder(config, weights, quantization="int3")
    with pytest.raises(InvalidOptionError, match="these weights have none"):
        NativeDecoder(config, weights, quantization="gguf")
    decoder = NativeDecoder(config, weights)
    batch = Pool(1, 8).batch(Rows(0, 0, [1]))
    with pytest.raises(InvalidOptionError, match="KV cache"):
        decoder.forward(batch, kv_cache(decoder, 8).bfloat16())
    with pytest.raises(InvalidOptionError, match="layers"):
        decoder.forward(batch, kv_cache(decoder, 8), layers=[3])
    with pytest.raises(InvalidOptionError, match="hidden_layers"):
        decoder.forward(batch, kv_cache(decoder, 8), hidden_layers=[5])
