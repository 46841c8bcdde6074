"""A simulated engine for the controller: only passes and drafters advance its clock, and outputs are known before."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from paceline.core.request import Request, RequestStatus
from paceline.core.tree import DraftTree
from paceline.lab.live_pass_cost import PassCostModel
from paceline.lab.pass_cost import PassCost
from paceline.spec.auto.controller import AutoProposer, alone
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.engine_parts import EngineParts
from paceline.spec.proposer import Budget, Needs, Proposer, RequestPass, StepContext
from tests.toy import toy_request

VOCAB = 1000
# As a small model on a CPU: a row costs a few percent of a pass, later ones more.
CURVE = PassCost.of({1: 0.006, 2: 0.0063, 4: 0.0069, 8: 0.0081, 16: 0.012, 32: 0.021, 64: 0.039})


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Simulation:
    """A closed loop of `users`, each of whom asks for `length` tokens, again and again."""

    users: int = 1
    length: int = 100
    curve: PassCost = CURVE
    clock: Clock = field(default_factory=Clock)
    num_steps: int = 0
    num_tokens: int = 0
    plain_s: float = 0.0

    def __post_init__(self) -> None:
        self._rng, self.num_admitted = random.Random(0), 0
        self._truth: dict[str, list[int]] = {}
        self._running: list[Request] = []
        self.drafts: dict[str, DraftTree] = {}
        self.num_skipped = 0
        self._is_skipped = False

    def future(self, request: Request, length: int) -> list[int]:
        at = request.num_output_tokens
        return self._truth[request.request_id][at : at + length]

    def run(self, proposer: Proposer, num_steps: int) -> float:
        """Speedup over plain decoding of these steps."""
        begin_s, plain_s = self.clock.now_s, self.plain_s
        proposer.use_clock(self.clock)
        for _ in range(num_steps):
            self._step(proposer)
        return (self.plain_s - plain_s) / (self.clock.now_s - begin_s)

    def _step(self, proposer: Proposer) -> None:
        while len(self._running) < self.users:
            self._admit()
        passes, gone, first = [], [], 0
        for request in list(self._running):
            passes.append(self._verify(request, first))
            first = passes[-1].rows.stop
            if request.finished:
                self._running.remove(request)
                gone.append(request)
        self.clock.now_s += self.curve(first)
        emitted = sum(len(one.new_token_ids) for one in passes)
        self.num_tokens += emitted
        self.plain_s += self.curve(len(passes)) * emitted / len(passes)
        self._draft(proposer, StepContext(list(self._running), passes, gone))
        self.num_steps += 1

    def _draft(self, proposer: Proposer, step: StepContext) -> None:
        """As spec/speculator.py does it."""
        if not self._is_skipped or step.gone:
            proposer.observe(step)
        self.drafts = {}
        self._is_skipped = proposer.skips_next_step()
        if self._is_skipped:
            proposer.skip_step()
            self.num_skipped += 1
            return
        if not step.requests:
            return
        trees = proposer.propose(step, [Budget(24, 16)] * len(step.requests))
        self.drafts = {one.request_id: tree for one, tree in zip(step.requests, trees, strict=True)}

    def _admit(self) -> None:
        name, self.num_admitted = f"{self.num_admitted}", self.num_admitted + 1
        request = toy_request(name, [1], max_tokens=10**6)
        request.status = RequestStatus.RUNNING
        self._truth[name] = [self._rng.randrange(VOCAB // 2) for _ in range(self.length + 32)]
        self._running.append(request)

    def _verify(self, request: Request, first: int) -> RequestPass:
        tree = self.drafts.get(request.request_id, DraftTree())
        accepted: list[int] = []
        for token in self.future(request, 20)[:-1]:
            child = tree.children()[accepted[-1] if accepted else -1].get(token)
            if child is None:
                break
            accepted.append(child)
        new = self.future(request, len(accepted) + 1)
        one = RequestPass(
            request, range(first, first + 1 + len(tree)), request.num_tokens - 1, 1, tree, accepted, new, 0
        )
        request.token_ids += new
        if request.num_output_tokens >= self.length:
            request.status, request.finish_reason = RequestStatus.FINISHED, "length"
        return one


class Planted(Proposer):
    """Drafts chains that are right with a known chance, says how sure it is, and takes a known time."""

    def __init__(
        self,
        world: Simulation,
        *,
        accuracy: Callable[[int], float],  # by step
        confidence: float,
        call_s: float = 0.0,
        each_s: float = 0.0,
        level_s: float = 0.0,
        tell_s: float = 0.0,
        slow_s: Callable[[int], float] = lambda step: 0.0,  # as well, by step
        length: int = 4,
        needs: Needs | None = None,
    ) -> None:
        self.world, self.accuracy, self.confidence, self.length = world, accuracy, confidence, length
        self.call_s, self.each_s, self.tell_s, self.needs = call_s, each_s, tell_s, needs or Needs()
        self.level_s, self.slow_s = level_s, slow_s
        self._rng = random.Random(1)
        self.num_calls = 0
        self.depths: list[int] = []  # drafted

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        self.num_calls += 1
        trees = [self._draft(r, b) for r, b in zip(step.requests, budgets, strict=True)]
        self.depths.append(max(map(len, trees)))
        self.world.clock.now_s += self.call_s + self.each_s * len(step.requests) + self.level_s * self.depths[-1]
        self.world.clock.now_s += self.slow_s(self.world.num_steps)
        return trees

    def observe(self, step: StepContext) -> None:
        self.world.clock.now_s += self.tell_s if step.passes else 0.0

    def _draft(self, request: Request, budget: Budget) -> DraftTree:
        length = min(self.length, budget.num_nodes, budget.max_depth)
        tokens, chance = self.world.future(request, length), self.accuracy(self.world.num_steps)
        wrong = VOCAB - 1 - self._rng.randrange(VOCAB // 4)
        drafted = [token if self._rng.random() < chance else wrong for token in tokens]
        tree = DraftTree.chain(drafted)
        return DraftTree(tree.token_ids, tree.parents, confidence=[self.confidence] * len(tree))


def alone_by_price(
    monkeypatch: pytest.MonkeyPatch, world: Simulation, drafter: Proposer, facts: Mapping[str, str] | None = None
) -> AutoProposer:
    """A method named without a size, which is this drafter, on the world's machine."""
    monkeypatch.setattr("paceline.spec.methods.build_proposer", lambda *given: drafter)
    config = SpeculativeConfig.parse({"method": "recycling"})
    assert config is not None and config.sized_by_price
    proposer = alone(config, EngineParts(VOCAB, 4096, facts=facts), Budget(24, 16))
    rows = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    proposer.cost = PassCostModel({n: world.curve(n) for n in rows})
    return proposer
