"""What the Triton kernels of drafts must hold beside their plain twins: each kernel, and whole drafts node by node. Run
by test_triton_drafts.py in a process of its own, in Triton's interpreter or on a GPU."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.core.tree import DraftTree
from paceline.models.drafters.eagle import Eagle, EagleConfig
from paceline.models.drafters.eagle3 import Eagle3, Eagle3Config
from paceline.models.drafters.joined import joined_weights
from paceline.models.rope import rope_tables
from paceline.ops.random import id_constants
from paceline.ops.triton.draft_attention import KEYS, PathScratch, attend_paths
from paceline.ops.triton.draft_top import head_top, num_stretches
from paceline.ops.triton.fused_linear import linear_rows, split_sizes
from paceline.ops.triton.tiles import Tile
from paceline.spec.feature.draft_inputs import DraftInputs, DraftViews, RequestInts
from paceline.spec.feature.draft_levels import DraftRoom, DraftShape, PlainDraft, plain_attend, plain_top
from paceline.spec.feature.fused_draft import FusedDraft
from paceline.spec.tree_answers import read_trees

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"
NUM_REQUESTS, NUM_LEVELS, VOCAB, HIDDEN = 3, 4, 150, 32
NUM_CONTEXT_SLOTS, TABLE_ROWS = 480, [2, 0, 1]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def make_views(
    lengths: list[int],
    scales: list[float],
    *,
    hidden: Tensor | None = None,
    vocab: int = VOCAB,
    counts: list[int] | None = None,
    num_pairs: int = 2,
    **limits: list[Any],
) -> DraftViews:
    count = len(lengths)
    inputs, rng = DraftInputs(count, num_pairs, NUM_LEVELS, torch.device(DEVICE)), np.random.default_rng(1)
    host, counts = inputs.host(count), counts or [1] * count
    given = {"widths": [3] * count, "depths": [NUM_LEVELS] * count, "num_nodes": [9] * count} | limits
    rows = zip(counts, TABLE_ROWS, lengths, given["widths"], given["depths"], given["num_nodes"], strict=False)
    host.requests()[:] = [RequestInts(*row) for row in rows]
    table = torch.randperm(NUM_CONTEXT_SLOTS, generator=torch.Generator().manual_seed(1)).int().view(3, -1)
    for i, (pairs, length) in enumerate(zip(counts, lengths, strict=True)):
        if pairs:
            own = table[TABLE_ROWS[i], length - pairs : length]
            host.pairs("slots")[i, -pairs:] = own
            own.zero_()  # a draft writes them
            host.pairs("positions")[i, -pairs:] = range(length - pairs, length)
            host.pairs("next_tokens")[i, -pairs:] = rng.integers(0, 96, pairs)
    host.floats("scales")[:] = scales
    host.floats("lowest")[:] = given.get("lowest", [-1e29] * count)
    host.floats("followed")[:] = given.get("followed", [-np.inf] * count)
    host.noise_keys()[:] = rng.integers(-(2**31), 2**31, host.noise_keys().shape)
    inputs.send(count)
    constants = torch.from_numpy(id_constants(vocab).view(np.int32).copy()).to(DEVICE)
    return inputs.views(count, torch.zeros(0) if hidden is None else hidden, table.to(DEVICE), constants)


@pytest.mark.parametrize(("width", "depth"), [(1, 0), (3, 2), (17, NUM_LEVELS)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "parts"), [(6, 2, 64, 1), (2, 2, 24, 3)])
def test_nodes_see_their_context_and_their_ancestors(
    width: int, depth: int, heads: int, kv_heads: int, dim: int, parts: int
) -> None:
    """Of each request's rows the last ones ask; where there are many nodes one product does not see them all."""
    assert 17 * NUM_LEVELS > KEYS
    given = make_views([1, 64, 131], [0.0] * 3)
    first = NUM_CONTEXT_SLOTS
    kv = random(2, first + NUM_REQUESTS * NUM_LEVELS * width, kv_heads, dim, seed=2)
    query = random(NUM_REQUESTS, width + 1, heads, dim)
    ancestors = torch.randint(0, width, (NUM_REQUESTS, width, NUM_LEVELS), dtype=torch.int32).to(DEVICE)
    scratch = PathScratch.allocate(NUM_REQUESTS, width, heads, kv_heads, dim, torch.device(DEVICE))
    expected = plain_attend(query[:, 1:], kv, given, ancestors[..., :depth].long(), first, NUM_LEVELS)
    for _ in range(2 if parts > 1 else 1):  # counters are as good after a call as before it
        found = torch.full((NUM_REQUESTS, width, heads, dim), torch.nan, device=DEVICE)
        attend_paths(query, kv, given, ancestors, depth, first, found, scratch, parts=parts)
        tolerance = 1e-5 if INTERPRETED else 5e-3  # a GPU multiplies in tf32
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert not scratch.arrivals.any()


