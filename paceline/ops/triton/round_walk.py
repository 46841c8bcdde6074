"""After a pass on the device: which drafted tokens it agrees with, and their keys and values put in order.

One program follows one request's tree. ops/rounds.py has the plain twins, and says what is written where.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from paceline.core.kv_tensor import raw
from paceline.ops.rounds import PURPOSE, NamedPairs, PassInputs, RoundState
from paceline.ops.triton.noise import noise_key


@triton.jit(do_not_specialize=["vocab_size", "num_pairs", "num_levels", "tables_stride", "record"])
def _walk_kernel(
    token_ids, positions, parents, is_node, req_ids, counts, temperatures, seeds, picked, tables, tables_stride,
    flags, roots, state_positions, state_tokens, state_seeds, state_temperatures, path_rows, path_counts,
    hidden_rows, pair_slots, pair_positions, next_tokens, pair_counts, context_lens, noise_keys, record,
    vocab_size, num_pairs, num_levels,
    BLOCK_SIZE: tl.constexpr, NODES: tl.constexpr, PAIRS: tl.constexpr, LEVELS: tl.constexpr, PURPOSE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    own = request * record
    at = tl.arange(0, PAIRS)
    if tl.load(flags + request) == 0:
        tl.store(path_counts + request, 0)
        tl.store(pair_counts + own, 0)
        tl.store(pair_slots + own + at, -1, mask=at < num_pairs)
    else:
        root = tl.load(roots + request)
        nodes = root + 1 + tl.arange(0, NODES)  # rows
        ok = nodes < tl.load(counts)
        ok = ok & (tl.load(req_ids + nodes, mask=ok, other=-1) == request) & (tl.load(is_node + nodes, mask=ok) != 0)
        node_tokens = tl.load(token_ids + nodes, mask=ok, other=-1)
        node_parents = tl.load(parents + nodes, mask=ok, other=-2)
        row, parent, count, goes_on = root, root * 0 - 1, root * 0, root * 0 + 1
        path, drawn = at * 0, at * 0
        for depth in range(num_pairs):
            token = tl.minimum(tl.maximum(tl.load(picked + row), 0), vocab_size - 1)
            here = (at == depth) & (goes_on != 0)
            path = tl.where(here, row, path)
            drawn = tl.where(here, token, drawn)
            count += goes_on
            fits = ok & (node_parents == parent) & (node_tokens == token)
            child = tl.min(tl.where(fits, nodes, 2147483647), axis=0)
            goes_on = goes_on * (child < 2147483647).to(tl.int32)
            row = tl.where(goes_on != 0, child, row)
            parent = tl.where(goes_on != 0, child, parent)
        position = tl.load(positions + root)
        is_pair = at < count
        place = num_pairs - count + at
        index = position + at
        block = tl.load(tables + request * tables_stride + index // BLOCK_SIZE, mask=is_pair, other=0)
        tl.store(pair_slots + own + place, block * BLOCK_SIZE + index % BLOCK_SIZE, mask=is_pair)
        tl.store(pair_slots + own + at, -1, mask=at < num_pairs - count)
        tl.store(pair_positions + own + place, index, mask=is_pair)
        tl.store(next_tokens + own + place, drawn, mask=is_pair)
        tl.store(hidden_rows + request * num_pairs + place, path, mask=is_pair)
        tl.store(path_rows + request * num_pairs + at, path, mask=is_pair)
        tl.store(path_counts + request, count)
        tl.store(pair_counts + own, count)
        tl.store(context_lens + own, tl.load(context_lens + own) + count)
        tl.store(state_positions + request, position + count)
        tl.store(state_tokens + request, tl.sum(tl.where(at == count - 1, drawn, 0), axis=0))
        seed = tl.load(seeds + root)
        tl.store(state_seeds + request, seed)
        tl.store(state_temperatures + request, tl.load(temperatures + root))
        level = tl.arange(0, LEVELS)
        key = noise_key(seed + level.to(tl.int64) * 0, position + count + 1 + level, PURPOSE)
        halves = noise_keys + own + 2 * level
        tl.store(halves, key.to(tl.uint32).to(tl.int32, bitcast=True), mask=level < num_levels)
        tl.store(halves + 1, (key >> 32).to(tl.uint32).to(tl.int32, bitcast=True), mask=level < num_levels)


def walk(
    inputs: PassInputs,
    state: RoundState,
    pairs: NamedPairs,
    hidden_rows: Tensor,
    block_size: int,
    vocab_size: int,
    max_nodes: int,  # of a tree
) -> None:
    num_requests, num_pairs = pairs.slots.shape
    num_levels = pairs.noise_keys.shape[1]
    _walk_kernel[(num_requests,)](
        inputs.token_ids, inputs.positions, inputs.parents, inputs.is_node, inputs.req_ids, inputs.counts,
        inputs.temperatures, inputs.seeds, inputs.picked, inputs.block_tables, inputs.block_tables.stride(0),
        state.flags, state.roots, state.positions, state.tokens, state.seeds, state.temperatures, state.path_rows,
        state.path_counts, hidden_rows, pairs.slots, pairs.positions, pairs.next_tokens, pairs.counts,
        pairs.context_lens, pairs.noise_keys, pairs.slots.stride(0), vocab_size, num_pairs, num_levels,
        BLOCK_SIZE=block_size, NODES=triton.next_power_of_2(max_nodes), PAIRS=triton.next_power_of_2(num_pairs),
        LEVELS=triton.next_power_of_2(num_levels), PURPOSE=PURPOSE, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tables_stride", "num_pairs", "plane"])
def _move_kernel(
    kv, slots, tables, tables_stride, positions, path_rows, path_counts, num_pairs, plane,
    SIZE: tl.constexpr, PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    own = kv + tl.program_id(1).to(tl.int64) * plane
    count = tl.load(path_counts + request)
    first = tl.load(positions + request) - count
    columns = tl.arange(0, PAD)
    # A node stands behind all nodes of its path: no target is the source of a later move.
    for depth in range(1, count):
        source = tl.load(slots + tl.load(path_rows + request * num_pairs + depth)).to(tl.int64)
        index = first + depth
        block = tl.load(tables + request * tables_stride + index // BLOCK_SIZE).to(tl.int64)
        target = block * BLOCK_SIZE + index % BLOCK_SIZE
        if source != target:
            values = tl.load(own + source * SIZE + columns, mask=columns < SIZE)
            tl.store(own + target * SIZE + columns, values, mask=columns < SIZE)


def move_accepted(inputs: PassInputs, state: RoundState, kv_cache: Tensor, block_size: int, num_requests: int) -> None:
    num_layers, two, num_slots, num_heads, dim = kv_cache.shape
    size = num_heads * dim
    _move_kernel[(num_requests, num_layers * two)](
        raw(kv_cache), inputs.slots, inputs.block_tables, inputs.block_tables.stride(0), state.positions,
        state.path_rows, state.path_counts, state.path_rows.stride(0), num_slots * size,
        SIZE=size, PAD=triton.next_power_of_2(size), BLOCK_SIZE=block_size, num_warps=1,
    )  # fmt: skip
