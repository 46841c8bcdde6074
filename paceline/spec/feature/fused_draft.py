"""A whole draft on the fused Triton kernels: eight launches a level, nothing allocated and nothing read on the host.

Per level: the pair's product into q, k and v with RoPE and the KV write, attention, output product, gate and up, down
product, the head with each stretch's best tokens, these joined, and the choice of paths, which also writes the next
level's rows. Before them the newest pairs are taken in; after them the nodes that are offered are chosen.
draft_levels.py is the plain twin. Triton is there where CUDA is, so this file is imported there only.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from paceline.models.decoder import Linear
from paceline.models.drafters.joined import DraftWeights
from paceline.ops.triton.draft_attention import PathScratch, attend_paths
from paceline.ops.triton.draft_beam import Front, NextRows, Nodes, empty_nodes, extend_paths
from paceline.ops.triton.draft_rows import PairMaker, take_in_rows
from paceline.ops.triton.draft_top import head_top, num_stretches
from paceline.ops.triton.draft_tree import choose_nodes, num_found
from paceline.ops.triton.fused_linear import linear_residual, linear_rows, split_sizes
from paceline.ops.triton.fused_mlp import norm_gate_up_silu
from paceline.ops.triton.fused_qkv import Heads, norm_qkv_rope
from paceline.ops.triton.product import NO_PDL
from paceline.ops.triton.tiles import ROWS, Tile, row_tile_for, tile_for, widened
from paceline.spec.feature.draft_inputs import DraftViews
from paceline.spec.feature.draft_levels import DraftRoom, DraftShape

# Tokens of the head in one program: at least as many as a node has children (device_drafts.MAX_WIDTH). Of a large
# vocabulary fewer and longer stretches leave less to join.
STRETCH, LONG_STRETCH, LONG_FROM = 64, 128, 32768
WIDE_WARPS = 4  # with two, rows in float32 take more registers than there are


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a draft: `kind` names its kernel in measurements."""

    kind: str
    call: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Room for drafts of one width, of up to `max_requests`: smaller ones use the front of it."""

    rows: NextRows
    fused: Tensor  # [R * max(F, W), hidden] float32: features of the newest pairs; EAGLE: joined pairs
    streams: tuple[Tensor, Tensor]  # [R * W, hidden] float32 each: levels take turns
    query: Tensor  # [R * max(F, W), heads, dim] float32
    mixed: Tensor  # [R * W, heads * dim]
    activation: Tensor  # [R * W, intermediate]
    attention: PathScratch
    parts: Tensor  # float32: sums over parts of K
    arrivals: Tensor  # int32 zeros
    packed: Tensor  # int64
    sums: Tensor  # float32
    ids: Tensor  # [R * W, W] int32
    log_probs: Tensor  # [R * W, W] float32
    nodes: Nodes
    fronts: tuple[Front, Front]
    places: Tensor  # [R, N] int32


class FusedDraft:
    def __init__(self, weights: DraftWeights, room: DraftRoom, *, pdl: int = NO_PDL) -> None:
        self.weights, self.room, self.pdl = weights, room, pdl
        config = weights.config
        self._heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self._head_tile = _head_tile(weights.head)
        self._maker = PairMaker(
            weights.embedding, weights.embedding_norm, weights.hidden_norm, weights.norms_stream, config.rms_norm_eps
        )
        self._buffers = {width: self._allocate(width) for width in {1, room.width}}
        shape = (room.max_requests, 1 + 3 * room.num_nodes)
        self._output = torch.zeros(shape, dtype=torch.int32, device=room.kv.device)

    def run(self, views: DraftViews, shape: DraftShape) -> Tensor:
        for launch in self.launches(views, shape):
            launch.call()
        return self._output[: shape.num_requests]

    def launches(self, views: DraftViews, shape: DraftShape) -> list[Launch]:
        """All calls of a draft, in order."""
        buffers, width, count = self._buffers[shape.width], shape.width, shape.num_requests
        made = self._take_in(views, buffers, count)
        for depth in range(shape.num_levels):
            num_rows = count if depth == 0 else count * width
            features = buffers.streams[depth % 2][:num_rows]
            made.append(Launch("head", partial(self._run_head, features, views, buffers, depth)))
            is_last = depth + 1 == shape.num_levels
            made.append(Launch("beam", partial(self._extend, features, views, buffers, depth, is_last)))
            if not is_last:
                made += self._pair_products(buffers, count * width)
                made += self._layer(views, buffers, count, width, depth + 1)
        nodes = _first(buffers.nodes, count)
        output, places = self._output[:count], buffers.places[:count]
        tree = partial(choose_nodes, nodes, shape.num_levels, width, views, places, output, pdl=self.pdl)
        return [*made, Launch("tree", tree)]

    def _take_in(self, views: DraftViews, buffers: _Buffers, count: int) -> list[Launch]:
        """The newest pairs, up to the features of each request's last one."""
        weights, rows = self.weights, buffers.rows
        num_rows = count * self.room.num_pairs
        made, features = [], views.hidden
        if not weights.joins_pairs:
            features = buffers.fused[:num_rows]
            made.append(
                Launch("fc", partial(self._linear, views.hidden, weights.fc_norm, weights.fc, features, buffers))
            )
        take_in = partial(
            take_in_rows, features, self._maker, views, rows.x[:num_rows], buffers.streams[0][:count],
            rows.positions[:num_rows], rows.slots[:num_rows], pdl=self.pdl,
        )  # fmt: skip
        made.append(Launch("rows", take_in))
        made += self._pair_products(buffers, num_rows)
        return made + self._layer(views, buffers, count, 1, 0)

    def _pair_products(self, buffers: _Buffers, num_rows: int) -> list[Launch]:
        """q, k and v of the rows that stand in `buffers.rows`. EAGLE's residual stream is made here, by a product."""
        weights, rows = self.weights, buffers.rows
        made, x = [], rows.x[:num_rows]
        if weights.joins_pairs:
            joined = buffers.fused[:num_rows]
            made.append(Launch("fc", partial(self._linear, x, None, weights.fc, joined, buffers)))
            x = joined
        return [*made, Launch("qkv", partial(self._qkv, x, rows.positions[:num_rows], rows.slots[:num_rows], buffers))]

    def _layer(self, views: DraftViews, buffers: _Buffers, count: int, width: int, depth: int) -> list[Launch]:
        """From q, k and v to the next features: `width` rows of each request, below `depth` levels of nodes."""
        weights, room = self.weights, self.room
        num_rows, stream = count * width, buffers.streams[depth % 2][: count * width]
        rows_each = room.num_pairs if depth == 0 else width
        query = buffers.query[: count * rows_each].view(count, rows_each, self._heads.num_q, self._heads.dim)
        ancestors = buffers.fronts[depth % 2].ancestors[:count, :width]
        mixed, activation = buffers.mixed[:num_rows], buffers.activation[:num_rows]
        out = mixed.view(count, width, self._heads.num_q, self._heads.dim)
        made = []
        if weights.joins_pairs:
            joined = buffers.fused[: count * rows_each].view(count, rows_each, -1)[:, -width:]
            made.append(Launch("stream", partial(_copy, stream.view(count, width, -1), joined)))
        attend = partial(
            attend_paths, query, room.kv, views, ancestors, depth, room.first_scratch, out, buffers.attention,
            pdl=self.pdl,
        )  # fmt: skip
        return [
            *made,
            Launch("attention", attend),
            Launch("output", partial(self._add, mixed, weights.output, stream, buffers)),
            Launch("gate_up", partial(self._gate_up, stream, activation)),
            Launch("down", partial(self._add, activation, weights.down, stream, buffers)),
        ]

    # One method per product: how it is cut into programs, then the kernel.

    def _linear(self, x: Tensor, norm: Tensor | None, linear: Linear, out: Tensor, buffers: _Buffers) -> None:
        row_tile, tile = _cut(linear.weight, len(x), normed=norm is not None)
        tile = tile if norm is None else replace(tile, splits=1)
        linear_rows(
            x, norm, linear.weight, linear.bias, out, buffers.parts, buffers.arrivals, self._eps, tile,
            pdl=self.pdl, row_tile=row_tile,
        )  # fmt: skip

    def _qkv(self, x: Tensor, positions: Tensor, slots: Tensor, buffers: _Buffers) -> None:
        weights = self.weights
        norm = weights.input_norm
        row_tile, tile = _cut(weights.qkv.weight, len(x), normed=norm is not None)
        norm_qkv_rope(
            x, norm, weights.qkv.weight, weights.qkv.bias, weights.head_norms, weights.cos, weights.sin, positions,
            slots, buffers.query[: len(x)], self.room.kv, self._heads, self._eps, tile,
            pdl=self.pdl, row_tile=row_tile,
        )  # fmt: skip

    def _add(self, x: Tensor, linear: Linear, stream: Tensor, buffers: _Buffers) -> None:
        row_tile, tile = _cut(linear.weight, len(x), normed=False)
        linear_residual(
            x, linear.weight, linear.bias, stream, buffers.parts, buffers.arrivals, tile,
            pdl=self.pdl, row_tile=row_tile,
        )  # fmt: skip

    def _gate_up(self, stream: Tensor, activation: Tensor) -> None:
        weights = self.weights
        row_tile, tile = _cut(weights.gate_up.weight, len(stream), normed=True)
        norm_gate_up_silu(
            stream, weights.mlp_norm, weights.gate_up.weight, weights.gate_up.bias, activation, self._eps, tile,
            pdl=self.pdl, row_tile=row_tile,
        )  # fmt: skip

    def _run_head(self, features: Tensor, views: DraftViews, buffers: _Buffers, depth: int) -> None:
        weights = self.weights
        num_rows, row_tile = len(features), row_tile_for(len(features))
        head_top(
            features, weights.final_norm, weights.head, views, depth, weights.target_ids, buffers.packed, buffers.sums,
            buffers.ids[:num_rows], buffers.log_probs[:num_rows], self._eps, self._head_tile,
            pdl=self.pdl, row_tile=row_tile,
        )  # fmt: skip

    def _extend(self, features: Tensor, views: DraftViews, buffers: _Buffers, depth: int, is_last: bool) -> None:
        count, num_rows = len(views.slots), len(features)
        front, to = buffers.fronts[depth % 2], buffers.fronts[(depth + 1) % 2]
        rows = replace(buffers.rows, stream=buffers.streams[(depth + 1) % 2])
        extend_paths(
            buffers.ids[:num_rows], buffers.log_probs[:num_rows], features, front, _first(buffers.nodes, count),
            None if is_last else to, rows, self._maker, views.widths, views.last_positions, depth,
            self.room.first_scratch, pdl=self.pdl,
        )  # fmt: skip

    @property
    def _eps(self) -> float:
        return self.weights.config.rms_norm_eps

    def _allocate(self, width: int) -> _Buffers:
        weights, room, config = self.weights, self.room, self.weights.config
        count, device = room.max_requests, room.kv.device
        num_rows, most_rows = count * width, count * max(width, room.num_pairs)
        hidden, heads = config.hidden_size, self._heads
        splits = [
            split_sizes(most_rows, hidden, _cut(linear.weight, rows, normed=False)[1])
            for linear in (weights.fc, weights.output, weights.down)
            for rows in (1, most_rows)
        ]
        stretches = num_stretches(weights.head.shape[0], self._head_tile)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def front() -> Front:
            paths = torch.zeros(count, width, dtype=torch.float64, device=device)
            return Front(paths, ints(count, width), ints(count, width, room.num_levels))

        num_nodes = num_found(room.num_levels, width)
        return _Buffers(
            rows=NextRows(
                x=empty(most_rows, 2 * hidden, dtype=weights.dtype),
                stream=empty(0),
                positions=ints(most_rows),
                slots=ints(most_rows),
            ),
            fused=empty(most_rows, hidden),
            streams=(empty(num_rows, hidden), empty(num_rows, hidden)),
            query=empty(most_rows, heads.num_q, heads.dim),
            mixed=empty(num_rows, heads.num_q * heads.dim, dtype=weights.dtype),
            activation=empty(num_rows, config.intermediate_size, dtype=weights.dtype),
            attention=PathScratch.allocate(count, width, heads.num_q, heads.num_kv, heads.dim, device),
            parts=empty(max(parts for parts, _ in splits)),
            arrivals=ints(max(arrivals for _, arrivals in splits)),
            packed=empty(num_rows * stretches * width, dtype=torch.int64),
            sums=empty(num_rows * stretches),
            ids=ints(num_rows, width),
            log_probs=empty(num_rows, width),
            nodes=empty_nodes(count, num_nodes, device),
            fronts=(front(), front()),
            places=ints(count, num_nodes),
        )


def _first(nodes: Nodes, count: int) -> Nodes:
    return Nodes(nodes.token_ids[:count], nodes.parents[:count], nodes.log_probs[:count], nodes.paths[:count])


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


def _cut(weight: Tensor, num_rows: int, *, normed: bool) -> tuple[int, Tile]:
    """Rows of a program, and its tile. Bits may differ from size to size here, so wide programs get more warps."""
    row_tile = row_tile_for(num_rows)
    tile = tile_for(weight.shape[0], weight.shape[1], weight.dtype)
    if row_tile == ROWS:
        return row_tile, tile
    return row_tile, replace(widened(tile, weight.shape[0], num_rows, normed=normed), warps=WIDE_WARPS)


def _head_tile(head: Tensor) -> Tile:
    vocab, size = head.shape
    into = min(64, tile_for(vocab, size, head.dtype).into)
    return Tile(out=LONG_STRETCH if vocab >= LONG_FROM else STRETCH, into=into, warps=4, stages=3)
