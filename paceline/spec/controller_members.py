"""Which members `auto` asks: the cheap ones always, a dear one only as long as it pays for itself.

A member that reads logits or hidden states takes time for every row or level, so it has to earn it. Its profit in a
step is what the tokens that it brought would have cost plainly, less the rows of its own nodes, less its own time, all
of it as it really came out. What a cheap member or a more profitable one drafted too counts for them: of two dear
members that draft the same, one is kept, not none. A dear member starts with a short trial; where that loses, the next
one comes later and later, so that all trials together stay a small share of the time, or at once when the batch has
become much smaller.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.core.draft_counts import MEMBER_SEPARATOR
from paceline.spec.proposer import Budget, Proposer, RequestPass
from paceline.spec.usefulness import Usefulness

TRIAL_STEPS, TRIAL_REQUESTS = 8, 2
NO_BUDGET = Budget(0, 0)
WARM_UP_STEPS = 2  # of a trial: the first steps take in what was missed, and are not judged
MEMORY_STEPS = 16.0  # over which a member that is awake is judged
FIRST_PAUSE, LONGEST_PAUSE = 96, 1536  # steps between two trials
TYPICAL_STEPS, SHORT_PAUSE = 256.0, 16  # one that has paid over so many steps is only sent out for a moment
MOST_SKIPPED = 32  # steps of a trial that read prompts too: then it ends, without a verdict
TRIAL_SHARE = 0.005  # of the elapsed time, that trials which lose may take


@dataclass(slots=True)
class DearMember:
    """What is known of a member that costs time."""

    awake: bool = False
    profit_s: float = 0.0  # per step in which it was asked, lately
    typical_s: float = 0.0  # the same over a long time
    spent_s: float = 0.0  # since the last step was judged
    num_judged: int = 0  # steps of this trial, or since it woke
    num_skipped: int = 0  # steps of this trial that could not be judged
    next_trial: int = 0  # step
    pause: int = FIRST_PAUSE
    tried_with: int = 0  # requests in the batch of the last trial

    @property
    def on_trial(self) -> bool:
        return not self.awake and self.num_judged > 0


class MemberChoice(Usefulness):
    """Takes the place of merge's own judgement, because the controller knows what rows and tokens cost."""

    def __init__(self, members: Mapping[str, Proposer]) -> None:
        super().__init__(list(members))
        self.dear = {
            name: DearMember() for name, member in members.items() if member.needs.logits or member.needs.hidden_layers
        }
        self._step = 0
        self._step_s = 0.0

    @contextmanager
    def timed(self, member: str) -> Iterator[None]:
        account = self.accounts[member]
        before_s = account.total_s
        with super().timed(member):
            yield
        if member in self.dear:
            self.dear[member].spent_s += account.total_s - before_s

    def dear_seconds(self) -> float:
        """Host time spent on dear members so far."""
        return sum(self.accounts[name].total_s for name in self.dear)

    def report(self) -> dict[str, Any]:
        """Member -> asked now or not, why, and its figures; for statistics and the server's page."""
        figures: dict[str, Any] = {}
        for name, account in self.accounts.items():
            member = self.dear.get(name)
            state = "cheap" if member is None else "pays" if member.awake else "trial" if member.on_trial else "asleep"
            figures[name] = {
                "asked": account.awake,
                "state": state,
                "num_asked": account.num_asked,
                "seconds": account.total_s,
            }
            if member is not None:
                figures[name]["profit_s_per_step"] = member.profit_s
        return figures

    def begin_step(self, num_requests: int) -> bool:
        """Decide whom to ask; True where a dear member that pays is to be asked for every request."""
        self._step += 1
        for name, member in self.dear.items():
            fewer = 2 * num_requests <= member.tried_with
            if not member.awake and not member.on_trial and (self._step >= member.next_trial or fewer):
                member.num_judged, member.num_skipped = 1, 0
                member.profit_s, member.tried_with = 0.0, num_requests
            self.accounts[name].awake = member.awake or member.on_trial
        return any(member.awake for member in self.dear.values())

    @property
    def has_trial(self) -> bool:
        return any(member.on_trial for member in self.dear.values())

    def budgets(self, member: str, budgets: list[Budget]) -> list[Budget]:
        """A trial is made with a few requests: the others pay nothing for it."""
        dear = self.dear.get(member)
        if dear is None or not dear.on_trial:
            return budgets
        return [budget if i < TRIAL_REQUESTS else NO_BUDGET for i, budget in enumerate(budgets)]

    def worth_asking(self) -> list[str]:
        self._asked = [name for name, account in self.accounts.items() if account.awake]
        for name in self._asked:
            self.accounts[name].num_asked += 1
        return self._asked

    def record(self, hits: Sequence[Sequence[str]], num_tokens: int) -> None:
        """Merge's verdict on what was drafted; judged here instead is what was offered."""

    def judge(self, passes: Sequence[RequestPass], token_s: float, row_s: float, step_s: float) -> None:
        """`token_s`: what a token costs plainly; `row_s`: what one more row cost in the last pass."""
        self._step_s += (step_s - self._step_s) / min(self._step + 1, MEMORY_STEPS)
        lesser: set[str] = set(self.dear)  # the most profitable first: a node counts for the first who drafted it
        for name, member in sorted(self.dear.items(), key=lambda item: -item[1].profit_s):
            lesser.discard(name)
            cost_s, member.spent_s = member.spent_s, 0.0
            if not (member.awake or member.on_trial) or name not in self._asked:
                continue
            gain_s = sum(_gain_s(one, name, lesser, token_s, row_s) for one in passes)
            self._settle(member, gain_s - cost_s)

    def skip(self) -> None:
        """A step that says nothing of drafts, because it read prompts: neither cost nor gain, but time of a trial."""
        for member in self.dear.values():
            member.spent_s = 0.0
            if member.on_trial:
                member.num_skipped += 1
                if member.num_skipped >= MOST_SKIPPED:
                    self._send_to_sleep(member)

    def _settle(self, member: DearMember, profit_s: float) -> None:
        member.num_judged += 1
        judged = member.num_judged - 1 - (0 if member.awake else WARM_UP_STEPS)
        if judged < 1:
            return
        member.profit_s += (profit_s - member.profit_s) / min(judged, MEMORY_STEPS)
        member.typical_s += (profit_s - member.typical_s) / TYPICAL_STEPS
        if member.on_trial and judged >= TRIAL_STEPS - WARM_UP_STEPS:
            member.awake = member.profit_s + max(0.0, member.typical_s) > 0.0
            if member.awake:
                member.pause = FIRST_PAUSE
            else:
                self._send_to_sleep(member)
        elif member.awake and judged >= MEMORY_STEPS / 2 and member.profit_s < 0.0:
            self._send_to_sleep(member)

    def _send_to_sleep(self, member: DearMember) -> None:
        member.awake, member.num_judged = False, 0
        if member.typical_s > 0.0:  # what comes next, another request perhaps, is likely to suit it again
            member.next_trial = self._step + SHORT_PAUSE
            return
        loss_s = TRIAL_STEPS * max(0.0, -member.profit_s)
        affordable = int(loss_s / max(1e-9, TRIAL_SHARE * self._step_s))
        member.next_trial = self._step + min(LONGEST_PAUSE, max(member.pause, affordable))
        member.pause = min(LONGEST_PAUSE, 2 * member.pause)


def _gain_s(verified: RequestPass, name: str, lesser: set[str], token_s: float, row_s: float) -> float:
    """What the nodes of this member brought that nobody but lesser ones drafted too, less their rows."""
    members = verified.draft.members
    if not verified.draft or members is None:
        return 0.0
    own = [_is_own(set(names.split(MEMBER_SEPARATOR)), name, lesser) for names in members]
    accepted = verified.accepted[: len(verified.new_token_ids)]
    return token_s * sum(own[node] for node in accepted) - row_s * sum(own)


def _is_own(drafters: set[str], name: str, lesser: set[str]) -> bool:
    return name in drafters and drafters <= lesser | {name}
