"""A pass between its launch and its collection, and the requests as they will stand after it.

The next pass may be planned and launched while this one runs if all that is not known of this one is which tokens it
draws: each request that reaches its end gets one, and the next pass reads it on the device. A request may turn out to
have ended with that token: then its row of the next pass is surplus, and is dropped when that one is collected. The
row writes to a slot of the request's last block, which no other request reads before a later pass has written it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.engine.rounds import RoundMembers, RoundRows
from paceline.engine.runner import LaunchedRows
from paceline.engine.scheduler import ScheduledRequest
from paceline.spec.proposer import Needs

NOT_KNOWN_YET = 0  # stands for a token that the device has: any id of the vocabulary will do


@dataclass(slots=True)
class Flight:
    scheduled: Sequence[ScheduledRequest]
    rows: LaunchedRows | RoundRows
    needs: Needs  # of the proposers, when it was launched
    begin_s: float
    members: RoundMembers | None = None  # those who may go on in a round after it

    @property
    def drafted(self) -> frozenset[str] | None:
        """Ids of the requests that the device drafts for in this very pass; None where it is not a round."""
        return None if isinstance(self.rows, LaunchedRows) else self.rows.drafted

    @property
    def is_awaited(self) -> bool:
        return any(not entry.request.finished for entry in self.scheduled)

    @property
    def outcome_is_known(self) -> bool:
        """But for the tokens themselves."""
        return (
            isinstance(self.rows, LaunchedRows)
            and self.rows.tokens_only
            and not any(entry.draft for entry in self.scheduled)
        )


@contextmanager
def as_if_done(flight: Flight) -> Iterator[None]:
    """Inside, its requests stand as after the pass."""
    entries = [entry for entry in flight.scheduled if not entry.request.finished]
    given = [entry for entry in entries if entry.reaches_end]
    for entry in entries:
        entry.request.num_computed_tokens += entry.num_committed
    for entry in given:
        entry.request.token_ids.append(NOT_KNOWN_YET)
    try:
        yield
    finally:
        for entry in entries:
            entry.request.num_computed_tokens -= entry.num_committed
        for entry in given:
            entry.request.token_ids.pop()
