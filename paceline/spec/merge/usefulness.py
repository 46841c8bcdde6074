"""Which members of a merged tree are worth their time.

A member gains the accepted tokens that it alone drafted: without it they would have cost another pass. It costs the
host time spent on it. At every review the member that loses most time is skipped from then on. Only one at a time: of
two members that draft the same, neither gains anything as long as the other is asked.

A skipped member (not `is_used`) is probed for a few steps from time to time, less often the more expensive it is, and
is asked again when it would pay.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MEMORY = 128.0  # steps over which gains and costs are averaged
REVIEW_EVERY = 64
EARLY_REVIEWS = (8, 16, 32)  # for members so expensive that a few steps are enough to know:
EARLY_COST = 0.5  # those that cost at least this share of a token's time. Others have time to learn first
PROBE_EVERY, PROBE_STEPS = 256, 16  # a probe takes several steps, because some members need a few to draft well
PROBE_SHARE = 0.005  # of the elapsed time that probing one member may take
# Gain over cost that a member needs to stay in use, and to be used again. Above 1, because tokens that it alone drafted
# are worth less than they seem: in such easy text the others often draft them a step later.
KEEP_MARGIN, RESUME_MARGIN = 1.5, 2.5


@dataclass(slots=True)
class Account:
    own_tokens: float = 0.0  # accepted per step that no other member drafted; members that are skipped do not count
    cost_s: float = 0.0  # host time of a step in which it is asked
    spent_s: float = 0.0  # in the current step
    num_asked: int = 0
    is_used: bool = True  # False: it is skipped, but for probes
    probe_at: int = 0  # step at which the next probe begins


class Usefulness:
    def __init__(self, members: Sequence[str], always_told: Sequence[str] = ()) -> None:
        """`always_told`: members that must be told of every pass, because hidden states are seen once."""
        self.accounts = {member: Account() for member in members}
        self._always_told = frozenset(always_told)
        self._asked: list[str] = []
        self._num_steps = 0
        self._tokens = 1.0  # emitted per step
        self._step_s = 0.0  # wall time per step
        self._last_s: float | None = None
        self.clock: Callable[[], float] = time.perf_counter  # a replay sets its own

    def spend(self, member: str, seconds: float) -> None:
        self.accounts[member].spent_s += seconds

    def worth_asking(self) -> list[str]:
        """Members to ask in this step, in order."""
        self._close_step()
        self._num_steps += 1
        if self._num_steps % REVIEW_EVERY == 0:
            self._review(0.0)
        elif self._num_steps in EARLY_REVIEWS:
            self._review(EARLY_COST)
        self._asked = [name for name, account in self.accounts.items() if account.is_used or self._is_probed(account)]
        for name in self._asked:
            self.accounts[name].num_asked += 1
        return self._asked

    def is_asked(self, member: str) -> bool:
        """Whether the member was asked in the last step. Before the first step: yes."""
        return not self._asked or member in self._asked

    def is_told(self, member: str) -> bool:
        """Of the last pass. A skipped member is told only which requests ended, unless it is one of `always_told`."""
        return self.is_asked(member) or member in self._always_told

    def record(self, hits: Sequence[Sequence[str]], num_tokens: int) -> None:
        """One request's step: for each accepted depth the members that drafted it, and the tokens emitted."""
        self._tokens += (num_tokens - self._tokens) / min(max(self._num_steps, 1), MEMORY)
        for name in self._asked:
            account = self.accounts[name]
            alone = sum(name in voters and not self._others(voters, name) for voters in hits)
            account.own_tokens += (alone - account.own_tokens) / min(account.num_asked, MEMORY)

    def _others(self, voters: Sequence[str], name: str) -> bool:
        return any(self.accounts[voter].is_used for voter in voters if voter != name)

    def _profit_s(self, account: Account, margin: float = KEEP_MARGIN) -> float:
        tokens = account.own_tokens + 1.0 / max(account.num_asked, 1)  # optimistic while it was asked only a few times
        return tokens * self._token_s - margin * account.cost_s

    @property
    def _token_s(self) -> float:
        """What a token costs."""
        return self._step_s / max(self._tokens, 1.0)

    def _review(self, least_cost: float) -> None:
        """Use a skipped member again if it would pay; else skip the one that loses most, but never the last one in use.

        `least_cost`: of a member that may be skipped now, in tokens."""
        skipped = [account for account in self.accounts.values() if not account.is_used]
        for account in skipped:
            if self._profit_s(account, RESUME_MARGIN) > 0.0:
                account.is_used = True
                return
        used = [account for account in self.accounts.values() if account.is_used]
        worst = min(used, key=self._profit_s)
        is_judged = worst.cost_s >= least_cost * self._token_s
        if len(used) > 1 and is_judged and self._profit_s(worst) < 0.0:
            worst.is_used = False
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
