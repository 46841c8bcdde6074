"""Starts passes: the one that is planned now, and on a GPU the one after it (engine/flight.py).

    schedule -> launch

A pass that is launched ahead takes tokens from the one that still runs. It is planned as if that one were done; or, for
the most frequent plan, it goes on with the same requests; or it is a round, in which the device drafts (rounds.py).
"""

from collections.abc import Callable

from paceline.engine.flight import Flight, as_if_done
from paceline.engine.metrics import StepClock
from paceline.engine.rounds import RoundMembers, RoundRows, Rounds
from paceline.engine.runner import LaunchedRows, ModelRunner
from paceline.engine.scheduler import ScheduledRequest, Scheduler, SchedulerOutput
from paceline.models.padded_decoder import PaddedDecoder
from paceline.ops.sampling import chosen_before_mask
from paceline.spec.speculator import Speculator
from paceline.structured.beside_pass import MaskMaker
from paceline.verifiers.verifier import Verifier


class Launcher:
    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        speculator: Speculator,
        verifier: Verifier,
        masks: MaskMaker,
        clock: StepClock,
        note: Callable[[SchedulerOutput], None],  # told of every plan
    ) -> None:
        self._runner, self._scheduler, self._speculator, self._clock = runner, scheduler, speculator, clock
        self.verifier, self.masks, self._note = verifier, masks, note
        self._max_rows = scheduler.config.max_num_batched_tokens
        self._asks_grammars_last = verifier.takes_tokens and runner.kv_cache.device.type == "cpu"
        model = runner.model
        self.rounds: Rounds | None = None
        self._can_launch_ahead = isinstance(model, PaddedDecoder) and model.sizes[-1] >= self._max_rows
        if self._can_launch_ahead and isinstance(model, PaddedDecoder):
            self.rounds = Rounds(scheduler, speculator, model.room.max_blocks)

    def launch(self, before: LaunchedRows | None = None) -> Flight | None:
        with self._clock.phase("schedule"):
            needs = self._speculator.needs
            plan = self._scheduler.schedule(needs.lookahead_slots)
            self._note(plan)
        if not plan.scheduled:
            return None
        begin_s = self._clock.now()
        members = None if self.rounds is None else self.rounds.members(plan.scheduled)
        self.masks.begin([(entry.request, entry.draft) for entry in plan.scheduled if self._needs_masks(entry)])
        with self._clock.phase("execute"):
            rows = self._runner.launch(
                plan.scheduled,
                needs.hidden_layers,
                draws_tokens=self.verifier.takes_tokens,
                wants_logits=needs.logits or not self.verifier.takes_tokens,
                before=before,
                least_size=1 if members is None else members.size.num_rows,
            )
        return Flight(plan.scheduled, rows, needs, begin_s, members)

    def _needs_masks(self, entry: ScheduledRequest) -> bool:
        if entry.request.constraint is None or not entry.reaches_end:
            return False
        return not (
            self._asks_grammars_last and chosen_before_mask(entry.request, self._runner.model.config.vocab_size)
        )

    def launch_ahead(self, flight: Flight) -> Flight | None:
        """Launch the pass after this one, which is on its way; None where it must be collected first."""
        if not self._can_launch_ahead:
            return None
        if flight.members is not None:
            return self._launch_round(flight, flight.members)
        rows = flight.rows
        if isinstance(rows, RoundRows) or not (flight.outcome_is_known and self._speculator.drafts_nothing_next):
            return None
        if (
            self._scheduler.kv.pool.num_free
            < len(self._scheduler.running) + self._max_rows // self._scheduler.kv.block_size + 1
        ):
            return None  # a request may have to give its blocks back: not while a pass writes to them
        ahead = self._launch_next(flight, rows)
        if ahead is None:
            with as_if_done(flight):
                ahead = self.launch(before=rows)
        self._clock.num_ahead += ahead is not None
        return ahead

    def _launch_round(self, flight: Flight, members: RoundMembers) -> Flight | None:
        """As `_launch_ahead`, where the device drafts and the pass is over these drafts."""
        if self.rounds is None or self._speculator.needs != flight.needs:
            return None
        begin_s = self._clock.now()
        with self._clock.phase("execute"):
            rows = self.rounds.launch_after(flight.rows, members, flight.needs.hidden_layers)
        if rows is None:
            return None
        self._clock.num_ahead += 1
        return Flight(rows.scheduled, rows, flight.needs, begin_s, members)

    def _launch_next(self, flight: Flight, before: LaunchedRows) -> Flight | None:
        """As `_launch`, for the most frequent plan: the same requests, one token further."""
        needs = self._speculator.needs
        if needs != flight.needs:
            return None
        with self._clock.phase("schedule"):
            planned = self._scheduler.go_on(flight.scheduled)
        if planned is None:
            return None
        scheduled, grown = planned
        begin_s = self._clock.now()
        with self._clock.phase("execute"):
            rows = self._runner.launch_next(before, scheduled, grown)
        return None if rows is None else Flight(scheduled, rows, needs, begin_s)
