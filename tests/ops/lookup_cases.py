"""Texts with repetitions, and what `ngram` drafts for them on the host: for the kernels of lookups and their twins."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import DraftTree
from paceline.ops.lookup import CHUNK, num_chunks
from paceline.spec.engine_parts import EngineParts
from paceline.spec.lookup.ngram import NgramProposer
from paceline.spec.proposer import Budget, StepContext
from paceline.spec.tree_answers import read_trees

MAX_LENGTH = 3 * CHUNK - 60  # four chunks, of which the last is never used
NUM_PAIRS = 5
Texts = list[list[int]]


@dataclass
class Walked:
    """Views of one array, as walks have them."""

    records: Tensor

    def __post_init__(self) -> None:
        self.positions, self.next_tokens = self.records[:, :NUM_PAIRS], self.records[:, NUM_PAIRS : 2 * NUM_PAIRS]
        self.counts = self.records[:, 2 * NUM_PAIRS]


@dataclass
class Last:
    flags: Tensor
    positions: Tensor


def some_texts(seed: int) -> Texts:
    """Of one token, without any repetition, in which a stretch comes again, over few tokens and over many chunks."""
    rng = random.Random(seed)
    stretch = [rng.randrange(50) for _ in range(9)]
    return [
        [rng.randrange(50)],
        [7, 7],
        [3] * rng.randrange(2, 40),
        list(range(40)),
        [*stretch, 51, *stretch[:5], 52, *stretch, 53, *stretch[: rng.randrange(1, 9)]],
        [rng.randrange(3) for _ in range(rng.randrange(30, 200))],
        [rng.randrange(40) for _ in range(CHUNK - 1 + rng.randrange(3))],
        [*stretch, *(rng.randrange(200) for _ in range(MAX_LENGTH - 60)), *stretch[:4]],
    ]


def host_trees(texts: Texts, sizes: range, budget: Budget) -> list[DraftTree]:
    made = NgramProposer(EngineParts(60, 4096), budget, prompt_lookup_min=sizes[0], prompt_lookup_max=sizes[-1])
    requests = [Request(str(i), text, SamplingParams(), 16, 0, ()) for i, text in enumerate(texts)]
    return made.propose(StepContext(requests), [budget] * len(texts))


def device_trees(kernels: Any, texts: Texts, sizes: range, budget: Budget, device: str) -> list[DraftTree]:
    """The last request has ended. The last tokens of each, up to four, come from a walk; lines are in another order."""
    count, chunks = len(texts) + 1, num_chunks(MAX_LENGTH)
    order = list(range(count))[::-1]
    table = torch.full((count, MAX_LENGTH), 3, dtype=torch.int32, device=device)  # what lay there before
    records = torch.zeros(count, 2 * NUM_PAIRS + 3, dtype=torch.int32)
    parts, sent = [], []
    for i, text in enumerate(texts):
        walked = min(i % NUM_PAIRS, len(text) - 1)
        known = len(text) - walked
        cut = known // 2
        for begin, end in ((0, cut), (cut, known)):
            parts += [order[i], begin, end - begin, 8 * len(texts) + len(sent)]
            sent += text[begin:end]
        places = slice(NUM_PAIRS - walked, NUM_PAIRS)
        records[i, places] = torch.arange(known - 1, len(text) - 1, dtype=torch.int32)
        records[i, NUM_PAIRS:][places] = torch.tensor(text[known:], dtype=torch.int32)
        records[i, 2 * NUM_PAIRS] = walked

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    lines, walks = ints(*order), Walked(records.to(device))
    last = Last(ints(*[1] * len(texts), 0), ints(*(len(text) - 1 for text in texts), 30))
    keys = torch.full((count, chunks * CHUNK), 1 << 30, dtype=torch.int32, device=device)
    bests = torch.full((count, chunks), 1 << 30, dtype=torch.int32, device=device)
    trees = torch.full((count, 1 + 3 * (budget.num_nodes + 2)), 77, dtype=torch.int32, device=device)
    kernels.store_parts(ints(*parts, *sent), 2 * len(texts), table)
    kernels.append_walked(walks, lines, table)
    kernels.find_places(table, lines, last, keys, bests, sizes[0], sizes[-1])
    kernels.copy_paths(table, lines, last, keys, bests, trees, budget.num_nodes, budget.max_depth)
    *found, ended = read_trees(trees.cpu().numpy())
    assert not ended
    return found


def check(kernels: Any, seed: int, sizes: range, budget: Budget, device: str = "cpu") -> list[DraftTree]:
    texts = some_texts(seed)
    expected, found = host_trees(texts, sizes, budget), device_trees(kernels, texts, sizes, budget, device)
    for text, tree, other in zip(texts, expected, found, strict=True):
        assert (other.token_ids, other.parents) == (tree.token_ids, tree.parents), text[-20:]
        torch.testing.assert_close(torch.tensor(other.confidence or []), torch.tensor(tree.confidence or []))
    return expected
