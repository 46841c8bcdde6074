"""The kernel of split_attention.py, where its arithmetic is described.

A program has lines: the query heads of one kv head, for one row or for a block of a prompt's rows. All lines share the
keys that it loads. What a line gets does not depend on the lines beside it, nor on how many there are:

- Both products run on the same tensor core instruction, which adds from front to back. (On Hopper the compiler takes
  another one from 64 lines and four warps on. That its bits are the same was shown for products with weights only
  (tiles.py), so `LINES` and `num_warps` stay below that.)
- Weights are added up by a product with ones, because the order of `tl.sum` hangs on the shape of the tile.
- Keys that a line may not see have weight 0 exactly, and a tile of which it sees none leaves it as it was.
- A mask that reaches the weights must not be loaded as 8-bit numbers: that would turn the order inside a product.

With FLOAT8 keys and values are FP8 numbers and come as words of two (float8.py): those of even and of odd places are
multiplied apart, in float16, which has them all. Queries in bfloat16 become float16.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from paceline.ops.triton.float8 import widened_pairs
from paceline.ops.triton.product import wait_for_previous_kernel

FAR = tl.constexpr(2147483647)


@triton.jit
def _merge(best, total, mixed, other_best, other_total, other_mixed):
    """Two softmaxes over different keys as one. An empty one has best -inf and takes part with exact zeros."""
    new_best = tl.maximum(best, other_best)
    finite = tl.where(new_best == float("-inf"), 0.0, new_best)  # where both are empty
    shrink, other_shrink = tl.exp2(best - finite), tl.exp2(other_best - finite)
    total = total * shrink + other_total * other_shrink
    mixed = mixed * shrink[:, None] + other_mixed * other_shrink[:, None]
    return new_best, total, mixed


@triton.jit
def _tile(
    q, q_odd, kv, kv_at, values_at, loads, sees, scale,
    PRECISION: tl.constexpr, KEYS: tl.constexpr, FLOAT8: tl.constexpr, LINES: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The softmax of all lines over one tile of keys: best score, sum of weights, weighted values."""
    if loads is None:
        key, value = tl.load(kv + kv_at), tl.load(kv + values_at + kv_at)  # [keys, dim]
    else:
        key = tl.load(kv + kv_at, mask=loads, other=0.0)
        value = tl.load(kv + values_at + kv_at, mask=loads, other=0.0)
    if FLOAT8:
        key, key_odd = widened_pairs(key, q.dtype)
        value, value_odd = widened_pairs(value, q.dtype)
    scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)  # [lines, keys]
    if FLOAT8:
        scores = tl.dot(q_odd, tl.trans(key_odd), acc=scores, input_precision=PRECISION)
    scores = scores * scale  # of powers of two
    if sees is not None:
        scores = tl.where(sees, scores, float("-inf"))
    best = tl.max(scores, axis=1)
    finite = tl.where(best == float("-inf"), 0.0, best)  # of a line that sees none of these keys
    weights = tl.exp2(scores - finite[:, None]).to(value.dtype)
    ones = tl.full((KEYS, 16), 1.0, dtype=value.dtype)
    total = tl.max(tl.dot(weights, ones, input_precision=PRECISION), axis=1)  # all columns are the same
    mixed = tl.dot(weights, value, input_precision=PRECISION)
    if FLOAT8:
        # Columns of even places, then those of odd ones: every thread keeps what it has.
        both = tl.join(mixed, tl.dot(weights, value_odd, input_precision=PRECISION))
        mixed = tl.reshape(tl.permute(both, (0, 2, 1)), (LINES, 2 * HALF))
    return best, total, mixed


