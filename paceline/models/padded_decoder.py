"""A decoder whose passes have few sizes: each is padded to the next one and runs from static buffers.

On CUDA a pass of a size is one captured graph (models/captured_passes.py); the plain twin (models/plain_passes.py) runs
the same way without a graph, on any device. A pass over only some layers, or over another cache, is left to the
decoder beneath. Both give the same bits, so nobody can tell which one ran.

    decoder = PaddedDecoder(fused, CapturedPasses(fused), room)
    decoder.prepare(hidden_layers=())  # capture now what decoding needs, and not in the first requests
    output = decoder.forward(batch, room.kv_cache)

A pass may be launched while the one before still runs, and take tokens that this one draws (`ForwardBatch.follows`):

    first = decoder.launch(batch, room.kv_cache)
    second = decoder.launch(next_batch, room.kv_cache)
    first.collect().tokens
"""

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.forward import DonePass, ForwardBatch, ForwardOutput, PendingPass, Target
from paceline.models.read_back import ReadBack, ReadBacks
from paceline.models.static_inputs import InputViews, PassRoom, StaticInputs, aligned, read_tokens, tokens_of_rows

MAX_LOGITS_SIZE = 1024  # room for logits is that of a whole pass: 0.6 GB for a vocabulary of 150,000


def sizes_up_to(max_rows: int) -> tuple[int, ...]:
    """From 16 rows on each is at most half as large again as the one before: padding costs a small pass nothing, and a
    large one at most a third."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_rows:
        power = 1 << (sizes[-1] * 2 // 3).bit_length()  # the power of two above, or itself
        sizes.append(power if power > sizes[-1] else sizes[-1] * 3 // 2)
    return tuple(sizes)


class PassKind(NamedTuple):
    """What a pass leaves behind, beside tokens: each kind is a graph of its own."""

    logits: bool
    hidden_layers: tuple[int, ...]
    goes_on: bool = False  # it begins by making its inputs out of those of the pass before, see `launch_next`


class StaticPass(Protocol):
    """One size and kind, ready to run over what lies in the static inputs. Tokens go to `InputViews.picked`."""

    @property
    def logits(self) -> Tensor | None: ...  # [size, vocab] float32

    @property
    def hidden(self) -> Tensor | None: ...  # [size, layers, hidden]

    def launch(self) -> None: ...

    def launch_kernels(self) -> None: ...  # the same one by one, for a larger graph that holds them


class PassMaker(Protocol):
    def make(self, inputs: InputViews, room: PassRoom, kind: PassKind) -> StaticPass: ...

    def over(self, layers: Sequence[int]) -> "PassMaker": ...  # of passes that only run these


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


@dataclass(slots=True)
class LaunchedPass:
    """`ForwardOutput` but for the tokens, which are on their way."""

    clock: PassClock
    logits: Tensor
    hidden: Tensor | None
    read_back: ReadBack
    read_backs: ReadBacks  # where it goes back to
    has_tokens: bool

    def collect(self) -> ForwardOutput:
        begin_s = time.perf_counter()
        host = self.read_back.wait()  # also where it has no tokens, so that its time is not taken for the next one's
        self.clock.device_s += self.read_back.device_s()
        tokens = read_tokens(host) if self.has_tokens else None
        self.read_backs.give_back(self.read_back)
        self.clock.read_s += time.perf_counter() - begin_s
        return ForwardOutput(self.logits, self.hidden, tokens)


class PlainRows(NamedTuple):
    """A pass of one row and one drawn token for each request."""

    size: int
    num_rows: int
    kind: PassKind


class PaddedDecoder:
    draws_tokens = True

    def __init__(
        self,
        base: Target,
        passes: PassMaker,
        room: PassRoom,
        sizes: Sequence[int] | None = None,  # of rows; by default such that every pass of the engine has one
    ) -> None:
        self.base, self.room, self.sizes = base, room, tuple(sizes or sizes_up_to(room.max_rows))
        self.config, self.device = base.config, base.device
        self.dtype, self.hidden_dtype = base.dtype, base.hidden_dtype
        self.batch_invariant, self.num_threads, self.handle = base.batch_invariant, base.num_threads, base.handle
        self.clock = PassClock()
        self._maker = passes
        self._inputs = StaticInputs(room, max(self.sizes), base.device)
        self._views = {size: self._inputs.views(size) for size in self.sizes}
        self._passes: dict[tuple[int, PassKind], StaticPass] = {}
        self._last: PlainRows | None = None  # what was launched last, where `launch_next` can follow
        self._no_logits = torch.empty(0, base.config.vocab_size)
        self._read_backs = ReadBacks(2 * aligned(max(self.sizes)), base.device)

    def vocabulary_rows(self, ids: Tensor, *, head: bool = False) -> Tensor:
        return self.base.vocabulary_rows(ids, head=head)

    def over(self, layers: Sequence[int], sizes: Sequence[int]) -> "PaddedDecoder":
        """Passes over some of its layers, on the same cache and with inputs of their own."""
        return PaddedDecoder(self.base, self._maker.over(layers), self.room, sizes)

    def prepare(self, hidden_layers: Sequence[int] = ()) -> None:
        """Make the passes of every size that only draw tokens, the largest first: the others fit into its memory."""
        for size in reversed(self.sizes):
            self.static_pass(size, PassKind(False, tuple(hidden_layers)))
            if size < 2 * self.room.max_num_seqs:
                self.static_pass(size, PassKind(False, tuple(hidden_layers), goes_on=True))

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: Tensor,
        *,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> ForwardOutput:
        return self.launch(batch, kv_cache, hidden_layers=hidden_layers, layers=layers).collect()

    def launch(
        self,
        batch: ForwardBatch,
        kv_cache: Tensor,
        *,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
        least_size: int = 1,  # of the pass, in rows
    ) -> PendingPass:
        """As `forward`, without waiting where that is possible. Logits are good until the next launch."""
        size, self._last = self._size(batch, least_size), None
        if size is None or layers is not None or kv_cache is not self.room.kv_cache:
            return DonePass(self._run_eagerly(batch, kv_cache, hidden_layers, layers))
        num_logits = batch.logits_rows.shape[0]
        kind = PassKind(batch.wants_logits and num_logits > 0, tuple(hidden_layers))
        found = self.static_pass(size, kind)
        is_plain = batch.num_rows == batch.block_tables.shape[0] == num_logits
        if is_plain and batch.draws is not None and not kind.logits:
            self._last = PlainRows(size, num_logits, kind)
            self.static_pass(size, kind._replace(goes_on=True))  # now: capturing it overwrites the inputs
        begin_s = time.perf_counter()
        self._inputs.write(batch, size)
        self.clock.write_s += time.perf_counter() - begin_s
        return self._start(found, size, batch.num_rows, num_logits, draws=batch.draws is not None)

    def launch_next(
        self, tables: NDArray[np.int32] | None, grown: Sequence[tuple[int, int]] = ()
    ) -> PendingPass | None:
        """The pass after the one launched last, for the same requests: each row goes on with the token that it draws
        there. `tables`: their blocks by now, [requests, max_blocks]; None: as before. `grown`: where they differ, if
        that is known. Returns None where the last launch was not of one row and one token for each request."""
        last = self._last
        if last is None:
            return None
        begin_s = time.perf_counter()
        if tables is not None:
            self._inputs.write_tables(tables, last.size, grown)
        self.clock.write_s += time.perf_counter() - begin_s
        found = self.static_pass(last.size, last.kind._replace(goes_on=True))
        return self._start(found, last.size, last.num_rows, last.num_rows, draws=True)

    def size_for(self, num_rows: int) -> int | None:
        """Rows that a pass of so many is padded to; None: it is larger than every size."""
        at = bisect.bisect_left(self.sizes, num_rows)
        return None if at == len(self.sizes) else self.sizes[at]

    def inputs(self, size: int) -> InputViews:
        """Of passes of this size, on the device."""
        return self._views[size]

    def launch_over(
        self, found: StaticPass, size: int, num_rows: int, tables: NDArray[np.int32] | None = None
    ) -> LaunchedPass:
        """A pass that makes its inputs on the device and draws a token at every row. Its hidden states are good until
        the next launch. `tables`: the blocks of its requests, where they have changed."""
        self._last = None
        if tables is not None:
            self._inputs.write_tables(tables, size)
        return self._start(found, size, num_rows, num_rows, draws=True, keeps_hidden=False)

    def _start(
        self, found: StaticPass, size: int, num_rows: int, num_logits: int, *, draws: bool, keeps_hidden: bool = True
    ) -> LaunchedPass:
        begin_s = time.perf_counter()
        read_back = self._read_backs.take(self.clock.times_device)
        read_back.begin()
        found.launch()
        hidden = None if found.hidden is None else found.hidden[:num_rows]
        if hidden is not None and keeps_hidden:
            hidden = hidden.clone()  # drafters keep hidden states for a step or more
        read_back.read(self._views[size].picked, num_logits)
        logits = self._no_logits if found.logits is None else found.logits[:num_logits]
        clock = self.clock
        clock.num_passes += 1
        clock.num_by_size[size] = clock.num_by_size.get(size, 0) + 1
        clock.launch_s += time.perf_counter() - begin_s
        return LaunchedPass(clock, logits, hidden, read_back, self._read_backs, draws and num_logits > 0)

    def _run_eagerly(
        self, batch: ForwardBatch, kv_cache: Tensor, hidden_layers: Sequence[int], layers: Sequence[int] | None
    ) -> ForwardOutput:
        begin_s = time.perf_counter()
        if batch.follows is not None:
            batch = self._with_drawn_tokens(batch, batch.follows)
        output = self.base.forward(batch, kv_cache, hidden_layers=hidden_layers, layers=layers)
        self.clock.num_eager += 1
        self.clock.eager_s += time.perf_counter() - begin_s
        return output

    def _with_drawn_tokens(self, batch: ForwardBatch, follows: Tensor) -> ForwardBatch:
        batch, drawn = batch.to(self.device), self._views[self.sizes[0]].drawn_before
        tokens = tokens_of_rows(batch.token_ids, follows.to(self.device), drawn, self.config.vocab_size)
        return replace(batch, token_ids=tokens, follows=None)

    def _size(self, batch: ForwardBatch, least: int) -> int | None:
        num_requests, num_blocks = batch.block_tables.shape
        if num_requests > self.room.max_num_seqs or num_blocks > self.room.max_blocks:
            return None
        if batch.token_ids.device.type != "cpu":
            return None  # a batch that is on the device already: only decoders beneath are handed one
        size = self.size_for(max(batch.num_rows, least))
        wants_logits = batch.wants_logits and batch.logits_rows.shape[0] > 0
        return None if size is not None and wants_logits and size > MAX_LOGITS_SIZE else size

    def static_pass(self, size: int, kind: PassKind) -> StaticPass:
        found = self._passes.get((size, kind))
        if found is None:
            views = self._views[size]
            drawn = views.drawn_before.clone()  # capturing runs the pass once: the next one may still need these
            found = self._passes[size, kind] = self._maker.make(views, self.room, kind)
            views.drawn_before.copy_(drawn)
        return found
