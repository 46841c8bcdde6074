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
from paceline.ops.triton.draft_attention import attend_paths
from paceline.ops.triton.draft_beam import Nodes, extend_paths
from paceline.ops.triton.draft_rows import PairMaker, take_in_rows
from paceline.ops.triton.draft_top import head_top
from paceline.ops.triton.draft_tree import choose_nodes
from paceline.ops.triton.fused_linear import linear_residual, linear_rows
from paceline.ops.triton.fused_mlp import norm_gate_up_silu
from paceline.ops.triton.fused_qkv import Heads, norm_qkv_rope
from paceline.ops.triton.product import NO_PDL
from paceline.ops.triton.tiles import cut_of
from paceline.spec.feature.draft_buffers import DraftBuffers, allocate_buffers, head_rows, head_tile
from paceline.spec.feature.draft_inputs import DraftViews
from paceline.spec.feature.draft_levels import DraftRoom, DraftShape


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a draft: `kind` names its kernel in measurements."""

    kind: str
    call: Callable[[], None]


class FusedDraft:
    def __init__(self, weights: DraftWeights, room: DraftRoom, *, pdl: int = NO_PDL) -> None:
        self.weights, self.room, self.pdl = weights, room, pdl
        config = weights.config
        self._heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self._head_tile = head_tile(weights.head)
        self._maker = PairMaker(
            weights.embedding, weights.embedding_norm, weights.hidden_norm, weights.norms_stream, config.rms_norm_eps
        )
        self._buffers = {width: allocate_buffers(weights, room, width) for width in {1, room.width}}
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

    def _take_in(self, views: DraftViews, buffers: DraftBuffers, count: int) -> list[Launch]:
        """The newest pairs, up to the features of each request's last one."""
        weights, rows = self.weights, buffers.rows
        num_rows = count * self.room.num_pairs
        made, features = [], views.hidden
        if not weights.joins_pairs:
            features = buffers.fused[:num_rows]
            made.append(
                Launch("fc", partial(self._linear, views.hidden, weights.scales_fc, weights.fc, features, buffers))
            )
        take_in = partial(
            take_in_rows, features, self._maker, views, rows.x[:num_rows], buffers.streams[0][:count],
            rows.positions[:num_rows], rows.slots[:num_rows], pdl=self.pdl,
        )  # fmt: skip
        made.append(Launch("rows", take_in))
        made += self._pair_products(buffers, num_rows)
        return made + self._layer(views, buffers, count, 1, 0)

    def _pair_products(self, buffers: DraftBuffers, num_rows: int) -> list[Launch]:
        """q, k and v of the rows that stand in `buffers.rows`. EAGLE's residual stream is made here, by a product."""
        weights, rows = self.weights, buffers.rows
        made, x = [], rows.x[:num_rows]
        if weights.joins_pairs:
            joined = buffers.fused[:num_rows]
            made.append(Launch("fc", partial(self._linear, x, False, weights.fc, joined, buffers)))
            x = joined
        return [*made, Launch("qkv", partial(self._qkv, x, rows.positions[:num_rows], rows.slots[:num_rows], buffers))]

    def _layer(self, views: DraftViews, buffers: DraftBuffers, count: int, width: int, depth: int) -> list[Launch]:
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

    def _linear(self, x: Tensor, scales: bool, linear: Linear, out: Tensor, buffers: DraftBuffers) -> None:
        own = cut_of(linear.weight, len(x))
        tile = replace(own.tile, splits=1) if scales else own.tile
        linear_rows(
            x, linear.weight, linear.bias, out, buffers.parts, buffers.arrivals, self._eps, tile,
            scaled=scales, pdl=self.pdl, row_tile=own.rows,
        )  # fmt: skip

    def _qkv(self, x: Tensor, positions: Tensor, slots: Tensor, buffers: DraftBuffers) -> None:
        weights = self.weights
        own = cut_of(weights.qkv.weight, len(x))
        norm_qkv_rope(
            x, x if weights.scales_qkv else None, weights.qkv.weight, weights.qkv.bias, weights.head_norms,
            weights.cos, weights.sin, positions, slots, buffers.query[: len(x)], self.room.kv, self._heads,
            self._eps, own.tile, pdl=self.pdl, row_tile=own.rows,
        )  # fmt: skip

    def _add(self, x: Tensor, linear: Linear, stream: Tensor, buffers: DraftBuffers) -> None:
        own = cut_of(linear.weight, len(x))
        linear_residual(
            x, linear.weight, linear.bias, stream, buffers.parts, buffers.arrivals, own.tile,
            pdl=self.pdl, row_tile=own.rows,
        )  # fmt: skip

    def _gate_up(self, stream: Tensor, activation: Tensor) -> None:
        gate_up = self.weights.gate_up
        own = cut_of(gate_up.weight, len(stream))
        norm_gate_up_silu(
            stream, stream, gate_up.weight, gate_up.bias, activation, self._eps, own.tile,
            pdl=self.pdl, row_tile=own.rows,
        )  # fmt: skip

    def _run_head(self, features: Tensor, views: DraftViews, buffers: DraftBuffers, depth: int) -> None:
        weights = self.weights
        num_rows = len(features)
        head_top(
            features, weights.head, views, depth, weights.target_ids, buffers.packed, buffers.sums,
            buffers.ids[:num_rows], buffers.log_probs[:num_rows], self._eps, self._head_tile,
            scaled=weights.scales_head, pdl=self.pdl, row_tile=head_rows(num_rows),
        )  # fmt: skip

    def _extend(self, features: Tensor, views: DraftViews, buffers: DraftBuffers, depth: int, is_last: bool) -> None:
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


def _first(nodes: Nodes, count: int) -> Nodes:
    return Nodes(nodes.token_ids[:count], nodes.parents[:count], nodes.log_probs[:count], nodes.paths[:count])


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)
