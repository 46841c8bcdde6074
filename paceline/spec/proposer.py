"""The seam between the engine and the drafting methods.

A method is one file in `spec/` and one row in `PROPOSERS` (spec/methods.py). All that is ever asked of a proposer is in
`Proposer` below, with a default; only `propose` has none. docs/methods.md, "Write your own drafter", has an example.

One step, seen from here: the target pass verified the drafts -> `observe(step)` tells every proposer what happened ->
`propose(step, budgets)` asks for the next trees, one per request, in order. An empty tree means "decode plainly".

A proposer that would draft nothing in the next step may say so in `skips_next_step`: where all of them do, none is
asked or told of the pass, unless a request is gone, and the step is one of plain decoding in every respect.
"""

# ruff: noqa: B027  (a default that does nothing is what most proposers want)
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.block_rows import BlockRows
from paceline.core.draft_counts import DraftCounts
from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.spec.engine_parts import EngineParts

if TYPE_CHECKING:
    from paceline.spec.rounds import DeviceRounds


@dataclass(frozen=True, slots=True)
class Needs:
    """What a proposer wants the engine to keep for it."""

    logits: bool = False  # StepContext rows carry the target's logits
    hidden_layers: tuple[int, ...] = ()  # StepContext rows carry these hidden states (ids as in core/forward.py)
    lookahead_slots: int = 0  # KV slots past the last token that it writes while drafting
    draft_probs: bool = False  # it can say what distribution its tokens were drawn from


def union(needs: Sequence[Needs]) -> Needs:
    """What several proposers need together."""
    return Needs(
        logits=any(n.logits for n in needs),
        hidden_layers=tuple(sorted({layer for n in needs for layer in n.hidden_layers})),
        lookahead_slots=max((n.lookahead_slots for n in needs), default=0),
        draft_probs=any(n.draft_probs for n in needs),
    )


class Budget(NamedTuple):
    """How much one request's next tree may hold; zero: nothing, and its tree is to be empty."""

    num_nodes: int
    max_depth: int
    # Least probability, by the drafter, of a path that is worth its row of the pass, and of one that is worth the time
    # to draft what follows it. Only proposers that say `keeps_min_prob` are held to them.
    min_prob: float = 0.0
    min_prob_to_extend: float = 0.0


@dataclass(slots=True)
class RequestPass:
    """One request's part of the last target pass.

    Its rows of the pass are `rows`: first the committed tokens at positions [start, start + num_committed), then one
    row per draft node. The last committed row is the root once it is the request's last token; only then is anything
    verified and emitted."""

    request: Request
    rows: range  # of StepContext.hidden
    start: int
    num_committed: int
    draft: DraftTree = EMPTY_TREE  # what was verified
    accepted: Sequence[int] = ()  # accepted nodes, top first
    new_token_ids: Sequence[int] = ()  # emitted, already part of request.token_ids
    logits_row: int = -1  # of StepContext.logits: the root's row, then one per node; -1: nothing was verified
    counts: DraftCounts = field(default_factory=DraftCounts)  # of this pass: all totals add them
    block_ids: Sequence[int] = ()  # its KV blocks in the pass: a request that finished has given its own list back


@dataclass(slots=True)
class StepContext:
    """What happened in the last step, and which requests want a draft now."""

    requests: Sequence[Request]  # to draft for: running, their last token has no KV yet
    passes: Sequence[RequestPass] = ()  # every request that had rows in the pass, finished ones included
    gone: Sequence[Request] = ()  # finished, aborted or preempted since the last step: forget their state
    logits: Tensor | None = None  # [logits rows, vocab] float32, where Needs.logits
    hidden: Tensor | None = None  # [rows, len(hidden_layers), hidden_size], where Needs.hidden_layers
    hidden_layers: tuple[int, ...] = ()  # which layers `hidden` holds: what all proposers need together
    block_uses: NDArray[np.int32] | None = None  # [blocks]: times that each KV block was handed out
    load: int = 1  # requests that run or wait
    drafted: Collection[str] | None = None
    """Ids of the requests that the device has drafted for already, in a round (spec/rounds.py); None: of none, and
    `hidden` may be read."""


class Proposer(ABC):
    """A drafting method in use: inherit from this, and write `propose` at least."""

    needs: Needs = Needs()  # in the next step: a property may change it from step to step
    keeps_whole: bool = False  # its trees mean nothing in part: all of their nodes are verified, or none
    keeps_min_prob: bool = False  # it leaves out what is below `Budget.min_prob` and stops at `min_prob_to_extend`

    def __init__(self, services: EngineParts, largest: Budget) -> None:
        """Given what the engine has and the largest budget there will be; then, by keyword, the options of its row."""

    @abstractmethod
    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        """One tree for each of `step.requests`, in order, none larger than its budget."""

    def observe(self, step: StepContext) -> None:
        """Told what the last pass brought, and which requests to forget."""

    def check_params(self, params: SamplingParams) -> None:
        """Raises, in the caller's thread, where a request with these options cannot be honoured."""

    def use_clock(self, clock: Callable[[], float]) -> None:
        """From now on it measures time with this one."""

    def skips_next_step(self) -> bool:
        """Would it draft nothing in the next step, and need not be told of its pass?"""
        return False

    def skip_step(self) -> None:
        """Told that it is skipped: the step goes on without it."""

    def rounds(self) -> "DeviceRounds | None":
        """Where it can draft on the device without the host seeing the tokens first."""
        return None

    def prepare(self) -> None:
        """Told once, when the target's passes are ready and before the first request."""

    def block_rows(self) -> Sequence[BlockRows]:
        """KV of its own that belongs to the target's blocks and may travel with them (kv/exchange.py)."""
        return ()

    def report(self) -> dict[str, Any]:
        """What it decided, for `LLM.stats()`; empty where it decides nothing."""
        return {}

    def member_figures(self) -> dict[str, dict[str, Any]]:
        """Of a proposer that asks others: member -> host seconds spent on it (`draft_s`), and how often it raised."""
        return {}