@pytest.mark.parametrize("scales", [[0.0, 0.0, 0.0], [0.0, 1.0, 0.7]])
@pytest.mark.parametrize(("width", "k"), [(1, 1), (1, 8), pytest.param(7, 4, id="seven_rows")])
def test_the_likeliest_tokens_and_their_probabilities(scales: list[float], width: int, k: int) -> None:
    """Rows fill more than one program where there are seven of each request; the last stretch is a short one."""
    given, tile = make_views([1, 1, 1], scales), Tile(16, 32, 2, 3)
    x, weight, norm = random(NUM_REQUESTS * width, 40), random(VOCAB, 40, seed=1), 1.0 + 0.2 * random(40, seed=2)
    target_ids = torch.arange(VOCAB, dtype=torch.int32, device=DEVICE) * 3
    room = len(x) * num_stretches(VOCAB, tile)
    packed = torch.zeros(room * k, dtype=torch.int64, device=DEVICE)
    sums = torch.zeros(room, device=DEVICE)
    normed = torch.nn.functional.rms_norm(x, (40,), norm, 1e-5)
    for level in range(2):
        ids = torch.zeros(len(x), k, dtype=torch.int32, device=DEVICE)
        log_probs = torch.zeros(len(x), k, device=DEVICE)
        head_top(x, weight * norm, given, level, target_ids, packed, sums, ids, log_probs, 1e-5, tile, scaled=True)
        expected_ids, expected = plain_top((normed @ weight.t()).view(NUM_REQUESTS, width, -1), given, level, k)
        assert ids.tolist() == target_ids[expected_ids].flatten(0, 1).tolist()
        torch.testing.assert_close(log_probs, expected.flatten(0, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_that_is_not_added_overwrites_what_was_there(splits: int, bias: bool) -> None:
    tile = Tile(16, 32, 2, 3, splits)
    x, weight = random(17, 1300), random(20, 1300, seed=1)
    row = random(20, seed=2) if bias else None
    num_parts, num_arrivals = split_sizes(17, 20, tile)
    parts, out = torch.full((num_parts,), torch.nan, device=DEVICE), torch.full((17, 20), torch.nan, device=DEVICE)
    arrivals = torch.zeros(num_arrivals, dtype=torch.int32, device=DEVICE)
    linear_rows(x, weight, row, out, parts, arrivals, 0.0, tile)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, row), rtol=1e-4, atol=1e-3)


CONFIG = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=HIDDEN,
    intermediate_size=40,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_position=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
NETWORKS: dict[str, Eagle3Config | EagleConfig] = {
    "eagle3": Eagle3Config(CONFIG, HIDDEN, 70, (0, 2, 3)),
    "eagle3, all norms": Eagle3Config(
        replace(CONFIG, qk_norm=True, **BIASES), HIDDEN, 70, (0, 2), norm_before_residual=True, norm_before_fc=True
    ),
    "eagle": EagleConfig(CONFIG, 70, (4,)),
    "eagle, normed": EagleConfig(replace(CONFIG, **BIASES), 70, (4,), input_norm=True),
}


def make_network(config: Eagle3Config | EagleConfig) -> Eagle3 | Eagle:
    """More confident than an untrained one, so that paths differ in their chances."""
    torch.manual_seed(3)
    made: Eagle3 | Eagle = Eagle3(config) if isinstance(config, Eagle3Config) else Eagle(config)
    for name, value in made.named_parameters():
        value.data = 1.0 + 0.3 * torch.randn_like(value) if "norm" in name else 0.3 * torch.randn_like(value)
    made.d2t = torch.randperm(CONFIG.vocab_size)[:70].sort().values
    return made.to(DEVICE)


def draft_both(
    config: Eagle3Config | EagleConfig, shape: DraftShape, dtype: torch.dtype = torch.float32, **options: Any
) -> list[list[DraftTree]]:
    """The trees of the kernels and of the twin, from the same beginning."""
    num_pairs, count = 3, shape.num_requests
    network = make_network(config)
    cos, sin = (part.to(DEVICE) for part in rope_tables(CONFIG))
    embedding = (0.3 * random(CONFIG.vocab_size, HIDDEN, seed=9)).to(dtype)
    weights = joined_weights(network, embedding, dtype, (cos, sin))
    num_slots = NUM_CONTEXT_SLOTS + count * NUM_LEVELS * 3 + 1
    results, stored = [], []
    for kind in (FusedDraft, PlainDraft):
        kv = random(2, num_slots, CONFIG.num_kv_heads, CONFIG.head_dim, seed=4)
        room = DraftRoom(kv, NUM_CONTEXT_SLOTS, 3, num_pairs, 3, NUM_LEVELS, 12)
        hidden = random(count * num_pairs, weights.feature_size, seed=5).to(dtype)
        given = {"scales": [0.0, 1.0, 0.7][:count], "counts": [2, 3, 1][:count], **options}
        views = make_views([5, 70, 1][:count], hidden=hidden, vocab=70, num_pairs=num_pairs, **given)
        output = kind(weights, room).run(views, shape)
        results.append(read_trees(output.cpu().numpy()))
        stored.append((views.table.clone(), kv[:, :-1].clone()))  # the last slot is nobody's
    assert torch.equal(stored[0][0], stored[1][0]), "lines of the table"
    if dtype == torch.float32 and INTERPRETED:
        torch.testing.assert_close(stored[0][1][:, :NUM_CONTEXT_SLOTS], stored[1][1][:, :NUM_CONTEXT_SLOTS])
    return results


