"""Runs the target on what the scheduler chose, in one pass (`core/packing.py` makes the batch).

Rows of a request: its committed tokens without KV, then the nodes of its draft. Logits are computed only for rows that
somebody reads: the last token's and the nodes' (and every prompt row where prompt log-probabilities were asked for).

A model may draw the tokens of these rows by itself (`Decoder.draws_tokens`). It does so for every request whose options
are greedy or a temperature alone, whatever the others in the pass ask for, so that one and the same code always draws a
request's tokens; logits are then written only where somebody needs them. On a CPU these are the very tokens that the
host would draw from the logits, which are there as well, and only at the nodes that the walk down a draft comes to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.forward import Decoder, DonePass, ForwardBatch, PendingPass, TokenDraws
from paceline.core.packing import RequestRows, pack
from paceline.engine.scheduler import ScheduledRequest
from paceline.models.padded_decoder import PaddedDecoder
from paceline.ops.sampling import drawn_from_logits_alone


@dataclass(slots=True)
class PassOutput:
    """A pass's results, and which of its rows belong to whom."""

    logits: Tensor  # [logits rows, vocab] float32; [0, vocab] where nobody wanted them
    hidden: Tensor | None  # [rows, len(hidden_layers), hidden size]
    hidden_layers: tuple[int, ...]
    first_rows: list[int]  # of each scheduled request, in the pass
    logits_rows: list[range]  # of each scheduled request, in `logits`: its prompt rows where asked for, root, nodes
    drawn: list[list[int | None] | None]
    """Of each scheduled request: the tokens that the model drew at its root and its nodes (None where that row cannot
    be sampled); None where they are to be chosen from the logits."""

    def keep_hidden(self) -> None:
        """Past the next launch, where they lie in a buffer of the pass."""
        self.hidden = None if self.hidden is None else self.hidden.clone()


@dataclass(slots=True)
class LaunchedRows:
    """A pass on its way, and whose rows are in it."""

    scheduled: Sequence[ScheduledRequest]
    batch: ForwardBatch
    num_wanted: list[int]  # logits rows of each scheduled request
    is_drawn: list[bool]  # the model draws this request's tokens
    hidden_layers: tuple[int, ...]
    pending: PendingPass
    tokens_only: bool
    """The model draws all that the pass is for. Then each request that reaches its end gets one token, if it has no
    draft: where and how it goes on is known, and only the token is not."""
    tables: NDArray[np.int32] | None = None  # block tables, once they differ from the batch's: see `launch_next`

    def drawn_at(self) -> dict[str, int]:
        """Request id -> its logits row, for those that reach their end."""
        pairs = zip(self.scheduled, accumulate(self.num_wanted), self.is_drawn, strict=True)
        return {entry.request.request_id: end - 1 for entry, end, drawn in pairs if drawn}

    def collect(self) -> PassOutput:
        output = self.pending.collect()
        ends = list(accumulate(self.num_wanted))
        first_rows = list(accumulate([entry.num_rows for entry in self.scheduled], initial=0))[:-1]
        tokens = output.tokens or []
        drawn = [
            tokens[end - 1 - len(entry.draft.token_ids) : end] if by_model else None
            for entry, end, by_model in zip(self.scheduled, ends, self.is_drawn, strict=True)
        ]
        if None in tokens and output.logits.device.type == "cpu" and output.logits.shape[0]:
            drawn = [None if mine is None or None in mine else mine for mine in drawn]  # the logits have to say
        return PassOutput(
            output.logits,
            output.hidden,
            self.hidden_layers,
            first_rows,
            [range(end - count, end) for end, count in zip(ends, self.num_wanted, strict=True)],
            drawn,
        )


