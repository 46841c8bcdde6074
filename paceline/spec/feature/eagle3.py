"""`eagle3`: one trained layer drafts from the target's hidden states, in a tree that grows where it is sure.

With n tokens, of which the last has no KV yet, the pairs (h_t, x_{t+1}) for t <= n - 2 are true: they enter the
drafter's KV at slot t as soon as the target has computed h_t. The newest pair's output says what comes after the last
token and is the first draft's feature. Deeper nodes feed the drafter its own features, at positions n - 1, n, ..., and
their keys live in scratch.

Where a prefix comes from the cache, so do the drafter's keys. The last pair of a shared block was made with the token
that came next in the request that computed it: for another request this one key belongs to another continuation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.models.drafters.load import load_network
from paceline.models.drafters.paged import KeyRows, make_layers, make_linear
from paceline.models.padded_decoder import PaddedDecoder
from paceline.spec.buckets import largest_bucket
from paceline.spec.engine_parts import EngineParts
from paceline.spec.feature.block_rows import FeatureBlockRows
from paceline.spec.feature.captured_drafts import PendingDrafts, scratch_slots
from paceline.spec.feature.device_drafts import device_drafts
from paceline.spec.feature.draft_growth import Growth, least_log_prob
from paceline.spec.feature.draft_scores import LOWEST, Scored
from paceline.spec.feature.draft_writer import Wanted
from paceline.spec.feature.eagle_rounds import EagleRoundDraft
from paceline.spec.feature.feature_drafter import (
    SCRATCH_SLOTS,
    RowBuilder,
    chunks,
    context_rows,
    draft_scores,
    groups,
    placement,
    target_of,
    token_tensor,
)
from paceline.spec.feature.feature_queue import FeatureQueue, FeatureRows, StepRows, take_rows
from paceline.spec.feature.followed_rounds import FollowedRounds
from paceline.spec.feature.level_rows import Levels
from paceline.spec.feature.native_drafts import NativeDrafts
from paceline.spec.proposer import Budget, Needs, StepContext
from paceline.spec.sized_rounds import RoundsProposer, SizedRounds

WARM_UP_ROWS = (1, 8, 64, 512, 2048)


class Eagle3Proposer(RoundsProposer):
    kind = "eagle3"  # of network

    def __init__(
        self,
        services: EngineParts,
        largest: Budget,
        *,
        model: str | None,
        draft_sampling: str | None,
        draft_width: int,
        draft_min_prob: float,
        size_by_price: bool = False,
    ) -> None:
        self._target = target_of(services)
        network: Any = load_network(self.kind, model, self._target)
        place = placement(services)
        self._first_scratch = services.num_slots
        num_scratch = max(SCRATCH_SLOTS, draft_width * largest.max_depth)
        if not place.is_native:
            num_scratch = max(num_scratch, _captured_scratch(services, draft_width, largest))
        num_slots = services.num_slots + num_scratch
        self._fc = make_linear(network.fc, place)
        self._head = make_linear(network.lm_head, place, storage="int4")
        self._layers = make_layers(network.config.layer, [network.midlayer], num_slots, place)
        self._network = network.to(place.device)
        self._scores = draft_scores(services, network.d2t, draft_sampling)
        self._width, self._min_prob = draft_width, draft_min_prob
        # What was drawn must not decide what is offered: that would bias the output.
        self.keeps_min_prob = draft_sampling != "sampled"
        self._native = NativeDrafts.of(
            network,
            self._target,
            (self._layers, self._fc, self._head),
            place,
            self._scores,
            self._first_scratch,
        )
        self._captured = device_drafts(
            network, self._target, self._layers, self._scores, services, largest, draft_width
        )
        self._latest: StepRows | None = None  # of the newest pass, where drafts are captured
        self._queue = FeatureQueue(network.config.hidden_layers, services)
        self._rows = FeatureBlockRows(self.kind, network, self._layers.kv_cache, self._queue, services, self._flush)
        self._newest: dict[str, tuple[int, Tensor]] = {}  # request id -> position and fused feature of its newest pair
        self._followed: FollowedRounds | None = None
        if self._captured is not None and isinstance(self._target, PaddedDecoder):
            draft = EagleRoundDraft(self._captured, network.config.hidden_layers, self._wanted)
            self._rounds = SizedRounds(self.kind, draft, self._target, largest, size_by_price=size_by_price)
            self._followed = FollowedRounds(self._captured, self._queue)
        self._needs = Needs(hidden_layers=network.config.hidden_layers, draft_probs=draft_sampling == "sampled")

    def prepare(self) -> None:
        super().prepare()
        if self._captured is not None:
            self._warm_up()

    @torch.no_grad()
    def _warm_up(self) -> None:
        """Prompts of some lengths, into scratch: a device loads kernels when they are first used, which takes a
        hundred times as long as they run."""
        target = self._target
        shape = len(self._network.config.hidden_layers), target.config.hidden_size
        for count in WARM_UP_ROWS:
            none = np.zeros(count, dtype=np.int32)
            features = torch.zeros(count, *shape, dtype=target.hidden_dtype, device=self._layers.kv_cache.device)
            self._take_in(FeatureRows(features, none, none + self._first_scratch, none, {}), slice(0, count))

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """Nothing while drafts do not pay: then a pass is one of plain decoding in every respect."""
        return Needs() if self.skips_next_step() else self._needs

    def observe(self, step: StepContext) -> None:
        super().observe(step)
        if self._followed is not None:
            self._followed.observe(step)
        if step.drafted is not None:
            self._latest = None
        elif self._captured is not None:
            self._latest = self._queue.follow_lazily(step, self._flush)
            if self._latest is None:
                self._newest.clear()
        elif not self._queue.follow(step, self._flush):
            self._newest.clear()
        for request in step.gone:
            self._newest.pop(request.request_id, None)
            if self._captured is not None:
                self._captured.forget(request.request_id)
            if self._followed is not None:
                self._followed.forget(request.request_id)

    def block_rows(self) -> list[FeatureBlockRows]:
        return [self._rows]

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        return self.launch(step, budgets).collect()

    @torch.no_grad()
    def launch(self, step: StepContext, budgets: Sequence[Budget]) -> "LaunchedDrafts":
        """As `propose`, without waiting for the device where whole drafts are made there."""
        trees = [EMPTY_TREE] * len(step.requests)
        launched = LaunchedDrafts(trees)
        budgets = self._within_size(budgets)
        asked = [i for i, budget in enumerate(budgets) if min(budget.num_nodes, budget.max_depth) > 0]
        if self._captured is not None and self._latest is not None:
            captured = [i for i in asked if self._suits_captured(step.requests[i])]
            if captured:
                launched = LaunchedDrafts(trees, captured, self._launch_captured(step, budgets, captured))
            asked = [i for i in asked if i not in captured] if len(captured) < len(asked) else []
        self._flush()
        ready = [i for i in asked if self._knows(step.requests[i])]
        whole = [i for i in ready if self._suits_native(step.requests[i])]
        by_level = [i for i in ready if i not in whole] if len(whole) < len(ready) else []
        deepest = max((budgets[i].max_depth for i in ready), default=0)
        for floors, alike in self._by_floors(whole, budgets).items():  # nearly always the same for all
            for group in groups(alike, self._width * deepest):
                drafted = self._grow_natively([step.requests[i] for i in group], [budgets[i] for i in group], floors)
                for i, tree in zip(group, drafted, strict=True):
                    trees[i] = tree
        for group in groups(by_level, self._width * deepest):
            growing = [Growth(step.requests[i], budgets[i], *self._floors(budgets[i])) for i in group]
            self._grow(growing)
            for i, growth in zip(group, growing, strict=True):
                trees[i] = growth.tree()
        return launched

    def _wanted(self, request: Request, budget: Budget) -> Wanted:
        return Wanted(request, budget, _width(budget, self._width), *self._floors(budget))

    def _floors(self, budget: Budget) -> tuple[float, float]:
        """Log-probabilities from which a path is kept, and from which it is extended."""
        if not self.keeps_min_prob:
            return least_log_prob(self._min_prob), -math.inf
        return least_log_prob(max(self._min_prob, budget.min_prob)), least_log_prob(budget.min_prob_to_extend)

    def _by_floors(self, indices: Sequence[int], budgets: Sequence[Budget]) -> dict[tuple[float, float], list[int]]:
        grouped: dict[tuple[float, float], list[int]] = {}
        for i in indices:
            grouped.setdefault(self._floors(budgets[i]), []).append(i)
        return grouped

    def _suits_native(self, request: Request) -> bool:
        return self._native is not None and self._native.suit(request)

    def _suits_captured(self, request: Request) -> bool:
        assert self._captured is not None and self._latest is not None
        last = self._latest.last_position(request.request_id)
        return last == request.num_tokens - 2 and last >= 0 and self._captured.suit(request)

    def _launch_captured(self, step: StepContext, budgets: Sequence[Budget], indices: Sequence[int]) -> PendingDrafts:
        assert self._captured is not None and self._latest is not None
        wanted = [self._wanted(step.requests[i], budgets[i]) for i in indices]
        names = [one.request.request_id for one in wanted]
        self._queue.leave_out(self._latest, names, self._captured.num_pairs)
        self._flush()  # all other rows, before these requests look at any of them
        return self._captured.launch(wanted, self._latest, self._queue)

    def _knows(self, request: Request) -> bool:
        position, _ = self._newest.get(request.request_id, (-1, None))
        return position == request.num_tokens - 2 and position >= 0

    @torch.no_grad()
    def _flush(self) -> None:
        """Take in the queued features: fuse them, and store the keys and values of their pairs."""
        queued = self._queue.take()
        if queued is not None:
            for rows in chunks(len(queued), self._layers.kv_cache.device):
                self._take_in(queued, rows)

    def _take_in(self, queued: FeatureRows, rows: slice) -> None:
        if self._native is not None:
            fused = self._native.take_in(queued, rows)
        else:
            fused = self._fuse(queued.features[rows].flatten(1).float())
            inputs, _ = self._inputs(token_tensor(queued.next_tokens[rows]), fused)
            self._layers.store(0, inputs, context_rows(queued.positions[rows], queued.slots[rows]))
        for name, row in queued.last_rows.items():
            if rows.start <= row < rows.stop:
                self._newest[name] = int(queued.positions[row]), fused[row - rows.start]

    # The network's own part: three methods, which `eagle` replaces.

    def _fuse(self, hidden: Tensor) -> Tensor:
        """A feature from the target's hidden states: [rows, layers * hidden] -> [rows, hidden]"""
        return self._fc(self._network.fc_norm(hidden))

    def _logits(self, features: Tensor) -> Tensor:
        """[rows, draft vocab]"""
        return self._head(self._network.norm(features))

    def _inputs(self, token_ids: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and where the residual stream starts."""
        layer = self._network.midlayer
        normed = layer.hidden_norm(feature)
        embedding = layer.input_layernorm(self._target.vocabulary_rows(token_ids))
        return torch.cat([embedding, normed], dim=1), normed if layer.norm_before_residual else feature

    def _grow_natively(
        self, requests: list[Request], budgets: list[Budget], floors: tuple[float, float]
    ) -> list[DraftTree]:
        assert self._native is not None
        lowest, followed = floors
        return self._native.grow(
            requests,
            budgets,
            [self._queue.context(request) for request in requests],
            [self._newest[request.request_id][1] for request in requests],
            [_width(budget, self._width) for budget in budgets],
            max(LOWEST / 2, lowest),
            followed,
        )

    def _grow(self, growing: list[Growth]) -> None:
        """All requests of the group, one level at a time."""
        contexts = [self._queue.context(growth.request) for growth in growing]
        levels = Levels(growing, RowBuilder.of(contexts), self._first_scratch)
        # The newest pairs were stored already; storing them again with the same values lets one call do it all.
        rows = levels.builder.rows(
            range(len(growing)),
            [g.request.num_tokens - 2 for g in growing],
            [int(context[-1]) for context in contexts],
            [[] for _ in growing],
        )
        fused = torch.stack([self._newest[g.request.request_id][1] for g in growing])
        features = self._step(token_tensor([g.request.token_ids[-1] for g in growing]), fused, rows)
        while True:
            self._extend(growing, levels.owners, features, levels.depth)
            fed = levels.descend()
            if not fed:
                return
            tokens = token_tensor([growing[i].token_ids[node] for i, node, _ in fed])
            features = self._step(tokens, take_rows(features, [row for _, _, row in fed]), levels.rows(fed))

    def _step(self, token_ids: Tensor, feature: Tensor, rows: KeyRows) -> Tensor:
        """The next features: [rows, hidden]"""
        return self._layers.forward(0, *self._inputs(token_ids, feature), rows)

    def _extend(self, growing: list[Growth], owners: list[tuple[int, int]], features: Tensor, depth: int) -> None:
        """Children of every frontier node; `features` has one row for each, in order."""
        logits = self._logits(features)
        width = max(_width(g.budget, self._width) for g in growing)
        scored: Scored = self._scores.top([(growing[i].request, depth) for i, _ in owners], logits, width)
        begin = 0
        for growth in growing:
            lines = slice(begin, begin + len(growth.frontier))
            begin = lines.stop
            own = _width(growth.budget, self._width)
            if lines.stop > lines.start:
                growth.extend(scored.token_ids[lines, :own], scored.log_probs[lines, :own], own)
                growth.probs += scored.probs[lines]


@dataclass(slots=True)
class LaunchedDrafts:
    """Trees of a step, some of which are still being made on the device."""

    trees: list[DraftTree]
    indices: Sequence[int] = ()  # of those
    pending: PendingDrafts | None = None

    def collect(self) -> list[DraftTree]:
        """Wait for them. To be called once."""
        if self.pending is not None:
            for i, tree in zip(self.indices, self.pending.collect(), strict=True):
                self.trees[i] = tree
        return self.trees


def _captured_scratch(services: EngineParts, width: int, largest: Budget) -> int:
    return scratch_slots(largest_bucket(services.max_num_seqs), width, largest.max_depth)


def _width(budget: Budget, widest: int) -> int:
    """Room for one path only is filled with one path."""
    return 1 if budget.num_nodes <= budget.max_depth else min(widest, budget.num_nodes)
