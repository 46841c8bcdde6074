"""Drafts out of a request's own text: ops/lookup.py has the plain twins, and says what is written where.

A program compares the last tokens of a request with those before a chunk of its places; another one, for each request,
follows the places one by one, and keeps its tree in registers. For each place that it has followed it looks once more
at that place's chunk, for the next one.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.lookup import CHUNK, MAX_PLACES, LastTokens, WalkedTokens

STORED = 256  # tokens of a part that are stored at a time
NONE = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["max_length"])
def _store_kernel(sent, texts, max_length, STORED: tl.constexpr):
    part = sent + tl.program_id(0) * 4
    line, first, count, begin = tl.load(part), tl.load(part + 1), tl.load(part + 2), tl.load(part + 3)
    own = texts + line.to(tl.int64) * max_length + first
    for done in range(0, count, STORED):
        at = done + tl.arange(0, STORED)
        tl.store(own + at, tl.load(sent + begin + at, mask=at < count), mask=at < count)


def store_parts(sent: Tensor, num_parts: int, texts: Tensor) -> None:
    _store_kernel[(num_parts,)](sent, texts, texts.shape[1], STORED=STORED, num_warps=2)


@triton.jit(do_not_specialize=["record", "num_pairs", "max_length"])
def _append_kernel(
    positions, next_tokens, counts, record, num_pairs, lines, texts, max_length, PAIRS: tl.constexpr
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    own = request * record
    at = tl.arange(0, PAIRS)
    is_new = (at < num_pairs) & (at >= num_pairs - tl.load(counts + own))
    token = tl.load(next_tokens + own + at, mask=is_new)
    place = tl.load(positions + own + at, mask=is_new, other=0) + 1
    tl.store(texts + tl.load(lines + request).to(tl.int64) * max_length + place, token, mask=is_new)


def append_walked(walked: WalkedTokens, lines: Tensor, texts: Tensor) -> None:
    num_requests, num_pairs = walked.positions.shape
    _append_kernel[(num_requests,)](
        walked.positions, walked.next_tokens, walked.counts, walked.positions.stride(0), num_pairs, lines, texts,
        texts.shape[1], PAIRS=triton.next_power_of_2(num_pairs), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["max_length", "room", "num_chunks", "shortest"])
def _find_kernel(
    texts, max_length, lines, flags, positions, keys, room, bests, num_chunks, shortest,
    LONGEST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    end = tl.where(tl.load(flags + request) != 0, tl.load(positions + request), 0)
    best = bests + request * num_chunks + chunk
    if chunk * CHUNK >= end:
        tl.store(best, 0)
    else:
        text = texts + tl.load(lines + request).to(tl.int64) * max_length
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        agrees = place < end
        matched = place * 0
        for n in tl.static_range(LONGEST):
            wanted = tl.load(text + tl.maximum(end - n, 0))
            agrees = agrees & (place >= n)
            agrees = agrees & (tl.load(text + place - n, mask=agrees, other=-1) == wanted)
            matched += agrees.to(tl.int32)
        key = tl.where(matched >= shortest, matched * max_length + place, 0)
        tl.store(keys + request * room + place, key, mask=place < end)
        tl.store(best, tl.max(key, axis=0))


def find_places(
    texts: Tensor, lines: Tensor, last: LastTokens, keys: Tensor, bests: Tensor, shortest: int, longest: int
) -> None:
    num_requests, num_chunks = bests.shape
    _find_kernel[(num_requests, num_chunks)](
        texts, texts.shape[1], lines, last.flags, last.positions, keys, keys.shape[1], bests, num_chunks, shortest,
        LONGEST=longest, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["max_length", "room", "most", "num_nodes", "max_depth"])
def _copy_kernel(
    texts, max_length, lines, positions, keys, room, bests, trees, most, num_nodes, max_depth,
    NODES: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, MAX_PLACES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    text = texts + tl.load(lines + request).to(tl.int64) * max_length
    end = tl.load(positions + request)
    chunks, within, node = tl.arange(0, CHUNKS), tl.arange(0, CHUNK), tl.arange(0, NODES)
    best = tl.load(bests + request * CHUNKS + chunks)
    top = tl.max(best, axis=0)
    tokens, parents, matches = node * 0, node * 0, node * 0 + 1
    count, num_places = top * 0, top * 0
    while (top > 0) & (num_places < MAX_PLACES) & (count < num_nodes):
        matched, place = top // max_length, top % max_length
        period = end - place
        parent = count * 0 - 1
        goes_on = parent * 0 + 1
        for depth in range(max_depth):
            token = tl.load(text + place + 1 + depth % period)
            same = (node < count) & (parents == parent) & (tokens == token)
            known = tl.min(tl.where(same, node, NONE), axis=0)
            is_new = goes_on * (known == NONE).to(tl.int32) * (count < num_nodes).to(tl.int32)
            goes_on = goes_on * ((known != NONE).to(tl.int32) | is_new)
            here = (node == count) & (is_new != 0)
            tokens = tl.where(here, token, tokens)
            parents = tl.where(here, parent, parents)
            matches = tl.where(here, matched, matches)
            parent = tl.where(is_new != 0, count, tl.where(goes_on != 0, known, parent))
            count += is_new
        chunk = place // CHUNK
        others = chunk * CHUNK + within
        own = tl.load(keys + request * room + others, mask=others < end, other=0)
        next_best = tl.max(tl.where(own < top, own, 0), axis=0)
        best = tl.where(chunks == chunk, next_best, best)
        top = tl.max(best, axis=0)
        num_places += 1
    tree = trees + request * (1 + 3 * most)
    tl.store(tree, count)
    is_node = node < count
    tl.store(tree + 1 + node, tokens, mask=is_node)
    tl.store(tree + 1 + most + node, parents, mask=is_node)
    log_probs = tl.log(matches.to(tl.float32) / (matches + 1).to(tl.float32))
    tl.store(tree + 1 + 2 * most + node, log_probs.to(tl.int32, bitcast=True), mask=is_node)


def copy_paths(
    texts: Tensor,
    lines: Tensor,
    last: LastTokens,
    keys: Tensor,
    bests: Tensor,
    trees: Tensor,
    num_nodes: int,
    max_depth: int,
) -> None:
    num_requests, num_chunks = bests.shape
    _copy_kernel[(num_requests,)](
        texts, texts.shape[1], lines, last.positions, keys, keys.shape[1], bests, trees, (trees.shape[1] - 1) // 3,
        num_nodes, max_depth,
        NODES=triton.next_power_of_2(num_nodes), CHUNKS=num_chunks, CHUNK=CHUNK, MAX_PLACES=MAX_PLACES, num_warps=1,
    )  # fmt: skip
