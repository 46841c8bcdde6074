"""What a pass of the fused kernels reads and writes besides weights, keys and values. Made once for a captured pass."""

from dataclasses import dataclass

from torch import Tensor

from paceline.ops.triton.split_attention import AttentionScratch


@dataclass(frozen=True, slots=True)
class PassBuffers:
    hidden: Tensor  # [rows, hidden]: the residual stream
    query: Tensor  # [rows, heads, head_dim]
    mixed: Tensor  # [rows, heads, head_dim]
    activation: Tensor  # [rows, intermediate]
    scales: Tensor  # [rows] float32: of the first norm, in passes of many rows
    squares: Tensor  # [rows, num_squares(hidden)] float32: of the stream, for the other norms
    normed: Tensor  # [rows, hidden]: what the head reads
    gained: Tensor  # [rows, hidden]: the stream times the gains of the next norm, where a packed weight reads it
    attention: AttentionScratch
    parts: Tensor  # float32: sums over parts of K
    arrivals: Tensor  # int32 zeros: how many of them are there
    scores: Tensor  # [rows, shares of the vocabulary] float32
    score_ids: Tensor  # [rows, shares of the vocabulary] int32
    picked: Tensor  # [2, at least rows] int32: tokens and the bits of token_scores, to be read in one copy
    tokens: Tensor  # [rows] int32: what write_tokens chose
    token_scores: Tensor  # [rows] float32: not finite where a row cannot be sampled
