"""Which members of a merged tree are worth their time.

A member earns the tokens that came and that it alone drafted: without it they would have cost another pass. It costs
the host time spent on it. At every review the one that earns least for its cost is skipped from then on if it loses
time, one at a time, because two members that draft the same each earn nothing only as long as the other is asked. A
skipped member (not `awake`) costs nothing but a short probe now and then, less often the more expensive it is, and is
asked again when it would pay.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.spec.proposer import Budget

MEMORY = 128.0  # steps over which earnings and costs are averaged
REVIEW_EVERY = 64
EARLY_REVIEWS = (8, 16, 32)  # for members so expensive that a few steps are enough to know:
EARLY_COST = 0.5  # those that cost at least this much of what a token costs. Others may learn first
PROBE_EVERY, PROBE_STEPS = 256, 16  # steps: of a probe there are several in a row, for some need a few to be right
PROBE_SHARE = 0.005  # of the elapsed time that probing one member may take
# What a member must bring over what it costs, to be asked on and to be asked again. Above 1, because tokens that it
# alone drafted are worth less than they seem: in text that easy, the others often draft them a step later.
KEEP_MARGIN, WAKE_MARGIN = 1.5, 2.5


@dataclass(slots=True)
class Account:
    earned: float = 0.0  # tokens per step that only this member drafted, those who are skipped not counted
    cost_s: float = 0.0  # host time of a step in which it is asked
    spent_s: float = 0.0  # in the current step
    total_s: float = 0.0  # in all steps
    num_asked: int = 0
    awake: bool = True  # False: it is skipped, but for probes
    probe_at: int = 0  # step at which the next probe begins


class Usefulness:
    def __init__(self, members: Sequence[str], listeners: Sequence[str] = ()) -> None:
        """`listeners`: members that must be told of every pass, because hidden states are seen once."""
        self.accounts = {member: Account() for member in members}
        self._listeners = frozenset(listeners)
        self._asked: list[str] = []
        self._num_steps = 0
        self._tokens = 1.0  # emitted per step
        self._step_s = 0.0  # wall time per step
        self._last_s: float | None = None
        self.clock: Callable[[], float] = time.perf_counter  # a replay puts its own here

    def spend(self, member: str, seconds: float) -> None:
        account = self.accounts[member]
        account.spent_s += seconds
        account.total_s += seconds

    def seconds(self) -> dict[str, float]:
        """Host time spent on each member so far."""
        return {name: account.total_s for name, account in self.accounts.items()}

    def worth_asking(self) -> list[str]:
        """Members to ask in this step, in order."""
        self._close_step()
        self._num_steps += 1
        if self._num_steps % REVIEW_EVERY == 0:
            self._review(0.0)
        elif self._num_steps in EARLY_REVIEWS:
            self._review(EARLY_COST)
        self._asked = [name for name, account in self.accounts.items() if account.awake or self._is_probed(account)]
        for name in self._asked:
            self.accounts[name].num_asked += 1
        return self._asked

    def ask_one(self, member: str) -> None:
        """Instead: this one and no other."""
        self._asked = [member]
        self.accounts[member].num_asked += 1

    def budgets(self, member: str, budgets: list[Budget]) -> list[Budget]:
        """Of each request, for this member in this step."""
        return budgets

    def is_asked(self, member: str) -> bool:
        """Whether the member was asked in the last step (everybody is, before the first)."""
        return not self._asked or member in self._asked

    def is_told(self, member: str) -> bool:
        """Of the last pass. A skipped member is only told who is gone, unless it must be told of every pass."""
        return self.is_asked(member) or member in self._listeners

    def record(self, hits: Sequence[Sequence[str]], num_tokens: int) -> None:
        """What one request's step brought: for each accepted depth who had it, and the tokens emitted."""
        self._tokens += (num_tokens - self._tokens) / min(max(self._num_steps, 1), MEMORY)
        for name in self._asked:
            account = self.accounts[name]
            alone = sum(name in voters and not self._others(voters, name) for voters in hits)
            account.earned += (alone - account.earned) / min(account.num_asked, MEMORY)

    def _others(self, voters: Sequence[str], name: str) -> bool:
        return any(self.accounts[voter].awake for voter in voters if voter != name)

    def _profit_s(self, account: Account, margin: float = KEEP_MARGIN) -> float:
        promise = account.earned + 1.0 / max(account.num_asked, 1)  # in doubt for the member: the next token may be its
        return promise * self._token_s - margin * account.cost_s

    @property
    def _token_s(self) -> float:
        """What a token costs."""
        return self._step_s / max(self._tokens, 1.0)

    def _review(self, least_cost: float) -> None:
        """Ask again who would pay; else skip whoever loses most from now on, but never the last one that is asked.

        `least_cost`: of a member that may be skipped now, in tokens."""
        sleepers = [account for account in self.accounts.values() if not account.awake]
        for account in sleepers:
            if self._profit_s(account, WAKE_MARGIN) > 0.0:
                account.awake = True
                return
        awake = [account for account in self.accounts.values() if account.awake]
        worst = min(awake, key=self._profit_s)
        is_judged = worst.cost_s >= least_cost * self._token_s
        if len(awake) > 1 and is_judged and self._profit_s(worst) < 0.0:
            worst.awake = False
            worst.probe_at = self._num_steps + self._pause(worst)

    def _is_probed(self, account: Account) -> bool:
        """Is this step part of a skipped member's probe? When one is over, the next is planned."""
        if self._num_steps >= account.probe_at + PROBE_STEPS:
            account.probe_at = self._num_steps + self._pause(account)
        return self._num_steps >= account.probe_at

    def _pause(self, account: Account) -> int:
        """Steps between two probes."""
        allowed_s = PROBE_SHARE * self._step_s  # in each step
        return PROBE_EVERY if allowed_s <= 0.0 else max(PROBE_EVERY, int(PROBE_STEPS * account.cost_s / allowed_s))

    def _close_step(self) -> None:
        now_s = self.clock()
        if self._last_s is not None:
            weight = 1.0 / min(max(self._num_steps, 1), MEMORY)
            self._step_s += (now_s - self._last_s - self._step_s) * weight
        self._last_s = now_s
        for name in self._asked:
            account = self.accounts[name]
            account.cost_s += (account.spent_s - account.cost_s) / min(account.num_asked, MEMORY)
        for account in self.accounts.values():
            account.spent_s = 0.0