class ModelRunner:
    def __init__(self, model: Decoder, kv_cache: Tensor, block_size: int) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.block_size = block_size

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        hidden_layers: Sequence[int] = (),
        *,
        draws_tokens: bool = False,  # take the tokens that the model draws, where it does
        wants_logits: bool = True,  # by another reader than the one that chooses tokens
        before: LaunchedRows | None = None,  # a pass that was not collected yet: last tokens come from it
        least_size: int = 1,  # rows that a padded pass has at least
    ) -> LaunchedRows:
        """Start a pass; `collect` waits for it. Only a padded decoder comes back before the pass is done."""
        drawn_at = {} if before is None else before.drawn_at()
        entries = [_rows(entry, drawn_at.get(entry.request.request_id, -1)) for entry in scheduled]
        model, vocab_size = self.model, self.model.config.vocab_size
        is_drawn = [
            draws_tokens
            and model.draws_tokens
            and entry.reaches_end
            and drawn_from_logits_alone(entry.request, vocab_size)
            for entry in scheduled
        ]
        draws = None
        if draws_tokens and model.draws_tokens:
            wants_logits = wants_logits or any(
                rows.num_wanted > (1 + len(entry.draft) if drawn else 0)
                for entry, rows, drawn in zip(scheduled, entries, is_drawn, strict=True)
            )
            draws = token_draws(scheduled, entries, is_drawn)
        else:
            wants_logits = True
        batch = pack(entries, self.block_size, draws, wants_logits=wants_logits)
        num_wanted = [entry.num_wanted for entry in entries]
        pending = self._start(batch, tuple(hidden_layers), least_size)
        tokens_only = not batch.wants_logits
        return LaunchedRows(scheduled, batch, num_wanted, is_drawn, tuple(hidden_layers), pending, tokens_only)

    def launch_next(
        self, before: LaunchedRows, scheduled: Sequence[ScheduledRequest], grown: Sequence[int]
    ) -> LaunchedRows | None:
        """The pass of the same requests, one token further; `grown`: those with a block more than in the pass before.
        None where it takes `launch`."""
        model = self.model
        if not isinstance(model, PaddedDecoder):
            return None
        tables = before.tables
        if tables is None and grown:
            tables = np.zeros((len(scheduled), model.room.max_blocks), dtype=np.int32)
            tables[:, : before.batch.block_tables.shape[1]] = before.batch.block_tables.numpy()
        changed = []
        for i in grown:
            assert tables is not None
            blocks = scheduled[i].request.block_ids
            tables[i, len(blocks) - 1] = blocks[-1]
            changed.append((i, len(blocks) - 1))
        pending = model.launch_next(tables if grown else None, changed)
        return None if pending is None else replace(before, scheduled=scheduled, pending=pending, tables=tables)

    def _start(self, batch: ForwardBatch, hidden_layers: tuple[int, ...], least_size: int) -> PendingPass:
        model = self.model
        if isinstance(model, PaddedDecoder):
            return model.launch(batch, self.kv_cache, hidden_layers=hidden_layers, least_size=least_size)
        return DonePass(model.forward(batch, self.kv_cache, hidden_layers=hidden_layers))


def token_draws(
    scheduled: Sequence[ScheduledRequest], entries: Sequence[RequestRows], is_drawn: Sequence[bool]
) -> TokenDraws:
    """For every logits row; those of requests that the model does not draw for are greedy, and nobody looks."""
    temperatures: list[float] = []
    seeds: list[int] = []
    positions: list[int] = []
    for entry, rows, drawn in zip(scheduled, entries, is_drawn, strict=True):
        request, params, count = entry.request, entry.request.sampling_params, rows.num_wanted
        temperatures += [params.temperature if drawn and not params.greedy else 0.0] * count
        seeds += [(request.seed + _HALF) % (2 * _HALF) - _HALF] * count
        num_tokens = request.num_tokens
        positions += [0] * (count - 1 - len(entry.draft))  # prompt rows
        if count:
            positions.append(num_tokens)
            positions += [num_tokens + depth for depth in entry.draft.depths()]
    return TokenDraws(
        np.array(temperatures, dtype=np.float32), np.array(seeds, dtype=np.int64), np.array(positions, dtype=np.int32)
    )


_HALF = 1 << 63


def _rows(entry: ScheduledRequest, follows: int) -> RequestRows:
    request, end = entry.request, entry.start + entry.num_committed
    tokens = request.token_ids[entry.start : end]
    return RequestRows(request.block_ids, tokens, entry.start, entry.draft, _num_wanted(entry), follows=follows)


def _num_wanted(entry: ScheduledRequest) -> int:
    """How many of the last rows have logits that somebody reads."""
    if entry.request.prompt_logprobs is not None and entry.start < entry.request.num_prompt_tokens:
        return entry.num_rows
    return 1 + len(entry.draft) if entry.reaches_end else 0
