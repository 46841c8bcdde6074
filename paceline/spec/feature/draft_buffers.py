"""Room for drafts on the fused kernels (fused_draft.py), and how their products are cut into programs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.drafters.joined import DraftWeights
from paceline.ops.triton.draft_attention import PathScratch
from paceline.ops.triton.draft_beam import Front, NextRows, Nodes, empty_nodes
from paceline.ops.triton.draft_top import num_stretches
from paceline.ops.triton.draft_tree import num_found
from paceline.ops.triton.fused_linear import split_sizes
from paceline.ops.triton.tiles import ROW_STEPS, ROWS, Tile, cut_of, tile_for
from paceline.spec.feature.draft_levels import DraftRoom

# Tokens of the head in one program: at least as many as a node has children (device_drafts.MAX_WIDTH). Of a large
# vocabulary fewer and longer stretches leave less to join.
STRETCH, LONG_STRETCH, LONG_FROM = 64, 128, 32768
MANY_ROWS = 64  # of a level: from here on programs of the head have twice as many


@dataclass(frozen=True, slots=True)
class DraftBuffers:
    """Room for drafts of one width, of up to `max_requests`: smaller ones use the front of it."""

    rows: NextRows
    fused: Tensor  # [R * max(F, W), hidden]: features of the newest pairs; EAGLE: joined pairs
    streams: tuple[Tensor, Tensor]  # [R * W, hidden] each: levels take turns
    query: Tensor  # [R * max(F, W), heads, dim] float32
    mixed: Tensor  # [R * W, heads * dim]
    activation: Tensor  # [R * W, intermediate]
    attention: PathScratch
    parts: Tensor  # float32: sums over parts of K
    arrivals: Tensor  # int32 zeros
    packed: Tensor  # int64
    sums: Tensor  # float32
    ids: Tensor  # [R * W, W] int32
    log_probs: Tensor  # [R * W, W] float32
    nodes: Nodes
    fronts: tuple[Front, Front]
    places: Tensor  # [R, N] int32


def allocate_buffers(weights: DraftWeights, room: DraftRoom, width: int) -> DraftBuffers:
    config = weights.config
    count, device = room.max_requests, room.kv.device
    num_rows, most_rows = count * width, count * max(width, room.num_pairs)
    hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
    splits = [
        split_sizes(most_rows, hidden, cut_of(linear.weight, rows).tile)
        for linear in (weights.fc, weights.output, weights.down)
        for rows in (*ROW_STEPS, most_rows)
    ]
    stretches = num_stretches(weights.head.shape[0], head_tile(weights.head))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def front() -> Front:
        paths = torch.zeros(count, width, dtype=torch.float64, device=device)
        return Front(paths, ints(count, width), ints(count, width, room.num_levels))

    num_nodes = num_found(room.num_levels, width)
    return DraftBuffers(
        rows=NextRows(
            x=empty(most_rows, 2 * hidden, dtype=weights.dtype),
            stream=empty(0),
            positions=ints(most_rows),
            slots=ints(most_rows),
        ),
        fused=empty(most_rows, hidden, dtype=weights.dtype),
        streams=(empty(num_rows, hidden, dtype=weights.dtype), empty(num_rows, hidden, dtype=weights.dtype)),
        query=empty(most_rows, config.num_heads, config.head_dim),
        mixed=empty(num_rows, q_size, dtype=weights.dtype),
        activation=empty(num_rows, config.intermediate_size, dtype=weights.dtype),
        attention=PathScratch.allocate(count, width, config.num_heads, config.num_kv_heads, config.head_dim, device),
        parts=empty(max(parts for parts, _ in splits)),
        arrivals=ints(max(arrivals for _, arrivals in splits)),
        packed=empty(num_rows * stretches * width, dtype=torch.int64),
        sums=empty(num_rows * stretches),
        ids=ints(num_rows, width),
        log_probs=empty(num_rows, width),
        nodes=empty_nodes(count, num_nodes, device),
        fronts=(front(), front()),
        places=ints(count, num_nodes),
    )


def head_tile(head: Tensor) -> Tile:
    vocab, size = head.shape
    into = min(64, tile_for(vocab, size, head.dtype).into)
    return Tile(out=LONG_STRETCH if vocab >= LONG_FROM else STRETCH, into=into, warps=4, stages=3)


def head_rows(num_rows: int) -> int:
    """Rows of a program of the head, in a level of so many."""
    return ROWS if num_rows < MANY_ROWS else 2 * ROWS