def assert_alike(found: list[DraftTree], expected: list[DraftTree]) -> None:
    for tree, other in zip(found, expected, strict=True):
        assert (tree.token_ids, tree.parents) == (other.token_ids, other.parents)
        # Tensor cores round more coarsely, which shows where a probability is small.
        limits = {"rel": 1e-3} if INTERPRETED else {"rel": 2e-2, "abs": 3e-3}
        assert (tree.confidence or []) == pytest.approx(other.confidence or [], **limits)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_draft_is_that_of_its_twin_node_by_node(name: str) -> None:
    found, expected = draft_both(NETWORKS[name], DraftShape(3, 3, 3), num_nodes=[12, 9, 5])
    assert [len(tree) for tree in found] == [12, 9, 5]
    assert_alike(found, expected)


@pytest.mark.parametrize("shape", [DraftShape(1, 1, 1), DraftShape(2, 1, NUM_LEVELS), DraftShape(1, 3, NUM_LEVELS)])
def test_chains_and_single_levels(shape: DraftShape) -> None:
    found, expected = draft_both(NETWORKS["eagle3"], shape, widths=[shape.width] * shape.num_requests)
    assert all(found)
    assert_alike(found, expected)


def test_limits_of_each_request_are_kept() -> None:
    """Width, depth, number of nodes, and both floors."""
    options = {"widths": [1, 2, 3], "depths": [2, 3, 3], "num_nodes": [12, 4, 12]}
    floors = {"lowest": [-1e29, -4.0, -1e29], "followed": [-np.inf, -1.5, 0.0]}
    found, expected = draft_both(NETWORKS["eagle3"], DraftShape(3, 3, 3), **options, **floors)
    assert_alike(found, expected)
    assert [len(found[0]), found[0].parents] == [2, [-1, 0]]
    assert len(found[1]) <= 4 and set(found[2].parents) == {-1}


def test_padding_gets_an_empty_tree_and_changes_no_other() -> None:
    nobody = {"counts": [2, 0, 0], "widths": [3, 0, 0], "depths": [3, 0, 0], "num_nodes": [9, 0, 0]}
    padded, _ = draft_both(NETWORKS["eagle3"], DraftShape(3, 3, 3), scales=[0.0] * 3, **nobody)
    alone, _ = draft_both(NETWORKS["eagle3"], DraftShape(1, 3, 3), scales=[0.0], counts=[2])
    assert [len(tree) for tree in padded] == [9, 0, 0]
    assert (padded[0].token_ids, padded[0].parents) == (alone[0].token_ids, alone[0].parents)


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16])
def test_half_precision_weights_give_nearly_the_same_drafts(dtype: torch.dtype) -> None:
    """Rounding may turn a near tie: most of the nodes must be the same."""
    found, expected = draft_both(NETWORKS["eagle3"], DraftShape(3, 3, 3), dtype)
    alike = [set(tree.token_ids) & set(other.token_ids) for tree, other in zip(found, expected, strict=True)]
    assert sum(map(len, alike)) >= 0.8 * sum(len(set(tree.token_ids)) for tree in expected)


def test_nan_in_the_features_of_one_request_leaves_the_others_their_drafts() -> None:
    network, shape = NETWORKS["eagle3"], DraftShape(3, 3, 3)
    weights = joined_weights(make_network(network), random(96, HIDDEN), torch.float32, rope_angles())
    kv = random(2, NUM_CONTEXT_SLOTS + 3 * NUM_LEVELS * 3 + 1, CONFIG.num_kv_heads, CONFIG.head_dim, seed=4)
    trees = []
    for broken in (False, True):
        hidden = random(9, weights.feature_size, seed=5)
        if broken:
            hidden[5] = torch.nan  # the newest pair of the second request
        views = make_views([5, 70, 1], [0.0] * 3, hidden=hidden, vocab=70, num_pairs=3)
        drafts = FusedDraft(weights, DraftRoom(kv.clone(), NUM_CONTEXT_SLOTS, 3, 3, 3, NUM_LEVELS, 12))
        trees.append(read_trees(drafts.run(views, shape).cpu().numpy()))
    assert len(trees[1][1]) == 0
    assert [trees[1][i].token_ids for i in (0, 2)] == [trees[0][i].token_ids for i in (0, 2)]


def rope_angles() -> tuple[Tensor, Tensor]:
    cos, sin = rope_tables(CONFIG)
    return cos.to(DEVICE), sin.to(DEVICE)
