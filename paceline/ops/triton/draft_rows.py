"""What a drafter's layer reads: for each row the embedding of a token and a feature, side by side.

EAGLE-3 norms both; its residual stream starts from the feature, normed or not. EAGLE takes them as they are, and makes
its residual stream of the two by a product.

`take_in_rows` is for the newest pairs of each request, which also enter its line of the table of slots. They stand at
the end of its F places; a place that holds no pair has slot -1.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from dataclasses import dataclass
from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.rounds import NewestPairs
from paceline.ops.triton.product import NO_PDL, wait_for_previous_kernel

AS_IS, NORMED, NORMED_STREAM = 0, 1, 2  # how a pair is joined; the last: the residual stream is normed too


@dataclass(frozen=True, slots=True)
class PairMaker:
    """How tokens and features become rows."""

    embedding: Tensor  # [vocab, hidden]: the target's
    embedding_norm: Tensor | None  # [hidden]; None: as they are
    hidden_norm: Tensor | None  # [hidden]
    norms_stream: bool
    eps: float

    @property
    def mode(self) -> int:
        if self.embedding_norm is None:
            return AS_IS
        return NORMED_STREAM if self.norms_stream else NORMED

    def norms(self) -> tuple[Tensor, Tensor]:
        """Whatever stands in for those that are not there is never read."""
        if self.embedding_norm is None or self.hidden_norm is None:
            return self.embedding, self.embedding
        return self.embedding_norm, self.hidden_norm


@triton.jit
def _normed(values, norm, columns, ok, eps, size):
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    return values * scale * tl.load(norm + columns, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def write_pair(
    token, feature, embedding, embedding_norm, hidden_norm, x, stream, keeps_stream, eps,
    SIZE: tl.constexpr, PAD: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """One row. feature, x, stream: where its row begins; not every row's stream is asked for."""
    columns = tl.arange(0, PAD)
    ok = columns < SIZE
    embedded = tl.load(embedding + token.to(tl.int64) * SIZE + columns, mask=ok, other=0.0).to(tl.float32)
    fed = tl.load(feature + columns, mask=ok, other=0.0).to(tl.float32)
    kept = fed
    if MODE > 0:
        embedded = _normed(embedded, embedding_norm, columns, ok, eps, SIZE)
        fed = _normed(fed, hidden_norm, columns, ok, eps, SIZE)
        if MODE == 2:
            kept = fed
    tl.store(x + columns, embedded.to(x.dtype.element_ty), mask=ok)
    tl.store(x + SIZE + columns, fed.to(x.dtype.element_ty), mask=ok)
    if keeps_stream:
        tl.store(stream + columns, kept.to(stream.dtype.element_ty), mask=ok)


class LinedPairs(NewestPairs, Protocol):
    """And the table that their slots enter."""

    @property
    def table_rows(self) -> Tensor: ...

    @property
    def table(self) -> Tensor: ...


@triton.jit(do_not_specialize=["table_stride", "num_pairs"])
def _take_in_kernel(
    features, embedding, embedding_norm, hidden_norm, x, stream, row_positions, row_slots,
    slots, positions, next_tokens, counts, table_rows, context_lens, table, record, table_stride, num_pairs, eps,
    SIZE: tl.constexpr, PAD: tl.constexpr, MODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    request, place = row // num_pairs, row % num_pairs
    own = request * record + place
    slot = tl.load(slots + own)
    tl.store(row_slots + row, slot)
    tl.store(row_positions + row, tl.load(positions + own))
    # Places hold the newest `counts` keys of the context, the last one at its end.
    column = tl.load(context_lens + request * record) - num_pairs + place
    line = table + tl.load(table_rows + request * record).to(tl.int64) * table_stride
    if place >= num_pairs - tl.load(counts + request * record):
        tl.store(line + column, slot)
    write_pair(tl.load(next_tokens + own), features + row * SIZE, embedding, embedding_norm, hidden_norm,
               x + row * 2 * SIZE, stream + request * SIZE, place == num_pairs - 1, eps, SIZE, PAD, MODE)  # fmt: skip


def take_in_rows(
    features: Tensor,  # [R * F, hidden]
    maker: PairMaker,
    pairs: LinedPairs,
    x: Tensor,  # [R * F, 2 * hidden]: written
    stream: Tensor,  # [R, hidden]: of each request's newest pair, written
    positions: Tensor,  # [R * F] int32: written
    slots: Tensor,  # [R * F] int32: written
    *,
    pdl: int = NO_PDL,
) -> None:
    size, num_pairs = features.shape[1], pairs.slots.shape[1]
    _take_in_kernel[(features.shape[0],)](
        features, maker.embedding, *maker.norms(), x, stream, positions, slots,
        pairs.slots, pairs.positions, pairs.next_tokens, pairs.counts, pairs.table_rows, pairs.context_lens,
        pairs.table, pairs.slots.stride(0), pairs.table.stride(0), num_pairs, maker.eps,
        SIZE=size, PAD=triton.next_power_of_2(size), MODE=maker.mode, PDL=pdl,
        num_warps=4, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip
