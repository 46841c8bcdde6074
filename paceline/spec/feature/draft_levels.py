"""EAGLE-3 drafts of several requests as one function of tensors with fixed shapes, so that a CUDA graph can hold it.

What `Growth` (draft_growth.py) decides level by level on the host is decided here on the device, and the trees are the
same. Where a budget or a floor would have ended a path early, it is followed all the same, and its nodes are masked at
the end: they cannot displace others, because a path is never likelier than its beginning.

Shapes: R requests, F newest pairs of each, W children of a node and paths that go on, L levels, K nodes of a tree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.drafters.eagle3 import Eagle3
from paceline.models.drafters.layers import Attention, rope
from paceline.ops.random import keyed_noise
from paceline.spec.feature.draft_inputs import DraftViews

# query [R, W, heads, dim], kv [2, slots, kv heads, dim], views, scratch slots [R, T], visible [R, W, T] -> as query
Attend = Callable[[Tensor, Tensor, DraftViews, Tensor, Tensor], Tensor]
# logits [R, W, vocab], views, level, k -> draft ids and log-probabilities, [R, W, k], likeliest first
Top = Callable[[Tensor, DraftViews, int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class DraftOps:
    """What differs between the plain twin and the one with Triton kernels."""

    attend: Attend
    top: Top


@dataclass(frozen=True, slots=True)
class DraftShape:
    num_requests: int  # R
    width: int  # W
    num_levels: int  # L
    num_nodes: int  # K
    noisy: bool


class DraftNetwork:
    """The drafter's weights, joined where one product can do the work of several, in the type that products use."""

    def __init__(self, network: Eagle3, target: Any, dtype: torch.dtype, cos: Tensor, sin: Tensor) -> None:
        self.target, self.cos, self.sin = target, cos, sin
        layer = network.midlayer
        self._layer, self._attention = layer, layer.self_attn
        self.fc_norm, self.final_norm, self.d2t = network.fc_norm, network.norm, network.d2t
        attention, mlp = layer.self_attn, layer.mlp

        def joined(*parts: torch.nn.Linear) -> tuple[Tensor, Tensor | None]:
            weight = torch.cat([part.weight.detach() for part in parts]).to(dtype)
            biases = [part.bias for part in parts]
            return weight, None if biases[0] is None else torch.cat([bias.detach() for bias in biases]).to(dtype)

        self._fc = joined(network.fc)
        self._qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._output = joined(attention.o_proj)
        self._gate_up = joined(mlp.gate_proj, mlp.up_proj)
        self._down = joined(mlp.down_proj)
        self._head = joined(network.lm_head)
        dim = attention.head_dim
        self._sizes = [part.weight.shape[0] // dim for part in (attention.q_proj, attention.k_proj, attention.v_proj)]

    @property
    def attention(self) -> Attention:
        return self._attention

    def fuse(self, hidden: Tensor) -> Tensor:
        """[rows, layers * hidden] -> [rows, hidden]"""
        return _linear(self.fc_norm(hidden.float()), *self._fc)

    def qkv(self, token_ids: Tensor, feature: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key and value [rows, heads, dim], the first two rotated, and where the residual stream starts."""
        layer, attention = self._layer, self._attention
        normed = layer.hidden_norm(feature)
        embedding = layer.input_layernorm(self.target.vocabulary_rows(token_ids))
        both = _linear(torch.cat([embedding, normed], dim=1), *self._qkv).view(len(normed), -1, attention.head_dim)
        query, key, value = torch.split(both, self._sizes, dim=1)
        cos, sin = self.cos[positions], self.sin[positions]
        query, key = rope(attention.q_norm(query), cos, sin), rope(attention.k_norm(key), cos, sin)
        return query, key, value, normed if layer.norm_before_residual else feature

    def finish(self, mixed: Tensor, stream: Tensor) -> Tensor:
        """The next features from what attention gave: [rows, heads, dim], [rows, hidden] -> [rows, hidden]"""
        x = stream + _linear(mixed.flatten(1), *self._output)
        gate, up = _linear(self._layer.post_attention_layernorm(x), *self._gate_up).chunk(2, dim=-1)
        return x + _linear(F.silu(gate) * up, *self._down)

    def logits(self, features: Tensor) -> Tensor:
        """[rows, draft vocab] float32"""
        normed, weight = self.final_norm(features), self._head[0]
        if weight.dtype == torch.float32:
            return F.linear(normed, weight)
        # Rounded logits would tie where the likeliest tokens must be told apart.
        scores: Tensor = torch.mm(normed.to(weight.dtype), weight.t(), out_dtype=torch.float32)
        return scores


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.to(weight.dtype), weight, bias).float()


@dataclass(slots=True)
class _Level:
    """The nodes of one depth, as they were found."""

    token_ids: Tensor  # [R, nodes], the target's
    parents: Tensor  # [R, nodes]: among all nodes; -1: the root
    log_probs: Tensor  # [R, nodes], given the parent
    paths: Tensor  # [R, nodes] float64; -inf where the request's width does not reach
    above: Tensor  # [R, nodes] float64: the parent's


def draft(
    network: DraftNetwork, ops: DraftOps, kv: Tensor, views: DraftViews, shape: DraftShape, first_scratch: int
) -> Tensor:
    """Take in the newest pairs, grow the trees: [R, 1 + 3 * K] int32, the number of nodes of a tree, then their tokens,
    parents and the bits of their log-probabilities.

    kv: [2, slots, kv heads, dim], written."""
    num_requests, width = shape.num_requests, shape.width
    features = _take_in(network, ops, kv, views)
    token_ids, log_probs = _top(network, ops, features, views, 0, width)  # [R, 1, W]
    is_own = torch.arange(width, device=kv.device) < views.widths[:, None]  # [R, W]
    paths = log_probs[:, 0].double().masked_fill(~is_own, -torch.inf)
    root = torch.full_like(token_ids[:, 0], -1)
    levels = [_Level(token_ids[:, 0], root, log_probs[:, 0], paths, torch.full_like(paths, torch.inf))]
    # The frontier, [R, W] each: token, path, number among all nodes, row of the parent's feature.
    tokens, fronts = token_ids[:, 0], paths
    nodes = torch.arange(width, device=kv.device).expand(num_requests, width)
    features = features.expand(-1, width, -1)
    ancestors = torch.zeros(num_requests, width, 0, dtype=torch.int64, device=kv.device)  # places in their levels
    places = torch.arange(width, device=kv.device).expand(num_requests, width)
    num_nodes = width
    for depth in range(1, shape.num_levels):
        ancestors = torch.cat([ancestors, places[..., None]], dim=2)  # [R, W, depth]
        features = _run_level(network, ops, kv, views, tokens, features, ancestors, depth, first_scratch, shape)
        token_ids, log_probs = _top(network, ops, features, views, depth, width)  # [R, W, W]
        found = fronts[..., None] + log_probs.double()
        found = found.masked_fill(~is_own[:, None], -torch.inf).flatten(1)  # [R, W * W]
        above = fronts[..., None].expand(-1, -1, width).flatten(1)
        parents = nodes[..., None].expand(-1, -1, width).flatten(1)
        levels.append(_Level(token_ids.flatten(1), parents, log_probs.flatten(1), found, above))
        if depth + 1 == shape.num_levels:
            break
        fronts, best = found.topk(width, dim=1)
        fronts = fronts.masked_fill(~is_own, -torch.inf)
        tokens, nodes, rows = token_ids.flatten(1).gather(1, best), num_nodes + best, best // width
        features = features.gather(1, rows[..., None].expand(-1, -1, features.shape[-1]))
        ancestors = ancestors.gather(1, rows[..., None].expand(-1, -1, depth))
        num_nodes += width * width
    return _choose(levels, views, shape)


def _take_in(network: DraftNetwork, ops: DraftOps, kv: Tensor, views: DraftViews) -> Tensor:
    """Keys and values of the newest pairs, and the features that come out of each request's last one: [R, 1, hidden]"""
    num_requests, num_pairs = views.slots.shape
    fused = network.fuse(views.hidden)
    query, key, value, stream = network.qkv(views.next_tokens.flatten(), fused, views.positions.flatten())
    slots = views.slots.flatten()
    kv[0].index_copy_(0, slots, key.to(kv.dtype))
    kv[1].index_copy_(0, slots, value.to(kv.dtype))
    columns = views.begins[:, None] + torch.arange(num_pairs, device=kv.device)
    lines = views.table_rows[:, None].expand(-1, num_pairs)
    views.table.index_put_((lines, columns), views.slots.to(views.table.dtype))
    last = torch.arange(num_requests, device=kv.device) * num_pairs + views.counts - 1
    nothing = torch.zeros(num_requests, 0, dtype=torch.int64, device=kv.device)
    mixed = ops.attend(query[last][:, None], kv, views, nothing, nothing[:, None].bool())
    return network.finish(mixed.flatten(0, 1), stream[last])[:, None]


def _run_level(
    network: DraftNetwork,
    ops: DraftOps,
    kv: Tensor,
    views: DraftViews,
    tokens: Tensor,  # [R, W]
    features: Tensor,  # [R, W, hidden]: of their parents
    ancestors: Tensor,  # [R, W, depth]: places in the levels from the first on; the last is the node itself
    depth: int,
    first_scratch: int,
    shape: DraftShape,
) -> Tensor:
    num_requests, width = shape.num_requests, shape.width
    device = kv.device
    # Scratch: [R, L - 1, W]
    own = torch.arange(num_requests, device=device)[:, None] * ((shape.num_levels - 1) * width)
    scratch = first_scratch + own + torch.arange(depth * width, device=device)  # [R, depth * W]
    visible = (ancestors[..., None] == torch.arange(width, device=device)).flatten(2)  # [R, W, depth * W]
    positions = (views.last_positions[:, None] + depth).expand(-1, width).flatten()
    query, key, value, stream = network.qkv(tokens.flatten(), features.flatten(0, 1), positions)
    slots = scratch[:, (depth - 1) * width :].flatten()
    kv[0].index_copy_(0, slots, key.to(kv.dtype))
    kv[1].index_copy_(0, slots, value.to(kv.dtype))
    mixed = ops.attend(query.view(num_requests, width, *query.shape[1:]), kv, views, scratch, visible)
    return network.finish(mixed.flatten(0, 1), stream).view(num_requests, width, -1)


def _top(
    network: DraftNetwork, ops: DraftOps, features: Tensor, views: DraftViews, depth: int, width: int
) -> tuple[Tensor, Tensor]:
    """The target's ids of each node's children, and their log-probabilities: [R, rows, W]"""
    logits = network.logits(features.flatten(0, 1)).view(*features.shape[:2], -1)
    ids, log_probs = ops.top(logits, views, depth, width)
    return network.d2t[ids], log_probs


def _choose(levels: list[_Level], views: DraftViews, shape: DraftShape) -> Tensor:
    device = views.slots.device
    paths, above = torch.cat([x.paths for x in levels], dim=1), torch.cat([x.above for x in levels], dim=1)
    depths = torch.cat([torch.full((x.paths.shape[1],), i, device=device) for i, x in enumerate(levels)])
    is_in = (paths >= views.lowest[:, None]) & (above >= views.followed[:, None]) & (depths < views.depths[:, None])
    most = min(shape.num_nodes, paths.shape[1])
    best, chosen = paths.masked_fill(~is_in, -torch.inf).topk(most, dim=1)  # likeliest first
    is_kept = (best > -torch.inf) & (torch.arange(most, device=device) < views.num_nodes[:, None])
    chosen = chosen.masked_fill(~is_kept, paths.shape[1])  # behind all others
    # In the order in which they were found, parents come before their children.
    ranks = (chosen[:, None] < chosen[:, :, None]).sum(-1)  # [R, K]: those kept are all different
    place = torch.zeros(shape.num_requests, paths.shape[1] + 1, dtype=torch.int64, device=device)
    place.scatter_(1, chosen, ranks)
    index = chosen.clamp(max=paths.shape[1] - 1)
    parents = torch.cat([x.parents for x in levels], dim=1).gather(1, index)
    parents = torch.where(parents < 0, parents, place.gather(1, parents.clamp(min=0)))
    token_ids = torch.cat([x.token_ids for x in levels], dim=1).gather(1, index)
    log_probs = torch.cat([x.log_probs for x in levels], dim=1).gather(1, index).view(torch.int32)
    fields = torch.stack([token_ids.int(), parents.int(), log_probs], dim=1)  # [R, 3, K]
    # What is not kept goes to a place behind the last one.
    to = torch.where(is_kept, ranks, most)[:, None].expand(-1, 3, -1)
    ordered = torch.zeros(shape.num_requests, 3, most + 1, dtype=torch.int32, device=device).scatter_(2, to, fields)
    counts = is_kept.sum(1, keepdim=True).int()
    return torch.cat([counts, ordered[..., :most].flatten(1)], dim=1)


def plain_attend(query: Tensor, kv: Tensor, views: DraftViews, scratch: Tensor, visible: Tensor) -> Tensor:
    num_requests, width, num_heads, dim = query.shape
    longest = int(views.context_lens.max())
    context = views.table[views.table_rows, :longest].long()  # [R, keys]
    slots = torch.cat([context, scratch], dim=1)
    is_there = torch.arange(longest, device=kv.device) < views.context_lens[:, None]
    mask = torch.cat([is_there[:, None].expand(-1, width, -1), visible], dim=2)  # [R, W, keys]
    keys, values = (part[slots].transpose(1, 2) for part in kv)  # [R, kv heads, keys, dim]
    share = num_heads // keys.shape[1]
    grouped = query.view(num_requests, width, -1, share, dim).permute(0, 2, 3, 1, 4)  # [R, kv heads, share, W, dim]
    mixed = F.scaled_dot_product_attention(grouped, keys[:, :, None], values[:, :, None], attn_mask=mask[:, None, None])
    return mixed.permute(0, 3, 1, 2, 4).reshape(num_requests, width, num_heads, dim)


def plain_top(logits: Tensor, views: DraftViews, depth: int, k: int) -> tuple[Tensor, Tensor]:
    if views.id_constants is not None:
        noise = keyed_noise(views.noise_keys[:, depth], views.id_constants)  # [R, draft vocab]
        warm = views.scales > 0.0
        scores = logits * torch.where(warm, views.scales, 1.0)[:, None, None]
        logits = scores + noise.masked_fill(~warm[:, None], 0.0)[:, None]
    log_probs, ids = logits.log_softmax(-1).topk(k)
    return ids, log_probs
