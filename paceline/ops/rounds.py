"""Between two passes of a round on the device: the plain twins of ops/triton/round_walk.py and round_rows.py.

A pass has drawn the token of every row. `walk` follows each request's tree from its root, node by node, while a child
carries the token drawn: the path and the token after it are the request's new tokens, and become the newest pairs of
the next draft. `move_accepted` brings the path's keys and values behind those that were there. Once a new tree has been
drafted, `write_rows` makes the inputs of the next pass: request i has the same number of rows as every other, its
last token first and then the nodes of its tree; the rows that its tree does not need are padding.

A request whose flag is 0 has ended: it takes part in nothing.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.kv_tensor import raw
from paceline.ops.random import Purpose, noise_key

PURPOSE = int(Purpose.SAMPLE)


@dataclass(frozen=True, slots=True)
class RoundState:
    """What the device knows of each request between two passes. [R], or [R, F] for F newest pairs."""

    flags: Tensor  # int32: 0: it has ended
    roots: Tensor  # int32: row of its last token in the pass before
    positions: Tensor  # int32: of its last token
    tokens: Tensor  # int32: that token
    seeds: Tensor  # int64
    temperatures: Tensor  # float32
    path_rows: Tensor  # [R, F] int32: rows of the walked path, the root first
    path_counts: Tensor  # int32: how many; 0: it has ended

    @staticmethod
    def allocate(sent: Tensor, num_requests: int, num_pairs: int) -> "RoundState":
        """`sent`: [2, R] int32, the flags and roots, which the host sends."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=sent.device)

        count = num_requests
        return RoundState(
            flags=sent[0],
            roots=sent[1],
            positions=zeros(count),
            tokens=zeros(count),
            seeds=zeros(count, dtype=torch.int64),
            temperatures=zeros(count, dtype=torch.float32),
            path_rows=zeros(count, num_pairs),
            path_counts=zeros(count),
        )


class PassInputs(Protocol):
    """The inputs of a pass, as models/static_inputs.py names them. Logits row i is row i."""

    @property
    def counts(self) -> Tensor: ...

    @property
    def token_ids(self) -> Tensor: ...

    @property
    def positions(self) -> Tensor: ...

    @property
    def slots(self) -> Tensor: ...

    @property
    def context_lens(self) -> Tensor: ...

    @property
    def parents(self) -> Tensor: ...

    @property
    def is_node(self) -> Tensor: ...

    @property
    def req_ids(self) -> Tensor: ...

    @property
    def follows(self) -> Tensor: ...

    @property
    def logits_rows(self) -> Tensor: ...

    @property
    def draw_positions(self) -> Tensor: ...

    @property
    def temperatures(self) -> Tensor: ...

    @property
    def seeds(self) -> Tensor: ...

    @property
    def block_tables(self) -> Tensor: ...

    @property
    def picked(self) -> Tensor: ...  # [2, rows] int32: the tokens drawn, and the bits of their scores


class NewestPairs(Protocol):
    """What a draft takes in (spec/feature/draft_inputs.py): [R, F] or [R] int32, one stride for all."""

    @property
    def slots(self) -> Tensor: ...

    @property
    def positions(self) -> Tensor: ...

    @property
    def next_tokens(self) -> Tensor: ...

    @property
    def counts(self) -> Tensor: ...

    @property
    def context_lens(self) -> Tensor: ...


class NamedPairs(NewestPairs, Protocol):
    """And the names of the noise that their drafts share with the target."""

    @property
    def noise_keys(self) -> Tensor: ...  # [R, L, 2]


