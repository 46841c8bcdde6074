"""What the Triton kernels of captured drafts must hold beside their plain twins. Run by test_triton_drafts.py in a
process of its own, in Triton's interpreter or on a GPU."""

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from paceline.ops.random import id_constants
from paceline.ops.triton.draft_attention import attend_paths
from paceline.ops.triton.draft_top import likeliest_tokens
from paceline.spec.feature.draft_inputs import DraftInputs, DraftViews
from paceline.spec.feature.draft_levels import plain_attend, plain_top

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"
NUM_REQUESTS, NUM_LEVELS, VOCAB = 3, 4, 2100


def views(lengths: list[int], scales: list[float], *, noisy: bool) -> DraftViews:
    inputs = DraftInputs(NUM_REQUESTS, 2, NUM_LEVELS, torch.device(DEVICE))
    host = inputs.host()
    host["counts"][:] = 1
    host["begins"][:] = np.array(lengths) - 1
    host["table_rows"][:] = [2, 0, 1]
    host["scales"].view(np.float32)[:] = scales
    host["noise_keys"][:] = np.random.default_rng(1).integers(-(2**31), 2**31, host["noise_keys"].shape)
    inputs.send()
    table = torch.randperm(480, generator=torch.Generator().manual_seed(1)).int().view(3, 160).to(DEVICE)
    constants = torch.from_numpy(id_constants(VOCAB).view(np.int32).copy()).to(DEVICE)
    return inputs.views(torch.zeros(0), table, constants if noisy else None)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(("width", "depth"), [(1, 0), (1, 3), (3, 2), (8, 3)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 24)])
def test_nodes_see_their_context_and_their_ancestors(
    width: int, depth: int, heads: int, kv_heads: int, dim: int
) -> None:
    given = views([1, 64, 131], [0.0] * 3, noisy=False)
    kv = random(2, 600, kv_heads, dim, seed=2)
    query = random(NUM_REQUESTS, width, heads, dim)
    scratch = (500 + torch.arange(NUM_REQUESTS * depth * width, device=DEVICE)).view(NUM_REQUESTS, -1)
    visible = random(NUM_REQUESTS, width, depth * width, seed=3) > 0.0
    found = attend_paths(query, kv, given, scratch, visible)
    expected = plain_attend(query, kv, given, scratch, visible)
    tolerance = 1e-5 if INTERPRETED else 5e-3  # a GPU multiplies in tf32
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(("width", "k"), [(1, 1), (1, 8), (4, 4)])
def test_the_likeliest_tokens_and_their_probabilities(noisy: bool, width: int, k: int) -> None:
    given = views([1, 1, 1], [0.0, 1.0, 0.7], noisy=noisy)
    logits = 3.0 * random(NUM_REQUESTS, width, VOCAB)
    for level in range(2):
        ids, log_probs = likeliest_tokens(logits, given, level, k)
        expected_ids, expected = plain_top(logits, given, level, k)
        assert ids.tolist() == expected_ids.tolist()
        torch.testing.assert_close(log_probs, expected, rtol=1e-4, atol=1e-4)
