"""What the engine holds of speculation: it asks for drafts and reports what became of them.

`Speculator` owns the proposers, gives each request to the one it chose, sets the budgets, and keeps the statistics.

    speculator.observe(step)           after a target pass: what was accepted, which requests ended
    speculator.propose(step)           the next trees, one per request of `step.requests`

Neither raises because a proposer does: see `drafter_faults.py`.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.core.block_rows import BlockRows
from paceline.core.draft_counts import DraftCounts
from paceline.core.faults import request_error
from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.errors import InvalidOptionError, PacelineError
from paceline.spec.auto.controller import alone
from paceline.spec.config.request_choice import PLAIN, Choice, choose
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.drafter_faults import DrafterFaults
from paceline.spec.engine_parts import EngineParts
from paceline.spec.methods import build_proposer
from paceline.spec.proposer import Budget, Needs, Proposer, StepContext, union
from paceline.spec.rounds import RoundChoice
from paceline.spec.statistics import MethodStats

logger = logging.getLogger("paceline")


class Speculator:
    def __init__(
        self,
        config: SpeculativeConfig | Mapping[str, Any] | None,
        services: EngineParts,
        *,
        by_price: bool = False,  # where the configuration gives no size: draft only what pays, with its method
    ) -> None:
        self._by_price = by_price
        self.config = SpeculativeConfig.parse(config)
        self._services = services
        self._proposers: dict[str, Proposer] = {}
        self._building = threading.Lock()
        self._stats: dict[str, MethodStats] = defaultdict(MethodStats)
        self._choices: dict[str, Choice] = {}  # request id -> how it is drafted for
        self._faults = DrafterFaults()
        self._is_skipped = False  # was drafting skipped after the last pass?
        if self.config is not None and self.config.method != "none":
            self._proposer(self.config.method)

    @property
    def proposers(self) -> Mapping[str, Proposer]:
        """Those in use, by method."""
        return self._proposers

    @property
    def services(self) -> EngineParts:
        """What proposers are built with."""
        return self._services

    @property
    def needs(self) -> Needs:
        """What all proposers in use need together, in the next step: grows when a request brings a new method."""
        needs = [self._needs_of(name, proposer) for name, proposer in list(self._proposers.items())]
        return needs[0] if len(needs) == 1 else union(needs)

    def _needs_of(self, name: str, proposer: Proposer) -> Needs:
        try:
            return Needs() if name in self._faults.off else proposer.needs
        except BaseException as error:
            self._faults.note(name, error)
            return Needs()

    @property
    def max_nodes(self) -> int:
        """The largest tree of a request that does not choose for itself."""
        return 0 if self.config is None else self.config.node_budget

    def use_clock(self, clock: Callable[[], float]) -> None:
        """The clock of proposers that decide by measured time: a replay's, or one that stops between steps."""
        for proposer in self._proposers.values():
            proposer.use_clock(clock)

    def check_request(self, params: SamplingParams) -> None:
        """Refuse a request whose own choice cannot be honoured, before it is queued."""
        chosen = choose(self.config, params.speculative)
        if chosen is PLAIN:
            return
        try:
            self._proposer(chosen.method).check_params(params)
        except PacelineError:
            raise
        except BaseException as error:
            raise request_error(f"checking the request with method {chosen.method!r}", error) from error

    def observe(self, step: StepContext) -> None:
        served: dict[str, list[Request]] = defaultdict(list)
        alike: dict[tuple[str, int], tuple[DraftCounts, int]] = {}  # counts that several passes share: added once
        for verified in step.passes:
            if verified.logits_row >= 0:
                method, counts = self._choice(verified.request).method, verified.counts
                served[method].append(verified.request)
                alike[method, id(counts)] = counts, alike.get((method, id(counts)), (counts, 0))[1] + 1
        for (method, _), (counts, times) in alike.items():
            self._stats[method].counts.add(counts, times)
        if self._is_skipped and not step.gone:
            return  # no proposer was asked
        for name, proposer in list(self._proposers.items()):  # a request may bring a method from another thread
            if name in self._faults.off:
                continue
            begin_s = time.perf_counter()
            try:
                proposer.observe(step)
            except BaseException as error:
                self._faults.note(name, error)
            self._stats[name].spend(time.perf_counter() - begin_s, served[name])
        for request in step.gone:
            self._choices.pop(request.request_id, None)

    def propose(self, step: StepContext) -> list[DraftTree]:
        trees = [EMPTY_TREE] * len(step.requests)
        self._is_skipped = self._skip_step()
        if self._is_skipped:
            return trees
        for method, (indices, budgets) in self._by_method(step.requests).items():
            part = step
            if len(indices) < len(step.requests):
                part = replace(step, requests=[step.requests[i] for i in indices])
            stats = self._stats[method]
            begin_s = time.perf_counter()
            drafts: Sequence[DraftTree] = ()
            try:
                drafts = self._proposer(method).propose(part, budgets)
                check_trees(drafts, budgets, self._services.vocab_size, method)
            except BaseException as error:
                self._faults.note(method, error)
                drafts = [EMPTY_TREE] * len(indices)
            stats.spend(time.perf_counter() - begin_s, part.requests)
            stats.num_proposals += len(indices)
            for i, tree in zip(indices, drafts, strict=True):
                if tree.token_ids:
                    trees[i] = tree if tree.members is not None else tree.by(method)
        self._faults.end_step()
        return trees

    def prepare(self) -> None:
        """Once, when the target's passes are ready."""
        for proposer in self._proposers.values():
            proposer.prepare()

    def rounds_for(self, requests: Sequence[Request]) -> RoundChoice | None:
        """How the device drafts for all of these without a turn of the host, where it can."""
        if len(self._proposers) != 1:
            return None
        ((method, proposer),) = self._proposers.items()
        rounds = None if method in self._faults.off else proposer.rounds()
        if rounds is None:
            return None
        chosen = self._choice(requests[0])
        if chosen.method != method or any(self._choice(request) != chosen for request in requests):
            return None
        return RoundChoice(method, rounds, Budget(chosen.node_budget, chosen.num_speculative_tokens))

    def note_round(self, num_requests: int) -> None:
        """Instead of `propose`: the device has drafted for so many."""
        self._is_skipped = False
        (method,) = self._proposers
        self._stats[method].num_proposals += num_requests

    @property
    def drafts_nothing_next(self) -> bool:
        """Whether the next step's drafts are known to be empty, whatever the pass that runs now brings."""
        return all(self._may_skip(name, proposer) for name, proposer in list(self._proposers.items()))

    def skip(self) -> None:
        """Instead of `propose`, after `drafts_nothing_next`."""
        self._is_skipped = bool(self._proposers)
        self._tell_skipped()

    def _skip_step(self) -> bool:
        """Skip this step's drafting where every proposer says that it may be skipped."""
        if not self._proposers or not self.drafts_nothing_next:
            return False
        self._tell_skipped()
        return True

    def _tell_skipped(self) -> None:
        for name, proposer in list(self._proposers.items()):
            try:
                proposer.skip_step()
            except BaseException as error:
                self._faults.note(name, error)
        self._faults.end_step()

    def _may_skip(self, name: str, proposer: Proposer) -> bool:
        try:
            return name not in self._faults.off and proposer.skips_next_step()
        except BaseException as error:
            self._faults.note(name, error)
            return False

    def block_rows(self) -> list[BlockRows]:
        """What the proposers in use hold beside the target's KV blocks."""
        working = [p for name, p in list(self._proposers.items()) if name not in self._faults.off]
        return [rows for proposer in working for rows in proposer.block_rows()]

    def stats(self) -> dict[str, Any]:
        """Method -> its figures, ready for JSON; a method that decides for itself says what it decided."""
        figures = {name: stats.to_dict() for name, stats in list(self._stats.items())}
        for name, proposer in list(self._proposers.items()):
            for member, known in proposer.member_figures().items():
                by_member = figures.setdefault(name, MethodStats().to_dict())["by_member"]
                by_member.setdefault(member, DraftCounts().to_dict()).update(known)
                if member == name:  # a method by itself, at the size that pays
                    figures[name].update({key: known[key] for key in ("num_failures", "is_off") if key in known})
            decisions = proposer.report()
            if decisions:
                figures.setdefault(name, MethodStats().to_dict())["decisions"] = decisions
        if self._by_price and self.config is not None and self.config.node_budget:
            figures.setdefault(self.config.method, MethodStats().to_dict())["size"] = self.config.size_chosen
        self._faults.add_to(figures)
        return figures

    def _proposer(self, method: str) -> Proposer:
        known = self._proposers.get(method)
        if known is not None:
            return known  # without waiting for one that another thread is building
        with self._building:  # requests are checked in their callers' threads: two may bring the same method
            if method not in self._proposers:
                config = self.config
                if config is None or config.method != method:
                    config = SpeculativeConfig.parse({"method": method})
                assert config is not None
                self._proposers[method] = self._build(config)
            return self._proposers[method]

    def _build(self, config: SpeculativeConfig) -> Proposer:
        """A method whose size nobody chose is the only member of `auto`, and its size is what pays. Not one that a
        request brings: what a pass costs is measured before the first one runs."""
        if not self._by_price or config is not self.config or not config.sized_by_price:
            return build_proposer(config.method, self._services, config.options)
        largest = Budget(config.node_budget, config.num_speculative_tokens)
        return alone(config, self._services, largest)

    def _choice(self, request: Request) -> Choice:
        chosen = self._choices.get(request.request_id)
        if chosen is None:
            try:
                chosen = choose(self.config, request.sampling_params.speculative)
            except InvalidOptionError as error:  # `check_request` was not asked
                logger.warning("request %s is decoded plainly: %s", request.request_id, error)
                chosen = PLAIN
            self._choices[request.request_id] = chosen
        return chosen

    def _by_method(self, requests: Sequence[Request]) -> dict[str, tuple[list[int], list[Budget]]]:
        """Method -> indices of the requests that it drafts for, and their budgets; those without room are left out."""
        groups: dict[str, tuple[list[int], list[Budget]]] = {}
        for i, request in enumerate(requests):
            chosen = self._choice(request)
            depth = min(chosen.num_speculative_tokens, request.max_draft_depth)
            nodes = chosen.node_budget
            if nodes <= chosen.num_speculative_tokens:  # room for one path: it must not become two short ones
                nodes = min(nodes, depth)
            if nodes > 0 and depth > 0 and chosen.method not in self._faults.off:
                group = groups.get(chosen.method)
                if group is None:
                    group = groups[chosen.method] = [], []
                group[0].append(i)
                group[1].append(Budget(nodes, depth))
        return groups


def check_trees(trees: Sequence[DraftTree], budgets: Sequence[Budget], vocab_size: int, method: str) -> None:
    for tree, budget in zip(trees, budgets, strict=True):
        if tree.token_ids:
            check_tree(tree, budget, vocab_size, method)


def check_tree(tree: DraftTree, budget: Budget, vocab_size: int, method: str) -> None:
    """Our own invariant: a proposer gives back a tree over the vocabulary, inside its budget."""
    tree.check(vocab_size)
    if len(tree) > budget.num_nodes:
        raise ValueError(f"{method} drafted {len(tree)} nodes, budget {budget.num_nodes}")
    depth = max(tree.depths(), default=0)
    if depth > budget.max_depth:
        raise ValueError(f"{method} drafted to depth {depth}, budget {budget.max_depth}")
    for beside in (tree.draft_probs, tree.members, tree.confidence):
        if beside is not None and len(beside) != len(tree):
            raise ValueError(f"{method} drafted {len(tree)} nodes and says something of {len(beside)}")
    if tree.members is not None and set(map(type, tree.members)) != {tuple}:
        raise ValueError(f"{method} does not say in tuples of names who drafted its nodes: {tree.members}")