@triton.jit
def _edge_slots(
    at, loads, row, context, num_keys, depth, table, slots, parents,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Where keys `at` lie: in the context, or, of a tree node, among its ancestors."""
    block = tl.load(table + at // BLOCK_SIZE, mask=loads & (at < context), other=0)
    slot = block * BLOCK_SIZE + at % BLOCK_SIZE
    if NODES:
        is_node = loads & (at >= context)
        node = tl.zeros((KEYS,), dtype=tl.int32) + row.to(tl.int32)
        climbs = num_keys - 1 - at  # generations from the row up to the ancestor at this depth
        for generation in range(depth - 1):
            climbing = is_node & (generation < climbs)
            node = tl.where(climbing, tl.load(parents + node, mask=climbing, other=0), node)
        slot = tl.where(is_node, tl.load(slots + node, mask=is_node, other=0), slot)
    return slot.to(tl.int64)


@triton.jit
def _leave_part(
    at, best, total, mixed, line_ok, q_ok, dims, part_best, part_total, part_mixed, DIM: tl.constexpr
):  # fmt: skip
    tl.store(part_best + at, best, mask=line_ok)
    tl.store(part_total + at, total, mask=line_ok)
    tl.store(part_mixed + at[:, None] * DIM + dims[None, :], mixed, mask=q_ok)


@triton.jit
def _merge_parts(heads, line_ok, q_ok, dims, first_tile, num_tiles, max_splits, part_best, part_total, part_mixed,
                 LINES: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """What the programs of these lines left in memory, from front to back. AT_ONCE: loads in flight."""
    best = tl.full((LINES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((LINES,), dtype=tl.float32)
    mixed = tl.zeros((LINES, DIM_PAD), dtype=tl.float32)
    for start in range(first_tile, num_tiles, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            at = heads * max_splits + start + i
            ok = line_ok & (at < heads * max_splits + num_tiles)
            own_best = tl.load(part_best + at, mask=ok, other=float("-inf"), cache_modifier=".cg")
            own_total = tl.load(part_total + at, mask=ok, other=0.0, cache_modifier=".cg")
            mixed_at = part_mixed + at[:, None] * DIM + dims[None, :]
            own_mixed = tl.load(mixed_at, mask=q_ok & ok[:, None], other=0.0, cache_modifier=".cg")
            best, total, mixed = _merge(best, total, mixed, own_best, own_total, own_mixed)
    return best, total, mixed


@triton.jit
def _attend(
    query, kv, out, row, count, depth, part, parts, slots, context_lens, parents, table,
    part_best, part_total, part_mixed, arrivals, num_slots, max_splits, window, scale,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LINES: tl.constexpr, DIM_PAD: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr, EXACT: tl.constexpr,
    FLOAT8: tl.constexpr, NODES: tl.constexpr, SHARED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + count) of one request, the heads of one kv head: program `part` of `parts`."""
    kv_head = tl.program_id(1)
    group: tl.constexpr = Q_HEADS // KV_HEADS
    precision: tl.constexpr = "ieee" if EXACT else "tf32"  # float32 must not pass through TF32, which keeps ten bits
    half: tl.constexpr = DIM_PAD // 2
    lines, dims = tl.arange(0, LINES), tl.arange(0, DIM_PAD)
    if FLOAT8:
        dims = dims % half * 2 + dims // half  # of the columns that `_tile` makes
    line_ok, dim_ok = lines // group < count, dims < DIM
    line_rows = row + lines // group
    heads = line_rows * Q_HEADS + kv_head * group + lines % group  # [lines], over all rows
    q_ok = line_ok[:, None] & dim_ok[None, :]
    q_at = heads[:, None] * DIM + dims[None, :]
    words: tl.constexpr = 2 if FLOAT8 else 1  # numbers of a word that is loaded
    places = tl.arange(0, DIM_PAD // words)  # of words
    place_ok = places < DIM // words
    own_at, own_ok = heads[:, None] * DIM + places[None, :] * words, line_ok[:, None] & place_ok[None, :]
    q = tl.load(query + own_at, mask=own_ok, other=0.0)  # [lines, dim], or those of even places
    q_odd = q
    if FLOAT8:
        q_odd = tl.load(query + own_at + 1, mask=own_ok, other=0.0)
        if not EXACT:
            q, q_odd = q.to(tl.float16), q_odd.to(tl.float16)

    # A node at depth d comes after its context and its d - 1 ancestors; a committed row lies in its own context.
    num_keys = tl.load(context_lens + line_rows, mask=line_ok, other=0) + depth  # [lines]
    num_keys = tl.where(line_ok, num_keys, 0)
    most = tl.max(num_keys, axis=0)
    context = most - depth  # of nodes there is one row only
    first = tl.maximum(num_keys - window, 0)
    least = tl.min(tl.where(line_ok, first, FAR), axis=0) if WINDOWED else 0
    first_tile, num_tiles = least // KEYS, (most + KEYS - 1) // KEYS
    parts = tl.maximum(tl.minimum(parts, num_tiles - first_tile), 1)  # the others have nothing to do
    if part < parts:
        # Tiles below this one lie in the context of every line.
        edge_tile = 0 if WINDOWED else tl.min(tl.where(line_ok, num_keys, FAR), axis=0) - depth
        edge_tile = edge_tile // KEYS
        values_at = num_slots.to(tl.int64) * KV_HEADS * (DIM // words)
        best = tl.full((LINES,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((LINES,), dtype=tl.float32)
        mixed = tl.zeros((LINES, DIM_PAD), dtype=tl.float32)
        for tile in range(first_tile + part, edge_tile, parts):
            at = tile * KEYS + tl.arange(0, KEYS)
            block = tl.load(table + at // BLOCK_SIZE)
            slot = (block * BLOCK_SIZE + at % BLOCK_SIZE).to(tl.int64)
            kv_at = (slot[:, None] * KV_HEADS + kv_head) * (DIM // words) + places[None, :]
            loads = None if DIM == DIM_PAD else place_ok[None, :]
            own_best, own_total, own_mixed = _tile(q, q_odd, kv, kv_at, values_at, loads, None, scale,
                                                   precision, KEYS, FLOAT8, LINES, half)  # fmt: skip
            if SHARED:
                _leave_part(heads * max_splits + tile, own_best, own_total, own_mixed, line_ok, q_ok, dims,
                            part_best, part_total, part_mixed, DIM)  # fmt: skip
            else:
                best, total, mixed = _merge(best, total, mixed, own_best, own_total, own_mixed)
        behind = first_tile + part + (tl.maximum(edge_tile - first_tile - part, 0) + parts - 1) // parts * parts
        for tile in range(behind, num_tiles, parts):
            at = tile * KEYS + tl.arange(0, KEYS)
            key_ok = (at >= least) & (at < most)
            slot = _edge_slots(at, key_ok, row, context, most, depth, table, slots, parents, BLOCK_SIZE, KEYS, NODES)
            kv_at = (slot[:, None] * KV_HEADS + kv_head) * (DIM // words) + places[None, :]
            loads = key_ok[:, None] & place_ok[None, :]
            sees = at[None, :] < num_keys[:, None]
            if WINDOWED:
                sees = sees & (at[None, :] >= first[:, None])
            own_best, own_total, own_mixed = _tile(q, q_odd, kv, kv_at, values_at, loads, sees, scale,
                                                   precision, KEYS, FLOAT8, LINES, half)  # fmt: skip
            if SHARED:
                _leave_part(heads * max_splits + tile, own_best, own_total, own_mixed, line_ok, q_ok, dims,
                            part_best, part_total, part_mixed, DIM)  # fmt: skip
            else:
                best, total, mixed = _merge(best, total, mixed, own_best, own_total, own_mixed)
        last = True
        if SHARED:
            tl.debug_barrier()  # all threads have written before one of them says so
            counter = arrivals + row * KV_HEADS + kv_head
            last = tl.atomic_add(counter, 1) == parts - 1
            if last:
                best, total, mixed = _merge_parts(heads, line_ok, q_ok, dims, first_tile, num_tiles, max_splits,
                    part_best, part_total, part_mixed, LINES, DIM, DIM_PAD, AT_ONCE)  # fmt: skip
                tl.store(counter, 0)  # ready for the next pass
        if last:
            total = tl.where(total > 0.0, total, 1.0)  # a padding row has no keys
            tl.store(out + q_at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=q_ok)


@triton.jit
def _block_of(row, num_rows, req, context_lens, is_node, req_ids, ROWS: tl.constexpr, ROWS_PAD: tl.constexpr):
    """The committed rows of the request that stand together in a block of ROWS rows: the first, and how many.

    A tree node, and padding, stands alone."""
    places = tl.arange(0, ROWS_PAD)
    rows = row // ROWS * ROWS + places
    there = (places < ROWS) & (rows < num_rows)
    same = tl.load(req_ids + rows, mask=there, other=-1) == req
    committed = tl.load(is_node + rows, mask=there, other=1) == 0
    joins = there & same & committed & (tl.load(context_lens + rows, mask=there, other=0) > 0)
    begin, count = tl.min(tl.where(joins, rows, FAR), axis=0), tl.sum(joins.to(tl.int32), axis=0)
    inside = (row >= begin) & (row < begin + count)
    return tl.where(inside, begin, row), tl.where(inside, count, 1)


@triton.jit(do_not_specialize=["num_rows", "num_slots", "table_stride", "max_splits", "window", "parts", "block_parts"])
def attention_kernel(
    query, kv, out, positions, slots, context_lens, parents, is_node, req_ids, tables,
    part_best, part_total, part_mixed, arrivals, num_rows, table_stride, num_slots, max_splits, window, scale,
    parts, block_parts,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LINES: tl.constexpr, BLOCK_LINES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_ROWS_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr, EXACT: tl.constexpr, FLOAT8: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_SHARED: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, kv head, part). BLOCK_ROWS above 1: the programs of rows in one block share the block's keys."""
    wait_for_previous_kernel(PDL)
    row, part = tl.program_id(0), tl.program_id(2)
    req = tl.load(req_ids + row)
    table = tables + req.to(tl.int64) * table_stride
    first_row, count = row, 1
    if BLOCK_ROWS > 1:
        first_row, count = _block_of(
            row, num_rows, req, context_lens, is_node, req_ids, BLOCK_ROWS, BLOCK_ROWS_PAD
        )  # fmt: skip
    if count == 1:
        node = tl.load(is_node + row) != 0
        depth = tl.where(node, tl.load(positions + row) + 1 - tl.load(context_lens + row), 0)
        _attend(query, kv, out, row.to(tl.int64), 1, depth, part, parts, slots, context_lens, parents, table,
                part_best, part_total, part_mixed, arrivals, num_slots, max_splits, window, scale,
                Q_HEADS, KV_HEADS, DIM, BLOCK_SIZE, LINES, DIM_PAD, KEYS, WINDOWED, EXACT, FLOAT8,
                True, SHARED, AT_ONCE)  # fmt: skip
    if BLOCK_ROWS > 1:  # noqa: SIM102 (this one is for the compiler)
        if count > 1:
            own_part = (row - first_row) * tl.num_programs(2) + part
            own_parts = tl.minimum(block_parts, count * tl.num_programs(2)) if BLOCK_SHARED else 1
            _attend(query, kv, out, first_row.to(tl.int64), count, 0, own_part, own_parts, slots, context_lens,
                    parents, table, part_best, part_total, part_mixed, arrivals, num_slots, max_splits, window, scale,
                    Q_HEADS, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_LINES, DIM_PAD, KEYS, WINDOWED, EXACT, FLOAT8,
                    False, BLOCK_SHARED, 1)  # fmt: skip
