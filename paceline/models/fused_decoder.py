"""The decoder of models/decoder.py on the fused Triton kernels: five launches a layer (seven for many rows, where norms
are kernels of their own), and bits that do not depend on how many rows share the pass.

    fused = FusedDecoder(Decoder(config, weights, dtype=torch.bfloat16, device="cuda"))
    output = fused.forward(batch, kv_cache)  # as Decoder.forward

For a CUDA graph everything that a pass touches is given by the caller, so nothing is allocated or read on the host:

    buffers = fused.allocate(num_rows, max_splits=rows.max_splits())
    fused.run(token_ids, rows, kv_cache, buffers)
    fused.write_tokens(wanted, noise, buffers)  # or fused.write_logits(wanted, logits, buffers)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.models.decoder import Decoder, Linear
from paceline.models.static_inputs import aligned, read_tokens
from paceline.ops.packed import PackedWeight, Weight
from paceline.ops.triton.embed import DrawnBefore, embed_rows
from paceline.ops.triton.fused_head import RowNoise, head_tiles, norm_head_logits, norm_head_tokens
from paceline.ops.triton.fused_linear import linear_residual, split_sizes
from paceline.ops.triton.fused_mlp import norm_gate_up_silu
from paceline.ops.triton.fused_qkv import Heads, norm_qkv_rope
from paceline.ops.triton.norm_rows import norm_rows
from paceline.ops.triton.product import NO_PDL
from paceline.ops.triton.rms_norm import rms_norm
from paceline.ops.triton.split_attention import AttentionRows, AttentionScratch, split_tree_attention
from paceline.ops.triton.tiles import ROWS, Tile, after_norm, row_tile_for, tile_of, widened


@dataclass(frozen=True, slots=True)
class PassBuffers:
    hidden: Tensor  # [rows, hidden]: the residual stream
    query: Tensor  # [rows, heads, head_dim]
    mixed: Tensor  # [rows, heads, head_dim]
    activation: Tensor  # [rows, intermediate]
    gained: Tensor  # [rows, hidden], as `scales` for passes of many rows only: what norm_rows writes
    scales: Tensor  # [rows] float32
    attention: AttentionScratch
    parts: Tensor  # float32: sums over parts of K
    arrivals: Tensor  # int32 zeros: how many of them are there
    scores: Tensor  # [rows, shares of the vocabulary] float32
    score_ids: Tensor  # [rows, shares of the vocabulary] int32
    picked: Tensor  # [2, at least rows] int32: tokens and the bits of token_scores, to be read in one copy
    tokens: Tensor  # [rows] int32: what write_tokens chose
    token_scores: Tensor  # [rows] float32: not finite where a row cannot be sampled


@dataclass(frozen=True, slots=True)
class Tiles:
    qkv: Tile
    output: Tile
    gate_up: Tile
    down: Tile
    head: Tile


def model_tiles(decoder: Decoder, layer: int = 0) -> Tiles:
    """Of a layer, and of the head: the layers of a quantized file may have different formats."""
    return Tiles(*(tile_of(weight) for weight in _weights(decoder, layer)))


def wide_tiles(decoder: Decoder, tiles: Tiles, num_rows: int, layer: int = 0) -> Tiles:
    """For programs of many rows in a pass of `num_rows`; the same bits."""
    qkv, output, gate_up, down, head = _weights(decoder, layer)
    return Tiles(
        qkv=widened(tiles.qkv, qkv, num_rows, normed=True),
        output=widened(tiles.output, output, num_rows, normed=False),
        gate_up=widened(tiles.gate_up, gate_up, num_rows, normed=True),
        down=widened(tiles.down, down, num_rows, normed=False),
        head=widened(tiles.head, head, num_rows, normed=True),
    )


def _weights(decoder: Decoder, layer: int) -> list[Weight]:
    own = decoder.layers[layer]
    return [linear.weight for linear in (own.qkv, own.output, own.gate_up, own.down, decoder.head)]


class FusedDecoder:
    batch_invariant = True
    draws_tokens = True
    num_threads = None  # a GPU's
    handle = None  # nothing native

    def __init__(
        self, base: Decoder, *, pdl: int = NO_PDL, row_tile: int | None = None, tiles: Tiles | None = None
    ) -> None:
        """`pdl`: programmatic dependent launch, see ops/triton/product.py. `row_tile`: rows of a program; None: by the
        number of rows of the pass."""
        config = base.config
        self.base, self.config, self.dtype, self.device = base, config, base.dtype, base.device
        self.pdl, self.row_tile = pdl, row_tile
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self.tiles = [tiles or model_tiles(base, i) for i in range(config.num_layers)]
        self._cuts: dict[tuple[int, int], tuple[int, Tiles]] = {}
        self._scratch: AttentionScratch | None = None
        self._head_norms = [
            torch.stack([layer.q_norm, layer.k_norm]) if layer.q_norm is not None and layer.k_norm is not None else None
            for layer in base.layers
        ]

    def cut(self, num_rows: int, layer: int) -> tuple[int, Tiles]:
        """How a layer of a pass of so many rows is cut into programs: rows of one, and tiles. The bits are the same for
        all."""
        if (num_rows, layer) not in self._cuts:
            packed = any(isinstance(weight, PackedWeight) for weight in _weights(self.base, layer)[:-1])
            row_tile = row_tile_for(num_rows, packed=packed) if self.row_tile is None else self.row_tile
            tiles = self.tiles[layer]
            tiles = tiles if row_tile == ROWS else wide_tiles(self.base, tiles, num_rows, layer)
            self._cuts[num_rows, layer] = (row_tile, tiles)
        return self._cuts[num_rows, layer]

    def head_cut(self, num_rows: int) -> tuple[int, Tile]:
        weight, tile = self.base.head.weight, self.tiles[0].head
        packed = isinstance(weight, PackedWeight)
        row_tile = row_tile_for(num_rows, packed=packed) if self.row_tile is None else self.row_tile
        return row_tile, tile if row_tile == ROWS else widened(tile, weight, num_rows, normed=True)

    def vocabulary_rows(self, ids: Tensor, *, head: bool = False) -> Tensor:
        return self.base.vocabulary_rows(ids, head=head)

    def allocate(self, num_rows: int, max_splits: int, picked: Tensor | None = None) -> PassBuffers:
        """Room for a pass of `num_rows` rows over contexts of up to `max_splits` (AttentionRows.max_splits).

        `picked`: where its tokens go; None: to room of its own."""
        config, device, dtype = self.config, self.device, self.dtype
        heads = self.heads
        added = [tile for tiles in self.tiles for tile in (tiles.output, tiles.down)]  # wide tiles need no more room
        splits = [split_sizes(num_rows, config.hidden_size, tile) for tile in added]
        shares = head_tiles(config.vocab_size, self.tiles[0].head)
        is_wide = any(self.cut(num_rows, i)[0] != ROWS for i in range(config.num_layers))
        num_normed = num_rows if is_wide else 0
        if picked is None:
            picked = torch.empty(2, aligned(num_rows), dtype=torch.int32, device=device)

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return PassBuffers(
            hidden=empty(num_rows, config.hidden_size),
            query=empty(num_rows, heads.num_q, heads.dim),
            mixed=empty(num_rows, heads.num_q, heads.dim),
            activation=empty(num_rows, config.intermediate_size),
            gained=empty(num_normed, config.hidden_size),
            scales=empty(num_normed, dtype=torch.float32),
            attention=self._attention_scratch(num_rows, max_splits),
            parts=empty(max(parts for parts, _ in splits), dtype=torch.float32),
            arrivals=torch.zeros(max(count for _, count in splits), dtype=torch.int32, device=device),
            scores=empty(num_rows, shares, dtype=torch.float32),
            score_ids=empty(num_rows, shares, dtype=torch.int32),
            picked=picked,
            tokens=picked[0, :num_rows],
            token_scores=picked[1, :num_rows].view(torch.float32),
        )

    def _attention_scratch(self, num_rows: int, max_splits: int) -> AttentionScratch:
        """One for all passes of this decoder, which never overlap; a graph keeps the one that it was captured with."""
        heads = self.heads
        self._scratch = AttentionScratch.allocate(
            num_rows, heads.num_q, heads.num_kv, heads.dim, self.dtype, max_splits, self.device, earlier=self._scratch
        )
        return self._scratch

    @torch.no_grad()
    def run(
        self,
        token_ids: Tensor,  # [rows] int32
        rows: AttentionRows,
        kv_cache: Tensor,  # [layers, 2, slots, kv_heads, head_dim]
        buffers: PassBuffers,
        *,
        hidden_layers: Sequence[int] = (),
        features: Tensor | None = None,  # [rows, len(hidden_layers), hidden]: written
        layers: Sequence[int] | None = None,
        before: DrawnBefore | None = None,  # tokens of rows that follow on from the pass before
    ) -> None:
        """One pass up to the last layer; `buffers.hidden` has what leaves it. Static shapes, no host reads."""
        active = self.base.active_layers(layers, hidden_layers)
        hidden = buffers.hidden
        if before is None:
            torch.index_select(self.base.embedding, 0, token_ids, out=hidden)
        else:
            embed_rows(token_ids, before, self.base.embedding, hidden, pdl=self.pdl)
        for i in range(self.config.num_layers):
            self._keep(i, hidden, hidden_layers, features)
            if i in active:
                self._run_layer(i, rows, kv_cache[i], buffers)
        last = self.config.num_layers
        self._keep(last, hidden, hidden_layers, features)
        if last + 1 in hidden_layers:
            normed = rms_norm(hidden, self.base.final_norm, self.config.rms_norm_eps)
            self._keep(last + 1, normed, hidden_layers, features)

    def _run_layer(self, i: int, rows: AttentionRows, kv_layer: Tensor, buffers: PassBuffers) -> None:
        self.launch_qkv(i, rows, kv_layer, buffers)
        self.launch_attention(i, rows, kv_layer, buffers)
        self.launch_output(i, buffers)
        self.launch_gate_up(i, buffers)
        self.launch_down(i, buffers)

    def launch_qkv(self, i: int, rows: AttentionRows, kv_layer: Tensor, buffers: PassBuffers) -> None:
        base, layer = self.base, self.base.layers[i]
        row_tile, tiles = self.cut(buffers.hidden.shape[0], i)
        x, scales, tile = self._normed(layer.input_norm, layer.qkv, self.tiles[i].qkv, tiles.qkv, row_tile, buffers)
        norm_qkv_rope(
            x, layer.input_norm, layer.qkv.weight, layer.qkv.bias, self._head_norms[i], base.cos, base.sin,
            rows.positions, rows.slots, buffers.query, kv_layer, self.heads, self.config.rms_norm_eps, tile,
            scales=scales, pdl=self.pdl, row_tile=row_tile,
        )  # fmt: skip

    def _normed(
        self, norm: Tensor, linear: Linear, own_tile: Tile, tile: Tile, row_tile: int, buffers: PassBuffers
    ) -> tuple[Tensor, Tensor | None, Tile]:
        """What a product with a norm reads, the rows' scales if they were normed before it, and its tile."""
        if row_tile == ROWS:
            return buffers.hidden, None, tile
        norm_rows(
            buffers.hidden, norm, buffers.gained, buffers.scales, self.config.rms_norm_eps, own_tile, pdl=self.pdl
        )  # fmt: skip
        return buffers.gained, buffers.scales, after_norm(tile, linear.weight)

    def launch_attention(self, i: int, rows: AttentionRows, kv_layer: Tensor, buffers: PassBuffers) -> None:
        window, scale = self.config.window(i), self.config.head_dim**-0.5
        split_tree_attention(
            buffers.query, kv_layer, buffers.mixed, rows, buffers.attention, window, scale, pdl=self.pdl
        )

    def launch_output(self, i: int, buffers: PassBuffers) -> None:
        row_tile, tiles = self.cut(buffers.hidden.shape[0], i)
        self._add(buffers.mixed.flatten(1), self.base.layers[i].output, tiles.output, row_tile, buffers)

    def launch_gate_up(self, i: int, buffers: PassBuffers) -> None:
        layer = self.base.layers[i]
        row_tile, tiles = self.cut(buffers.hidden.shape[0], i)
        x, scales, tile = self._normed(
            layer.mlp_norm, layer.gate_up, self.tiles[i].gate_up, tiles.gate_up, row_tile, buffers
        )
        norm_gate_up_silu(
            x, layer.mlp_norm, layer.gate_up.weight, layer.gate_up.bias, buffers.activation,
            self.config.rms_norm_eps, tile, scales=scales, pdl=self.pdl, row_tile=row_tile,
        )  # fmt: skip

    def launch_down(self, i: int, buffers: PassBuffers) -> None:
        row_tile, tiles = self.cut(buffers.hidden.shape[0], i)
        self._add(buffers.activation, self.base.layers[i].down, tiles.down, row_tile, buffers)

    def _add(self, x: Tensor, linear: Linear, tile: Tile, row_tile: int, buffers: PassBuffers) -> None:
        linear_residual(
            x, linear.weight, linear.bias, buffers.hidden, buffers.parts, buffers.arrivals, tile,
            pdl=self.pdl, row_tile=row_tile,
        )  # fmt: skip

    def _keep(self, i: int, hidden: Tensor, hidden_layers: Sequence[int], features: Tensor | None) -> None:
        if features is not None:
            for place, wanted in enumerate(hidden_layers):
                if wanted == i:
                    features[:, place].copy_(hidden)

    def write_logits(
        self, wanted: Tensor, logits: Tensor, buffers: PassBuffers, *, count: Tensor | None = None
    ) -> None:
        """Logits [len(wanted), vocab] float32 of these rows, or of the first `count` ([1] int32), after `run`."""
        row_tile, tile = self.head_cut(wanted.shape[0])
        norm_head_logits(
            buffers.hidden, wanted, self.base.final_norm, self.base.head.weight, logits, self.config.rms_norm_eps,
            tile, count=count, pdl=self.pdl, row_tile=row_tile,
        )  # fmt: skip

    def write_tokens(
        self, wanted: Tensor, noise: RowNoise | None, buffers: PassBuffers, *, count: Tensor | None = None
    ) -> None:
        """`buffers.tokens[: len(wanted)]`: the token of each of these rows, or of the first `count`, after `run`,
        without logits in memory."""
        row_tile, tile = self.head_cut(wanted.shape[0])
        norm_head_tokens(
            buffers.hidden, wanted, self.base.final_norm, self.base.head.weight, buffers.scores, buffers.score_ids,
            buffers.tokens, buffers.token_scores, noise, self.config.rms_norm_eps, tile,
            count=count, pdl=self.pdl, row_tile=row_tile,
        )  # fmt: skip

    @torch.no_grad()
    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: Tensor,
        *,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> ForwardOutput:
        """One pass with room of its own, as Decoder.forward."""
        batch = batch.to(self.device)
        rows = attention_rows(batch)
        buffers = self.allocate(batch.num_rows, rows.max_splits())
        shape = (batch.num_rows, len(hidden_layers), self.config.hidden_size)
        features = buffers.hidden.new_empty(shape) if hidden_layers else None
        self.run(
            batch.token_ids, rows, kv_cache, buffers, hidden_layers=hidden_layers, features=features, layers=layers
        )
        wanted = batch.logits_rows
        num_logits = len(wanted) if batch.wants_logits else 0
        logits = torch.empty(num_logits, self.config.vocab_size, dtype=torch.float32, device=self.device)
        if num_logits:
            self.write_logits(wanted, logits, buffers)
        tokens: list[int | None] | None = None
        if batch.draws is not None and len(wanted):
            draws = batch.draws
            noise = RowNoise(
                torch.from_numpy(draws.temperatures).to(self.device),
                torch.from_numpy(draws.seeds).to(self.device),
                torch.from_numpy(draws.positions).to(self.device),
            )
            self.write_tokens(wanted, noise, buffers)
            tokens = read_tokens(buffers.picked[:, : len(wanted)].cpu())
        return ForwardOutput(logits, features, tokens)


def attention_rows(batch: ForwardBatch) -> AttentionRows:
    return AttentionRows(
        positions=batch.positions,
        slots=batch.slot_mapping,
        context_lens=batch.context_lens,
        parents=batch.parents,
        is_node=batch.is_node.int(),  # as in static inputs, so that one compiled kernel serves both
        req_ids=batch.req_ids,
        block_tables=batch.block_tables,
        block_size=batch.block_size,
    )
