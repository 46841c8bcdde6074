"""Passes of the fused decoder as CUDA graphs: one launch for the whole pass, the choice of tokens included.

Without a GPU (Triton's interpreter) a pass is launched kernel by kernel each time, over the same buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.fused_decoder import FusedDecoder
from paceline.models.graphs import record
from paceline.models.padded_decoder import PassKind, StaticPass
from paceline.models.pass_buffers import PassBuffers
from paceline.models.static_inputs import InputViews, PassRoom
from paceline.ops.triton.advance import RowInputs, advance_rows
from paceline.ops.triton.embed import DrawnBefore
from paceline.ops.triton.fused_head import RowNoise
from paceline.ops.triton.split_attention import AttentionRows


@dataclass(slots=True)
class CapturedPass:
    fused: FusedDecoder
    inputs: InputViews
    room: PassRoom
    kind: PassKind
    rows: AttentionRows
    buffers: PassBuffers
    logits: Tensor | None
    hidden: Tensor | None
    layers: Sequence[int] | None = None  # None: all
    graph: "torch.cuda.CUDAGraph | None" = None

    def launch(self) -> None:
        if self.graph is None:
            self.launch_kernels()
        else:
            self.graph.replay()

    def launch_kernels(self) -> None:
        inputs, fused = self.inputs, self.fused
        if self.kind.goes_on:
            rows = self.rows
            moved = RowInputs(
                rows.positions, rows.slots, rows.context_lens, inputs.follows, inputs.draw_positions, rows.req_ids,
                inputs.counts, rows.block_tables,
            )  # fmt: skip
            advance_rows(moved, self.room.block_size)
        fused.run(
            inputs.token_ids,
            self.rows,
            self.room.kv_cache,
            self.buffers,
            hidden_layers=self.kind.hidden_layers,
            features=self.hidden,
            layers=self.layers,
            before=DrawnBefore(inputs.follows, inputs.drawn_before),
        )
        noise = RowNoise(inputs.temperatures, inputs.seeds, inputs.draw_positions)
        count = inputs.counts[2:]  # a prompt wants the token of its last row, whatever the size of the pass
        fused.write_tokens(inputs.logits_rows, noise, self.buffers, count=count)
        if self.logits is not None:
            fused.write_logits(inputs.logits_rows, self.logits, self.buffers, count=count)

    def capture(self) -> None:
        """Run once, so that every kernel is compiled, then record. The inputs must be padding, or a pass that may run
        again: running it writes its keys and values."""
        self.graph = record(self.launch_kernels)


class CapturedPasses:
    def __init__(self, fused: FusedDecoder, layers: Sequence[int] | None = None) -> None:
        """`layers`: those that run; None: all."""
        self.fused, self._layers = fused, layers
        # Shared by all kinds of pass, and logits by all sizes: only one pass runs at a time.
        self._buffers: dict[int, PassBuffers] = {}
        self._logits: Tensor | None = None

    def over(self, layers: Sequence[int]) -> "CapturedPasses":
        return CapturedPasses(self.fused, layers)

    def make(self, inputs: InputViews, room: PassRoom, kind: PassKind) -> StaticPass:
        fused, size = self.fused, inputs.size
        rows = AttentionRows(
            positions=inputs.positions,
            slots=inputs.slots,
            context_lens=inputs.context_lens,
            parents=inputs.parents,
            is_node=inputs.is_node,
            req_ids=inputs.req_ids,
            block_tables=inputs.block_tables,
            block_size=room.block_size,
        )
        if size not in self._buffers:
            self._buffers[size] = fused.allocate(size, rows.max_splits(), inputs.picked)
        buffers = self._buffers[size]
        shape = (size, len(kind.hidden_layers), fused.config.hidden_size)
        hidden = buffers.hidden.new_zeros(shape) if kind.hidden_layers else None
        logits = self._room(size) if kind.logits else None
        made = CapturedPass(fused, inputs, room, kind, rows, buffers, logits, hidden, self._layers)
        if fused.device.type == "cuda":
            inputs.fill_with_padding()
            made.capture()
        return made

    def _room(self, size: int) -> Tensor:
        if self._logits is None or self._logits.shape[0] < size:
            vocab = self.fused.config.vocab_size
            self._logits = torch.zeros(size, vocab, dtype=torch.float32, device=self.fused.device)
        return self._logits[:size]
