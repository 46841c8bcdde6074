"""A decoder whose passes have few sizes: each is padded to the next one and runs from static buffers.

On CUDA a pass of a size is one captured graph (models/captured_passes.py); the plain twin (models/plain_passes.py) runs
the same way without a graph, on any device. What is larger than the largest size, or runs only some layers, is left to
the decoder beneath. Both give the same bits, so nobody can tell which one ran.

    decoder = PaddedDecoder(fused, CapturedPasses(fused), room)
    decoder.prepare(hidden_layers=())  # capture now what decoding needs, and not in the first requests
    output = decoder.forward(batch, room.kv_cache)
"""

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.core.forward import ForwardBatch, ForwardOutput, Target
from paceline.models.static_inputs import InputViews, PassRoom, StaticInputs, aligned, read_tokens

# From 16 rows on each is at most half as large again as the one before: padding costs a small pass nothing, and a large
# one at most a third. The last ones are for prompts; larger passes take longer than their launches.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048)
MAX_LOGITS_SIZE = 1024  # room for logits is that of a whole pass: 0.6 GB for a vocabulary of 150,000


class PassKind(NamedTuple):
    """What a pass leaves behind, beside tokens: each kind is a graph of its own."""

    logits: bool
    hidden_layers: tuple[int, ...]


class StaticPass(Protocol):
    """One size and kind, ready to run over what lies in the static inputs."""

    @property
    def picked(self) -> Tensor: ...  # [2, at least size] int32, see `read_tokens`

    @property
    def logits(self) -> Tensor | None: ...  # [size, vocab] float32

    @property
    def hidden(self) -> Tensor | None: ...  # [size, layers, hidden]

    def launch(self) -> None: ...


class PassMaker(Protocol):
    def make(self, inputs: InputViews, room: PassRoom, kind: PassKind) -> StaticPass: ...


@dataclass(slots=True)
class PassClock:
    """Seconds that the host spent on padded passes; with `times_device`, also those that the device worked on them."""

    times_device: bool = False
    num_passes: int = 0
    num_eager: int = 0  # passes left to the decoder beneath
    eager_s: float = 0.0
    write_s: float = 0.0  # padding and sending the inputs
    launch_s: float = 0.0
    read_s: float = 0.0  # waiting for the device, and reading its tokens
    device_s: float = 0.0
    num_by_size: dict[int, int] = field(default_factory=dict)


class PaddedDecoder:
    draws_tokens = True

    def __init__(self, base: Target, passes: PassMaker, room: PassRoom, sizes: Sequence[int] = SIZES) -> None:
        self.base, self.room, self.sizes = base, room, tuple(sizes)
        self.config, self.dtype, self.device = base.config, base.dtype, base.device
        self.batch_invariant, self.num_threads, self.handle = base.batch_invariant, base.num_threads, base.handle
        self.clock = PassClock()
        self._maker = passes
        self._inputs = StaticInputs(room, max(sizes), base.device)
        self._passes: dict[tuple[int, PassKind], StaticPass] = {}
        on_cuda = base.device.type == "cuda"
        self._picked = torch.empty(2 * aligned(max(sizes)), dtype=torch.int32, pin_memory=on_cuda)
        self._events: list[torch.cuda.Event] = []
        if on_cuda:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]

    def vocabulary_rows(self, ids: Tensor, *, head: bool = False) -> Tensor:
        return self.base.vocabulary_rows(ids, head=head)

    def prepare(self, hidden_layers: Sequence[int] = ()) -> None:
        """Make the passes of every size that only draw tokens, the largest first: the others fit into its memory."""
        for size in reversed(self.sizes):
            self._pass(size, PassKind(False, tuple(hidden_layers)))

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: Tensor,
        *,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> ForwardOutput:
        size = self._size(batch)
        if size is None or layers is not None or kv_cache is not self.room.kv_cache:
            return self._run_eagerly(batch, kv_cache, hidden_layers, layers)
        num_logits = batch.logits_rows.shape[0]
        kind = PassKind(batch.wants_logits and num_logits > 0, tuple(hidden_layers))
        found = self._pass(size, kind)
        begin_s = time.perf_counter()
        self._inputs.write(batch, size)
        written_s = time.perf_counter()
        self._launch(found)
        launched_s = time.perf_counter()
        tokens = self._read(found, num_logits) if batch.draws is not None and num_logits else None
        clock = self.clock
        clock.num_passes += 1
        clock.num_by_size[size] = clock.num_by_size.get(size, 0) + 1
        clock.write_s += written_s - begin_s
        clock.launch_s += launched_s - written_s
        clock.read_s += time.perf_counter() - launched_s
        # Drafters keep hidden states for a step or more, so they get their own; logits are good until the next pass.
        hidden = None if found.hidden is None else found.hidden[: batch.num_rows].clone()
        logits = torch.empty(0, self.config.vocab_size) if found.logits is None else found.logits[:num_logits]
        return ForwardOutput(logits, hidden, tokens)

    def _run_eagerly(
        self, batch: ForwardBatch, kv_cache: Tensor, hidden_layers: Sequence[int], layers: Sequence[int] | None
    ) -> ForwardOutput:
        begin_s = time.perf_counter()
        times_device = self.clock.times_device and bool(self._events)
        if times_device:
            self._events[0].record()
        output = self.base.forward(batch, kv_cache, hidden_layers=hidden_layers, layers=layers)
        if times_device:
            self._events[1].record()
            self._events[1].synchronize()
            self.clock.device_s += self._events[0].elapsed_time(self._events[1]) / 1e3
        self.clock.num_eager += 1
        self.clock.eager_s += time.perf_counter() - begin_s
        return output

    def _size(self, batch: ForwardBatch) -> int | None:
        num_requests, num_blocks = batch.block_tables.shape
        if num_requests > self.room.max_num_seqs or num_blocks > self.room.max_blocks:
            return None
        if batch.token_ids.device.type != "cpu":
            return None  # a batch that is on the device already: only decoders beneath are handed one
        at = bisect.bisect_left(self.sizes, batch.num_rows)
        if at == len(self.sizes):
            return None
        wants_logits = batch.wants_logits and batch.logits_rows.shape[0] > 0
        return None if wants_logits and self.sizes[at] > MAX_LOGITS_SIZE else self.sizes[at]

    def _pass(self, size: int, kind: PassKind) -> StaticPass:
        found = self._passes.get((size, kind))
        if found is None:
            found = self._passes[size, kind] = self._maker.make(self._inputs.views(size), self.room, kind)
        return found

    def _launch(self, found: StaticPass) -> None:
        if self.clock.times_device and self._events:
            self._events[0].record()
            found.launch()
            self._events[1].record()
        else:
            found.launch()

    def _read(self, found: StaticPass, num_logits: int) -> list[int | None]:
        """The one place where the host waits for the device."""
        host = self._picked[: found.picked.numel()].view(2, -1)
        host.copy_(found.picked, non_blocking=True)
        if self._events:
            torch.cuda.current_stream(self.device).synchronize()
            if self.clock.times_device:
                self.clock.device_s += self._events[0].elapsed_time(self._events[1]) / 1e3
        return read_tokens(host[:, :num_logits])
