"""The kernels between two passes of a round beside their plain twins: all that they write is the same. Run by
test_triton_drafts.py in a process of its own, in Triton's interpreter or on a GPU."""

import random
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from paceline.ops import rounds as plain
from paceline.ops.rounds import RoundState
from paceline.ops.triton import rounds as fused

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
NUM_REQUESTS, NUM_PAIRS, MOST, LEVELS, BLOCK_SIZE, MAX_BLOCKS, VOCAB = 5, 4, 6, 3, 4, 12, 9
ROWS = NUM_REQUESTS * (1 + MOST)


@dataclass
class Inputs:
    counts: Tensor
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    context_lens: Tensor
    parents: Tensor
    is_node: Tensor
    req_ids: Tensor
    follows: Tensor
    logits_rows: Tensor
    draw_positions: Tensor
    temperatures: Tensor
    seeds: Tensor
    block_tables: Tensor
    picked: Tensor


@dataclass
class Pairs:
    """Views of one array, as drafts have them."""

    records: Tensor

    def __post_init__(self) -> None:
        self.slots, self.positions, self.next_tokens = (
            self.records[:, i * NUM_PAIRS : (i + 1) * NUM_PAIRS] for i in range(3)
        )
        self.counts, self.context_lens = self.records[:, 3 * NUM_PAIRS], self.records[:, 3 * NUM_PAIRS + 1]
        self.noise_keys = self.records[:, 3 * NUM_PAIRS + 2 :].view(NUM_REQUESTS, LEVELS, 2)


@dataclass
class Case:
    inputs: Inputs
    state: RoundState
    pairs: Pairs
    hidden_rows: Tensor
    kv: Tensor
    trees: Tensor

    def written(self) -> dict[str, Any]:
        found: dict[str, Any] = {"pairs": self.pairs.records, "hidden_rows": self.hidden_rows, "kv": self.kv}
        for part in (self.inputs, self.state):
            found |= {f"{type(part).__name__}.{one.name}": getattr(part, one.name) for one in fields(part)}
        return {name: tensor.tolist() for name, tensor in found.items()}


def random_tree(rng: random.Random, num_nodes: int) -> tuple[list[int], list[int]]:
    parents, depths = [], []
    for node in range(num_nodes):
        parent = rng.choice([-1, *(other for other in range(node) if depths[other] < LEVELS)])
        parents.append(parent)
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return [rng.randrange(VOCAB) for _ in parents], parents


def make_case(seed: int, device: str = "cpu") -> Case:
    """Trees of random sizes behind each other, without padding between them; the tokens drawn often agree."""
    rng = random.Random(seed)

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    sent = ints(2, NUM_REQUESTS)
    state = RoundState.allocate(sent, NUM_REQUESTS, NUM_PAIRS)
    row_arrays = [ints(ROWS) for _ in range(10)]
    row_arrays[2].fill_(-1)
    tables = torch.tensor(rng.sample(range(100), NUM_REQUESTS * MAX_BLOCKS), dtype=torch.int32).view(-1, MAX_BLOCKS)
    inputs = Inputs(
        ints(3), *row_arrays, torch.rand(ROWS).to(device) * 0, torch.zeros(ROWS, dtype=torch.int64).to(device),
        tables.to(device), ints(2, ROWS),
    )  # fmt: skip
    row = 0
    for i in range(NUM_REQUESTS):
        tokens, parents = random_tree(rng, rng.randrange(MOST + 1))
        position = rng.randrange(20)
        state.roots[i], state.flags[i] = row, int(i != 3)
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        for node in range(-1, len(tokens)):
            at = row + 1 + node
            inputs.token_ids[at] = tokens[node] if node >= 0 else 0
            inputs.parents[at] = row + 1 + parents[node] if node >= 0 and parents[node] >= 0 else -1
            inputs.is_node[at], inputs.req_ids[at] = int(node >= 0), i
            inputs.positions[at] = position + (depths[node] if node >= 0 else 0)
            index = position + 1 + node
            inputs.slots[at] = int(tables[i, index // BLOCK_SIZE]) * BLOCK_SIZE + index % BLOCK_SIZE
            children = [token for token, parent in zip(tokens, parents, strict=True) if parent == node]
            inputs.picked[0, at] = rng.choice([*children * 3, rng.randrange(VOCAB)])
            inputs.seeds[at], inputs.temperatures[at] = rng.randrange(-(2**63), 2**63), rng.random()
        row += 1 + len(tokens)
    inputs.picked[0, int(state.roots[4])] = 1 << 30  # a row that cannot be sampled
    inputs.counts[:] = torch.tensor([row, NUM_REQUESTS, row], dtype=torch.int32)
    records = torch.tensor(
        [[rng.randrange(50) for _ in range(3 * NUM_PAIRS + 2 + 2 * LEVELS)] for _ in range(NUM_REQUESTS)]
    )
    trees = ints(NUM_REQUESTS, 1 + 3 * MOST)
    for i in range(NUM_REQUESTS):
        tokens, parents = random_tree(rng, rng.randrange(MOST + 1))
        trees[i, 0] = len(tokens)
        trees[i, 1 : 1 + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        trees[i, 1 + MOST : 1 + MOST + len(tokens)] = torch.tensor(parents, dtype=torch.int32)
    kv = torch.randn(3, 2, 100 * BLOCK_SIZE, 2, 3, generator=torch.Generator().manual_seed(seed)).to(device)
    hidden_rows = ints(NUM_REQUESTS * NUM_PAIRS)
    return Case(inputs, state, Pairs(records.int().to(device)), hidden_rows, kv, trees)


def run(kernels: Any, case: Case) -> list[dict[str, Any]]:
    """What is written after each kernel."""
    seen = []
    kernels.walk(case.inputs, case.state, case.pairs, case.hidden_rows, BLOCK_SIZE, VOCAB, MOST)
    seen.append(case.written())
    kernels.move_accepted(case.inputs, case.state, case.kv, BLOCK_SIZE, NUM_REQUESTS)
    seen.append(case.written())
    kernels.write_rows(case.inputs, case.state, case.trees, 1 + MOST, LEVELS, BLOCK_SIZE)
    seen.append(case.written())
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_walk_moves_and_rows_are_those_of_the_plain_twins(seed: int) -> None:
    expected, found = run(plain, make_case(seed)), run(fused, make_case(seed, DEVICE))
    for part, other in zip(expected, found, strict=True):
        for name, value in part.items():
            assert other[name] == value, name


def test_the_cases_walk_and_move_something() -> None:
    lengths, is_moved = set(), False
    for seed in range(4):
        case = make_case(seed)
        before = case.kv.clone()
        run(plain, case)
        lengths |= set(case.state.path_counts.tolist())
        is_moved = is_moved or not torch.equal(before, case.kv)
    assert lengths >= {0, 1, 2, 3} and is_moved