def walk(
    inputs: PassInputs,
    state: RoundState,
    pairs: NamedPairs,  # written
    hidden_rows: Tensor,  # [R * F] int32: rows of the pass that the pairs are made of, written
    block_size: int,
    vocab_size: int,
    max_nodes: int,  # of a tree
) -> None:
    num_requests, num_pairs = pairs.slots.shape
    num_rows = int(inputs.counts[0])
    drawn = inputs.picked[0].clamp(0, vocab_size - 1).tolist()
    for i in range(num_requests):
        pairs.slots[i] = -1
        pairs.counts[i] = state.path_counts[i] = 0
        if not state.flags[i]:
            continue
        root = int(state.roots[i])
        nodes = [
            row
            for row in range(root + 1, min(num_rows, root + 1 + max_nodes))
            if int(inputs.req_ids[row]) == i and bool(inputs.is_node[row])
        ]
        path, parent = [root], -1
        while True:
            token = drawn[path[-1]]
            child = next(
                (row for row in nodes if inputs.parents[row] == parent and inputs.token_ids[row] == token), None
            )
            if child is None:
                break
            path.append(child)
            parent = child
        count, position = len(path), int(inputs.positions[root])
        own = torch.arange(position, position + count, dtype=torch.int32)
        pairs.slots[i, -count:] = _slots(inputs.block_tables[i], own, block_size)
        pairs.positions[i, -count:] = own
        pairs.next_tokens[i, -count:] = torch.tensor([drawn[row] for row in path], dtype=torch.int32)
        pairs.counts[i] = state.path_counts[i] = count
        pairs.context_lens[i] += count
        state.path_rows[i, :count] = torch.tensor(path, dtype=torch.int32)
        hidden_rows.view(-1, num_pairs)[i, -count:] = state.path_rows[i, :count]
        state.positions[i], state.tokens[i] = position + count, drawn[path[-1]]
        state.seeds[i], state.temperatures[i] = inputs.seeds[root], inputs.temperatures[root]
        for level in range(pairs.noise_keys.shape[1]):
            key = noise_key(int(inputs.seeds[root]), position + count + 1 + level, PURPOSE)
            pairs.noise_keys[i, level] = torch.tensor([_signed(key & 0xFFFFFFFF), _signed(key >> 32)]).int()


def _signed(half: int) -> int:
    return half - ((half >> 31) << 32)


def _slots(table: Tensor, indices: Tensor, block_size: int) -> Tensor:
    return table[(indices // block_size).long()] * block_size + indices % block_size


def move_accepted(inputs: PassInputs, state: RoundState, kv_cache: Tensor, block_size: int, num_requests: int) -> None:
    """kv_cache: [layers, 2, slots, kv heads, dim]"""
    pool = raw(kv_cache)
    for i, count in enumerate(state.path_counts[:num_requests].tolist()):
        if count > 1:
            first = int(state.positions[i]) - count
            indices = torch.arange(first + 1, first + count, dtype=torch.int32)
            sources = inputs.slots[state.path_rows[i, 1:count].long()].long()
            targets = _slots(inputs.block_tables[i], indices, block_size).long()
            pool[:, :, targets] = pool[:, :, sources]


def write_rows(
    inputs: PassInputs, state: RoundState, trees: Tensor, rows_each: int, num_levels: int, block_size: int
) -> None:
    """`trees`: [R, 1 + 3 * K] int32, of each the number of nodes, their tokens and parents (and what is not read here).
    None has more than `rows_each` - 1 nodes or is deeper than `num_levels`. For `inputs.counts[1]` requests."""
    most, num_requests = (trees.shape[1] - 1) // 3, int(inputs.counts[1])
    for i in range(num_requests):
        first, is_there = i * rows_each, bool(state.flags[i])
        own, num_nodes = slice(first, first + rows_each), int(trees[i, 0])
        inputs.token_ids[own] = inputs.positions[own] = inputs.context_lens[own] = inputs.is_node[own] = 0
        inputs.draw_positions[own] = 0
        inputs.slots[own] = inputs.parents[own] = inputs.follows[own] = -1
        inputs.req_ids[own], inputs.logits_rows[own] = i, torch.arange(first, first + rows_each, dtype=torch.int32)
        inputs.seeds[own], inputs.temperatures[own] = state.seeds[i], state.temperatures[i]
        state.roots[i] = first
        if not is_there:
            continue
        position = int(state.positions[i])
        depths: list[int] = []
        parents = trees[i, 1 + most : 1 + most + num_nodes].tolist()
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        used = slice(first, first + 1 + num_nodes)
        inputs.token_ids[first] = state.tokens[i]
        inputs.token_ids[first + 1 : used.stop] = trees[i, 1 : 1 + num_nodes]
        inputs.positions[used] = position + torch.tensor([0, *depths], dtype=torch.int32)
        inputs.draw_positions[used] = inputs.positions[used] + 1
        inputs.context_lens[used] = position + 1
        inputs.slots[used] = _slots(
            inputs.block_tables[i], position + torch.arange(1 + num_nodes, dtype=torch.int32), block_size
        )
        inputs.parents[first + 1 : used.stop] = torch.tensor(
            [-1 if parent < 0 else first + 1 + parent for parent in parents], dtype=torch.int32
        )
        inputs.is_node[first + 1 : used.stop] = 1
    num_rows = num_requests * rows_each
    inputs.counts.copy_(torch.tensor([num_rows, num_requests, num_rows], dtype=torch.int32))
