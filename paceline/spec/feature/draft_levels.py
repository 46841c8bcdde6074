"""EAGLE drafts of several requests as one function of tensors with fixed shapes: the plain twin of fused_draft.py.

What `Growth` (draft_growth.py) decides level by level on the host is decided here on the device, and the trees are the
same. Where a budget or a floor would have ended a path early, it is followed all the same, and its nodes are masked at
the end: they cannot displace others, because a path is never likelier than its beginning.

Shapes: R requests, F newest pairs of each, W children of a node and paths that go on, L levels, K nodes of a tree.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.decoder import Linear
from paceline.models.drafters.joined import DraftWeights
from paceline.models.drafters.layers import rope
from paceline.ops.random import keyed_noise
from paceline.spec.feature.draft_inputs import DraftViews


@dataclass(frozen=True, slots=True)
class DraftShape:
    """One captured graph each."""

    num_requests: int  # R
    width: int  # W
    num_levels: int  # L

    def fits(self, num_requests: int, width: int, num_levels: int) -> bool:
        """Can such a draft be padded to this one?"""
        return num_requests <= self.num_requests and width <= self.width and num_levels <= self.num_levels


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """Where drafts keep keys, and the largest draft that there will be."""

    kv: Tensor  # [2, slots, kv heads, dim] float32; the last slot is nobody's
    first_scratch: int  # slots of nodes
    max_requests: int
    num_pairs: int  # F
    width: int
    num_levels: int
    num_nodes: int  # K


class DraftKernels(Protocol):
    def run(self, views: DraftViews, shape: DraftShape) -> Tensor:
        """Take in the newest pairs, grow the trees: [R, 1 + 3 * K] int32, the number of nodes of a tree, then their
        tokens, parents and the bits of their log-probabilities. Static shapes, nothing is read on the host."""
        ...


@dataclass(slots=True)
class _Level:
    """The nodes of one depth, as they were found."""

    token_ids: Tensor  # [R, nodes], the target's
    parents: Tensor  # [R, nodes]: among all nodes; -1: the root
    log_probs: Tensor  # [R, nodes], given the parent
    paths: Tensor  # [R, nodes] float64; -inf where the request's width does not reach
    above: Tensor  # [R, nodes] float64: the parent's


class PlainDraft:
    """In plain PyTorch, on any device."""

    def __init__(self, weights: DraftWeights, room: DraftRoom) -> None:
        self.weights, self.room = weights, room

    def run(self, views: DraftViews, shape: DraftShape) -> Tensor:
        width, device = shape.width, views.slots.device
        features = self._take_in(views)
        token_ids, log_probs = self._top(features, views, 0, width)  # [R, 1, W]
        is_own = torch.arange(width, device=device) < views.widths[:, None]  # [R, W]
        paths = log_probs[:, 0].double().masked_fill(~is_own, -torch.inf)
        root = torch.full_like(token_ids[:, 0], -1)
        levels = [_Level(token_ids[:, 0], root, log_probs[:, 0], paths, torch.full_like(paths, torch.inf))]
        # The frontier, [R, W] each: token, path, number among all nodes, row of the parent's feature.
        tokens, fronts = token_ids[:, 0], paths
        places = torch.arange(width, device=device).expand(shape.num_requests, width)
        nodes, num_nodes = places, width
        features = features.expand(-1, width, -1)
        ancestors = places.new_zeros(shape.num_requests, width, 0)  # places in their levels
        for depth in range(1, shape.num_levels):
            ancestors = torch.cat([ancestors, places[..., None]], dim=2)  # [R, W, depth]
            features = self._run_level(views, tokens, features, ancestors)
            token_ids, log_probs = self._top(features, views, depth, width)  # [R, W, W]
            found = fronts[..., None] + log_probs.double()
            found = found.masked_fill(~is_own[:, None], -torch.inf).flatten(1)  # [R, W * W]
            above = fronts[..., None].expand(-1, -1, width).flatten(1)
            parents = nodes[..., None].expand(-1, -1, width).flatten(1)
            levels.append(_Level(token_ids.flatten(1), parents, log_probs.flatten(1), found, above))
            if depth + 1 == shape.num_levels:
                break
            fronts, best = _likeliest(found, width)
            fronts = fronts.masked_fill(~is_own, -torch.inf)
            tokens, nodes, rows = token_ids.flatten(1).gather(1, best), num_nodes + best, best // width
            features = features.gather(1, rows[..., None].expand(-1, -1, features.shape[-1]))
            ancestors = ancestors.gather(1, rows[..., None].expand(-1, -1, depth))
            num_nodes += width * width
        return _choose(levels, views, self.room.num_nodes)

    def _take_in(self, views: DraftViews) -> Tensor:
        """Keys and values of the newest pairs, and the features that come out of each request's last: [R, 1, hidden]"""
        weights = self.weights
        num_requests, num_pairs = views.slots.shape
        features = views.hidden.float()
        if not weights.joins_pairs:
            features = _linear(_scaled(features, weights.scales_fc, weights), weights.fc)
        slots = views.slots.flatten().long()
        query, stream = self._qkv(views.next_tokens.flatten(), features, views.positions.flatten(), slots)
        columns = (views.context_lens - num_pairs)[:, None] + torch.arange(num_pairs, device=slots.device)
        lines = views.table_rows[:, None].expand(-1, num_pairs)
        is_pair = views.slots >= 0
        views.table[lines[is_pair].long(), columns[is_pair].long()] = views.slots[is_pair]
        query, stream = (x.view(num_requests, num_pairs, *x.shape[1:])[:, -1:] for x in (query, stream))
        mixed = plain_attend(query, self.room.kv, views, slots.new_zeros(num_requests, 1, 0), 0)
        return self._finish(mixed, stream)

    def _run_level(self, views: DraftViews, tokens: Tensor, features: Tensor, ancestors: Tensor) -> Tensor:
        """tokens [R, W] and the features of their parents [R, W, hidden]; ancestors [R, W, depth]: places in the levels
        from the first on, the last is the node itself -> the next features"""
        num_requests, width, depth = ancestors.shape
        own = torch.arange(num_requests, device=tokens.device)[:, None] * (self.room.num_levels * width)
        slots = self.room.first_scratch + own + (depth - 1) * width + torch.arange(width, device=tokens.device)
        positions = (views.last_positions[:, None] + depth).expand(-1, width).flatten()
        query, stream = self._qkv(tokens.flatten(), features.flatten(0, 1), positions, slots.flatten())
        query, stream = (x.view(num_requests, width, *x.shape[1:]) for x in (query, stream))
        scratch = self.room.first_scratch, self.room.num_levels
        return self._finish(plain_attend(query, self.room.kv, views, ancestors, *scratch), stream)

    def _qkv(self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [rows, heads, dim] and where the residual stream starts; keys and values are stored."""
        weights, config, kv = self.weights, self.weights.config, self.room.kv
        embedding = _norm(weights.embedding[tokens.long()].float(), weights.embedding_norm, weights)
        normed = _norm(feature, weights.hidden_norm, weights)
        x, stream = torch.cat([embedding, normed], dim=1), normed if weights.norms_stream else feature
        if weights.joins_pairs:
            stream = _linear(x, weights.fc)
            x = _scaled(stream, weights.scales_qkv, weights)
        made = _linear(x, weights.qkv).view(len(x), -1, config.head_dim)
        query, key, value = torch.split(made, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if weights.head_norms is not None:
            query, key = _norm(query, weights.head_norms[0], weights), _norm(key, weights.head_norms[1], weights)
        angles = weights.cos[positions.long()], weights.sin[positions.long()]
        slots = torch.where(slots < 0, kv.shape[1] - 1, slots)
        kv[0].index_copy_(0, slots, rope(key, *angles))
        kv[1].index_copy_(0, slots, value)
        return rope(query, *angles), stream

    def _finish(self, mixed: Tensor, stream: Tensor) -> Tensor:
        """The next features from what attention gave: [R, W, heads, dim], [R, W, hidden] -> [R, W, hidden]"""
        weights = self.weights
        x = stream + _linear(mixed.flatten(2), weights.output)
        gate, up = _linear(_scaled(x, True, weights), weights.gate_up).chunk(2, dim=-1)
        return x + _linear(F.silu(gate) * up, weights.down)

    def _top(self, features: Tensor, views: DraftViews, depth: int, width: int) -> tuple[Tensor, Tensor]:
        """The target's ids of each node's children, and their log-probabilities: [R, rows, W]"""
        normed = _scaled(features, self.weights.scales_head, self.weights)
        ids, log_probs = plain_top(_linear(normed, Linear(self.weights.head, None)), views, depth, width)
        return self.weights.target_ids[ids].long(), log_probs


def _norm(x: Tensor, weight: Tensor | None, weights: DraftWeights) -> Tensor:
    return x if weight is None else F.rms_norm(x, weight.shape, weight, weights.config.rms_norm_eps)


def _scaled(x: Tensor, scales: bool, weights: DraftWeights) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=weights.config.rms_norm_eps) if scales else x


def _linear(x: Tensor, linear: Linear) -> Tensor:
    bias = None if linear.bias is None else linear.bias.float()
    return F.linear(x.to(linear.weight.dtype).float(), linear.plain.float(), bias)


def _likeliest(paths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As topk, and of equals the first: a child that is certain is as likely as its parent, and comes after it."""
    values, indices = paths.sort(dim=1, descending=True, stable=True)
    return values[:, :count], indices[:, :count]


def _choose(levels: list[_Level], views: DraftViews, num_nodes: int) -> Tensor:
    device, num_requests = views.slots.device, len(views.slots)
    paths, above = torch.cat([x.paths for x in levels], dim=1), torch.cat([x.above for x in levels], dim=1)
    depths = torch.cat([torch.full((x.paths.shape[1],), i, device=device) for i, x in enumerate(levels)])
    is_in = (paths >= views.lowest[:, None]) & (above >= views.followed[:, None]) & (depths < views.depths[:, None])
    most = min(num_nodes, paths.shape[1])
    best, chosen = _likeliest(paths.masked_fill(~is_in, -torch.inf), most)
    is_kept = (best > -torch.inf) & (torch.arange(most, device=device) < views.num_nodes[:, None])
    chosen = chosen.masked_fill(~is_kept, paths.shape[1])  # behind all others
    # In the order in which they were found, parents come before their children.
    ranks = (chosen[:, None] < chosen[:, :, None]).sum(-1)  # [R, K]: those kept are all different
    place = torch.zeros(num_requests, paths.shape[1] + 1, dtype=torch.int64, device=device)
    place.scatter_(1, chosen, ranks)
    index = chosen.clamp(max=paths.shape[1] - 1)
    parents = torch.cat([x.parents for x in levels], dim=1).gather(1, index)
    parents = torch.where(parents < 0, parents, place.gather(1, parents.clamp(min=0)))
    token_ids = torch.cat([x.token_ids for x in levels], dim=1).gather(1, index)
    log_probs = torch.cat([x.log_probs for x in levels], dim=1).gather(1, index).view(torch.int32)
    fields = torch.stack([token_ids.int(), parents.int(), log_probs], dim=1)  # [R, 3, K]
    # What is not kept goes to a place behind the last one.
    to = torch.where(is_kept, ranks, num_nodes)[:, None].expand(-1, 3, -1)
    ordered = torch.zeros(num_requests, 3, num_nodes + 1, dtype=torch.int32, device=device).scatter_(2, to, fields)
    counts = is_kept.sum(1, keepdim=True).int()
    return torch.cat([counts, ordered[..., :num_nodes].flatten(1)], dim=1)


def plain_attend(
    query: Tensor, kv: Tensor, views: DraftViews, ancestors: Tensor, first_scratch: int, levels: int = 0
) -> Tensor:
    """query [R, W, heads, dim] over its request's context, then over one node of each level above, [R, W, depth], of
    the nodes whose slots are [R, levels, W] from `first_scratch` on -> as query"""
    num_requests, width, num_heads, dim = query.shape
    context_lens = views.context_lens.clamp(min=1)  # padding looks at something
    longest = int(context_lens.max())
    context = views.table[views.table_rows.long(), :longest].long()  # [R, keys]
    slots = context[:, None].expand(-1, width, -1)
    own = first_scratch + torch.arange(num_requests, device=kv.device)[:, None, None] * (levels * width)
    nodes = own + torch.arange(ancestors.shape[2], device=kv.device) * width + ancestors  # [R, W, depth]
    slots = torch.cat([slots, nodes], dim=2)
    is_there = torch.arange(longest, device=kv.device) < context_lens[:, None]
    mask = torch.cat([is_there[:, None].expand(-1, width, -1), torch.ones_like(nodes, dtype=torch.bool)], dim=2)
    keys, values = (part[slots].transpose(2, 3) for part in kv)  # [R, W, kv heads, keys, dim]
    grouped = query.reshape(num_requests, width, keys.shape[2], -1, dim)  # [R, W, kv heads, heads that share, dim]
    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, :, None, None])
    return mixed.reshape(num_requests, width, num_heads, dim)


class Noise(Protocol):
    """As ops/triton/draft_top.py has it."""

    @property
    def scales(self) -> Tensor: ...

    @property
    def noise_keys(self) -> Tensor: ...

    @property
    def id_constants(self) -> Tensor: ...


def plain_top(logits: Tensor, views: Noise, depth: int, k: int) -> tuple[Tensor, Tensor]:
    """logits [R, rows, vocab] -> ids and log-probabilities, [R, rows, k], likeliest first"""
    warm = views.scales > 0.0
    if bool(warm.any()):
        noise = keyed_noise(views.noise_keys[:, depth], views.id_constants)  # [R, draft vocab]
        scores = logits * torch.where(warm, views.scales, 1.0)[:, None, None]
        logits = scores + noise.masked_fill(~warm[:, None], 0.0)[:, None]
    log_probs, ids = logits.log_softmax(-1).topk(k)
    return ids, log_probs
