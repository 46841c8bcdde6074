"""The kernels of Medusa's drafts beside their plain twins. Run by test_triton_drafts.py in a process of its own, in
Triton's interpreter or on a GPU."""

import pytest
import torch
import triton

from paceline.ops.triton import product_tree as fused
from paceline.spec.feature import product_trees as plain
from paceline.spec.feature.fused_heads import FusedHeads
from paceline.spec.feature.medusa_rounds import PlainHeads
from paceline.spec.round_draft import WalkNoise

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
LEVELS, REQUESTS, WIDTH = 4, 5, 3


def guesses(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Few different probabilities: many paths are equally likely. There is room for two requests more."""
    rng = torch.Generator().manual_seed(seed)
    shape = (LEVELS, REQUESTS + 2, WIDTH)
    steps = torch.randint(1, 4, shape, generator=rng).float() / 4
    ids = torch.randint(0, 1000, shape, generator=rng).int()
    return ids, -steps.cumsum(-1)


@pytest.mark.parametrize(
    ("num_nodes", "depth", "lowest"),
    [(3, 4, -5e29), (4, 4, -5e29), (9, 4, -5e29), (13, 2, -5e29), (15, 4, -1.6), (6, 3, -0.1)],
)
def test_product_trees_are_those_of_the_plain_twin(num_nodes: int, depth: int, lowest: float) -> None:
    flags = torch.tensor([1, 1, 0, 1, 1], dtype=torch.int32)
    sizes = set()
    for seed in range(1 if DEVICE == "cpu" else 10):
        ids, log_probs = guesses(seed)
        expected, found = (torch.zeros(REQUESTS, 1 + 3 * (num_nodes + 1), dtype=torch.int32) for _ in range(2))
        own = slice(0, REQUESTS)
        plain.product_trees(ids[:, own], log_probs[:, own], flags, expected, num_nodes, depth, lowest)
        moved = found.to(DEVICE)
        fused.product_trees(
            ids.to(DEVICE)[:, own], log_probs.to(DEVICE)[:, own], flags.to(DEVICE), moved, num_nodes, depth, lowest
        )
        most = num_nodes + 1
        assert moved.cpu()[:, : 1 + 2 * most].tolist() == expected[:, : 1 + 2 * most].tolist()
        bits = (tree[:, 1 + 2 * most :].contiguous().view(torch.float32) for tree in (moved.cpu(), expected))
        torch.testing.assert_close(*bits)
        sizes |= set(expected[:, 0].tolist())
    assert 0 in sizes and (lowest > -0.2 or max(sizes) > 1)


def test_heads_find_what_the_plain_twin_finds() -> None:
    rng = torch.Generator().manual_seed(3)
    vocab, hidden, count = 150, 32, 5
    heads = [torch.randn(vocab, hidden, generator=rng) for _ in range(2)]
    ids = torch.randperm(400, generator=rng)[:vocab].int()
    records = torch.randint(-(2**31), 2**31 - 1, (count, 9), generator=rng).int()
    records[:, 0] = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0]).view(torch.int32)
    constants = torch.randint(-(2**31), 2**31 - 1, (vocab,), generator=rng).int()
    results = []
    for made, device in ((PlainHeads, "cpu"), (FusedHeads, DEVICE)):
        own = records.to(device)
        noise = WalkNoise(own[:, 0].view(torch.float32), own[:, 1:5].view(count, 2, 2), constants.to(device))
        moved = [head.to(device) for head in heads]
        runner = made(moved, ids.to(device)) if made is PlainHeads else made(moved, ids.to(device), count, WIDTH)
        for head in range(2):
            features = torch.randn(count, hidden, generator=torch.Generator().manual_seed(head)).to(device)
            found = torch.zeros(count, WIDTH, dtype=torch.int32, device=device)
            log_probs = torch.zeros(count, WIDTH, device=device)
            runner.top(head, features, noise, found, log_probs)
            results.append((found.cpu().tolist(), log_probs.cpu()))
    for (expected, chances), (found, others) in zip(results[:2], results[2:], strict=True):
        assert found == expected
        torch.testing.assert_close(others, chances, rtol=1e-4, atol=1e-4)
