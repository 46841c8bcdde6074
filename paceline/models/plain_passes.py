"""The plain twins of models/fused_decoder.py and models/captured_passes.py: on any decoder and device, without a graph.

`DrawingDecoder` draws tokens from its decoder's logits, as the fused kernels do (ops/fused_reference.py). `PlainPasses`
makes static passes of it: inputs come from the static buffers, results go to buffers of the pass. Padding rows are left
out, which is all that a captured pass does with them in effect.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.forward import ForwardBatch, ForwardOutput, Target, TokenDraws
from paceline.models.padded_decoder import PassKind, StaticPass
from paceline.models.static_inputs import InputViews, PassRoom, read_tokens, tokens_of_rows
from paceline.ops.fused_reference import noisy_scores


class DrawingDecoder:
    draws_tokens = True

    def __init__(self, base: Target) -> None:
        self.base = base
        self.config, self.device = base.config, base.device
        self.dtype, self.hidden_dtype = base.dtype, base.hidden_dtype
        self.batch_invariant, self.num_threads, self.handle = base.batch_invariant, base.num_threads, base.handle

    def vocabulary_rows(self, ids: Tensor, *, head: bool = False) -> Tensor:
        return self.base.vocabulary_rows(ids, head=head)

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: Tensor,
        *,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> ForwardOutput:
        output = self.base.forward(batch, kv_cache, hidden_layers=hidden_layers, layers=layers)
        picked = None if batch.draws is None else _pick(output.logits, batch.draws)
        logits = output.logits if batch.wants_logits else output.logits[:0]
        return ForwardOutput(logits, output.hidden, None if picked is None else read_tokens(picked))


def _pick(logits: Tensor, draws: TokenDraws) -> Tensor:  # -> [2, rows] int32, see `read_tokens`
    drawn = [torch.from_numpy(x).to(logits.device) for x in (draws.temperatures, draws.seeds, draws.positions)]
    best = noisy_scores(logits, *drawn).max(-1)
    return torch.stack([best.indices.int(), best.values.view(torch.int32)])


@dataclass(slots=True)
class PlainPass:
    base: DrawingDecoder
    inputs: InputViews
    room: PassRoom
    kind: PassKind
    logits: Tensor | None
    hidden: Tensor | None
    layers: Sequence[int] | None = None  # None: all

    def launch(self) -> None:
        self.launch_kernels()

    def launch_kernels(self) -> None:
        inputs, kind = self.inputs, self.kind
        num_rows, num_requests, num_logits = inputs.counts.tolist()
        if kind.goes_on:
            advance_views(inputs, num_rows, self.room.block_size)
        slots = inputs.slots[:num_rows]
        live = torch.nonzero(slots >= 0).flatten()  # rows that are not padding, which may stand between them
        if not len(live):
            return
        at = torch.cumsum(slots >= 0, 0) - 1  # row -> its place among those
        parents, wanted = inputs.parents[live], inputs.logits_rows[:num_logits]
        is_drawn = slots[wanted.long()] >= 0
        req_ids, own = inputs.req_ids[live], inputs.token_ids[live]
        batch = ForwardBatch(
            token_ids=tokens_of_rows(own, inputs.follows[live], inputs.drawn_before, self.base.config.vocab_size),
            positions=inputs.positions[live],
            slot_mapping=slots[live],
            context_lens=inputs.context_lens[live],
            parents=torch.where(parents >= 0, at[parents.clamp(min=0).long()], -1).int(),
            is_node=inputs.is_node[live].bool(),
            req_ids=req_ids,
            block_tables=inputs.block_tables[:num_requests],
            cu_query=torch.searchsorted(req_ids, torch.arange(num_requests + 1, dtype=torch.int32)).int(),
            logits_rows=at[wanted[is_drawn].long()].int(),
            block_size=self.room.block_size,
        )
        output = self.base.base.forward(batch, self.room.kv_cache, hidden_layers=kind.hidden_layers, layers=self.layers)
        drawn = torch.nonzero(is_drawn).flatten()  # logits rows
        if self.logits is not None:
            self.logits[drawn] = output.logits
        if output.hidden is not None:
            assert self.hidden is not None
            self.hidden[live] = output.hidden
        if len(drawn):
            asked = (inputs.temperatures, inputs.seeds, inputs.draw_positions)
            inputs.picked[:, drawn] = _pick(output.logits, TokenDraws(*(x[drawn].numpy() for x in asked)))


def advance_views(inputs: InputViews, num_rows: int, block_size: int) -> None:
    """The twin of ops/triton/advance.py."""
    positions, requests = inputs.positions[:num_rows], inputs.req_ids[:num_rows].long()
    positions += 1
    blocks = inputs.block_tables[requests, (positions // block_size).long()]
    inputs.slots[:num_rows] = blocks * block_size + positions % block_size
    inputs.context_lens[:num_rows] = positions + 1
    inputs.follows[:num_rows] = torch.arange(num_rows, dtype=torch.int32)
    inputs.draw_positions[:num_rows] += 1


class PlainPasses:
    def __init__(self, base: DrawingDecoder, layers: Sequence[int] | None = None) -> None:
        self.base, self._layers = base, layers

    def over(self, layers: Sequence[int]) -> "PlainPasses":
        return PlainPasses(self.base, layers)

    def make(self, inputs: InputViews, room: PassRoom, kind: PassKind) -> StaticPass:
        vocab = self.base.config.vocab_size
        logits = torch.zeros(inputs.size, vocab) if kind.logits else None
        shape = (inputs.size, len(kind.hidden_layers), self.base.config.hidden_size)
        hidden = torch.zeros(shape, dtype=self.base.hidden_dtype) if kind.hidden_layers else None
        return PlainPass(self.base, inputs, room, kind, logits, hidden, self._layers)
