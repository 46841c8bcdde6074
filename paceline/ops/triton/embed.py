"""The first hidden state of each row: its token's row of the embedding.

A row's token is given, or it is one that the pass before drew, which may still run when this one is launched.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.triton.product import NO_PDL, wait_for_previous_kernel


@dataclass(frozen=True, slots=True)
class DrawnBefore:
    follows: Tensor  # [rows] int32: the row's token is tokens[follows]; -1: it is given
    tokens: Tensor  # [any] int32


@triton.jit
def _embed_kernel(
    token_ids, follows, drawn, embedding, hidden, vocab, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    wait_for_previous_kernel(PDL)
    from_row = tl.load(follows + row)
    token = tl.load(token_ids + row)
    token = tl.where(from_row >= 0, tl.load(drawn + tl.maximum(from_row, 0)), token)
    # A row that could not be sampled has no token: its request has ended, and nobody reads what follows.
    token = tl.minimum(tl.maximum(token, 0), vocab - 1).to(tl.int64)
    values = tl.load(embedding + token * HIDDEN + columns, mask=columns < HIDDEN)
    tl.store(hidden + row * HIDDEN + columns, values, mask=columns < HIDDEN)


def embed_rows(
    token_ids: Tensor,  # [rows] int32
    before: DrawnBefore,
    embedding: Tensor,  # [vocab, hidden]
    hidden: Tensor,  # [rows, hidden]: written
    *,
    pdl: int = NO_PDL,
) -> None:
    vocab, num_columns = embedding.shape
    _embed_kernel[(token_ids.shape[0],)](
        token_ids, before.follows, before.tokens, embedding, hidden, vocab,
        HIDDEN=num_columns, COLUMNS=triton.next_power_of_2(num_columns), PDL=pdl,
        num_warps=4, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip
