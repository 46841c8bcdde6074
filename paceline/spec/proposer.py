"""The seam between the engine and the drafting methods.

A method is one file in `spec/` and one row in `PROPOSERS` (spec/methods.py). The engine asks a
proposer what it needs; it never asks what it is.

One step, seen from here: the target pass verified the drafts -> `observe(step)` tells every proposer what happened ->
`propose(step, budgets)` asks for the next trees, one per request, in order. An empty tree means "decode plainly".

A proposer that expects nothing from the next steps may say so in `steps_to_rest`: where all of them rest, they are
neither asked nor told of passes, unless somebody is gone, and the step is one of plain decoding in every respect.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.draft_counts import DraftCounts
from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree


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
    """How much one request's next tree may hold."""

    num_nodes: int
    max_depth: int


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
    accepted: list[int] = field(default_factory=list)  # accepted nodes, top first
    new_token_ids: list[int] = field(default_factory=list)  # emitted, already part of request.token_ids
    logits_row: int = -1  # of StepContext.logits: the root's row, then one per node; -1: nothing was verified
    counts: DraftCounts = field(default_factory=DraftCounts)  # of this pass: all totals add them
    block_ids: Sequence[int] = ()  # its KV blocks in the pass: a request that finished has given its own list back


@dataclass(slots=True)
class StepContext:
    """What happened in the last step, and who wants a draft now."""

    requests: Sequence[Request]  # to draft for: running, their last token has no KV yet
    passes: Sequence[RequestPass] = ()  # every request that had rows in the pass, finished ones included
    gone: Sequence[Request] = ()  # finished, aborted or preempted since the last step: forget their state
    logits: Tensor | None = None  # [logits rows, vocab] float32, where Needs.logits
    hidden: Tensor | None = None  # [rows, len(hidden_layers), hidden_size], where Needs.hidden_layers
    hidden_layers: tuple[int, ...] = ()  # which layers `hidden` holds: what all proposers need together
    block_uses: NDArray[np.int32] | None = None  # [blocks]: times that each KV block was handed out


class Proposer(Protocol):
    name: str

    @property
    def needs(self) -> Needs:
        """In the next step: may change from step to step."""

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]: ...

    def observe(self, step: StepContext) -> None: ...
