"""What the server remembers of the engine's steps: whose token each one was, the latest tree, and the time saved.

It is called in the engine's thread after every pass and read from the event loop. Single assignments and appends are
all that is shared, so there is no lock: a reader sees a moment ago at worst.

Where a token came from (its *source*):
    a member's or method's name   the draft was right
    "correction"                  the target disagreed with the draft here
    "bonus"                       the whole path was right and the target added one
    "target"                      nothing was drafted
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.serve.backend import PassRecord, StepRecord
from paceline.serve.saving import StepCostModel

CORRECTION, BONUS, TARGET = "correction", "bonus", "target"
NUM_RECENT_TREES = 8


@dataclass(slots=True)
class Provenance:
    """One sequence's tokens, in order, and what each of its members drafted."""

    sources: list[str] = field(default_factory=list)
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class TimeSaved:
    seconds: float = 0.0  # may be negative: then speculation lost time


class Recorder:
    def __init__(self) -> None:
        self.recent_trees: deque[PassRecord] = deque(maxlen=NUM_RECENT_TREES)  # newest last
        self.saved: dict[str, TimeSaved] = {}  # by method
        self._followed: dict[str, Provenance] = {}
        self._costs = StepCostModel()

    def follow(self, request_id: str) -> Provenance:
        """Keep the provenance of a sequence from now until `forget`."""
        provenance = self._followed[request_id] = Provenance()
        return provenance

    def forget(self, request_id: str) -> None:
        self._followed.pop(request_id, None)

    def observe(self, step: StepRecord) -> None:
        for record in step.passes:
            if len(record.draft):
                self.recent_trees.append(record)
            provenance = self._followed.get(record.request_id)
            if provenance is not None:
                _record(provenance, record)
        for method, seconds in self._costs.saving(step).items():
            self.saved.setdefault(method, TimeSaved()).seconds += seconds


def _record(provenance: Provenance, record: PassRecord) -> None:
    for node in range(len(record.draft)):
        for member in members_of(record, node):
            provenance.drafted[member] = provenance.drafted.get(member, 0) + 1
    for node in record.accepted[: len(record.new_token_ids)]:
        for member in members_of(record, node):
            provenance.accepted[member] = provenance.accepted.get(member, 0) + 1
    provenance.sources.extend(token_sources(record))


def token_sources(record: PassRecord) -> list[str]:
    """The source of every token that the pass emitted."""
    sources = ["+".join(members_of(record, node)) for node in record.accepted]
    if not len(record.draft):
        last = TARGET
    elif record.accepted and record.accepted[-1] not in record.draft.parents:
        last = BONUS  # the path ended in a leaf: there was nothing left to be wrong
    else:
        last = CORRECTION
    return [*sources, last][: len(record.new_token_ids)]


def members_of(record: PassRecord, node: int) -> Sequence[str]:
    members = record.draft.members
    return (record.method,) if members is None else members[node].split("+")
