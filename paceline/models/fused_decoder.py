"""The decoder of models/decoder.py on the fused Triton kernels: five launches a layer, and bits that do not depend on
how many rows share the pass.

    fused = FusedDecoder(Decoder(config, weights, dtype=torch.bfloat16, device="cuda"))
    output = fused.forward(batch, kv_cache)  # as Decoder.forward

For a CUDA graph everything that a pass touches is given by the caller, so nothing is allocated or read on the host:

    buffers = fused.allocate(num_rows, max_splits=rows.max_splits())
    fused.run(token_ids, rows, kv_cache, buffers)
    fused.write_tokens(wanted, noise, buffers)  # or fused.write_logits(wanted, logits, buffers)
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.models.decoder import Decoder, Linear
from paceline.models.fused_cuts import SCALES_FROM, Cuts, model_cuts
from paceline.models.pass_buffers import PassBuffers
from paceline.models.static_inputs import aligned, read_tokens
from paceline.ops.packed import PackedWeight
from paceline.ops.triton.embed import DrawnBefore, embed_rows
from paceline.ops.triton.fused_head import RowNoise, head_logits, head_tiles, head_tokens
from paceline.ops.triton.fused_linear import linear_residual, num_squares, split_sizes
from paceline.ops.triton.fused_mlp import norm_gate_up_silu
from paceline.ops.triton.fused_qkv import Heads, norm_qkv_rope
from paceline.ops.triton.norm_rows import norm_wanted, scale_rows
from paceline.ops.triton.product import NO_PDL
from paceline.ops.triton.rms_norm import rms_norm
from paceline.ops.triton.split_attention import AttentionRows, AttentionScratch, split_tree_attention
from paceline.ops.triton.tiles import ROW_STEPS, Cut


class FusedDecoder:
    batch_invariant = True
    draws_tokens = True
    num_threads = None  # a GPU's
    handle = None  # nothing native

    def __init__(
        self, base: Decoder, *, pdl: int = NO_PDL, cuts: Callable[[Decoder, int, int], Cuts] = model_cuts
    ) -> None:
        """`base`: its norms are folded. `pdl`: programmatic dependent launch, see ops/triton/product.py."""
        base.fold_norms()
        config = base.config
        self.base, self.config, self.device = base, config, base.device
        self.dtype, self.hidden_dtype = base.dtype, base.hidden_dtype
        self.pdl, self._choose_cuts = pdl, cuts
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self._cuts: dict[tuple[int, int], Cuts] = {}
        self._scratch: AttentionScratch | None = None
        self._has_packed = any(
            isinstance(linear.weight, PackedWeight) for layer in base.layers for linear in (layer.qkv, layer.gate_up)
        )
        self._head_norms = [
            torch.stack([layer.q_norm, layer.k_norm]) if layer.q_norm is not None and layer.k_norm is not None else None
            for layer in base.layers
        ]

    def cuts(self, layer: int, num_rows: int) -> Cuts:
        if (layer, num_rows) not in self._cuts:
            self._cuts[layer, num_rows] = self._choose_cuts(self.base, layer, num_rows)
        return self._cuts[layer, num_rows]

    def _head_cut(self, num_rows: int) -> Cut:
        return self.cuts(0, num_rows).head

    def vocabulary_rows(self, ids: Tensor, *, head: bool = False) -> Tensor:
        return self.base.vocabulary_rows(ids, head=head)

    def allocate(self, num_rows: int, max_splits: int, picked: Tensor | None = None) -> PassBuffers:
        """Room for a pass of `num_rows` rows over contexts of up to `max_splits` (AttentionRows.max_splits).

        `picked`: where its tokens go; None: to room of its own."""
        config, device, dtype = self.config, self.device, self.hidden_dtype
        heads, cuts = self.heads, [self.cuts(i, num_rows) for i in range(config.num_layers)]
        added = {cut.tile for own in cuts for cut in (own.output, own.down)}
        splits = [split_sizes(num_rows, config.hidden_size, tile) for tile in added]
        # Fewer rows may be wanted, and fewer rows may have smaller programs.
        counts = [num_rows, *(rows for rows in ROW_STEPS if rows < num_rows)]
        shares = max(head_tiles(config.vocab_size, self._head_cut(count).tile) for count in counts)
        if picked is None:
            picked = torch.empty(2, aligned(num_rows), dtype=torch.int32, device=device)

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return PassBuffers(
            hidden=empty(num_rows, config.hidden_size),
            query=empty(num_rows, heads.num_q, heads.dim),
            mixed=empty(num_rows, heads.num_q, heads.dim),
            activation=empty(num_rows, config.intermediate_size),
            scales=empty(num_rows, dtype=torch.float32),
            squares=empty(num_rows, num_squares(config.hidden_size), dtype=torch.float32),
            normed=empty(num_rows, config.hidden_size),
            gained=empty(num_rows if self._has_packed else 0, config.hidden_size),
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
            num_rows,
            heads.num_q,
            heads.num_kv,
            heads.dim,
            self.hidden_dtype,
            max_splits,
            self.device,
            earlier=self._scratch,
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
        order = sorted(active)
        if order and (gains := self._gains_of_qkv(order[0])) is not None:
            torch.mul(hidden, gains, out=buffers.gained)
        following = dict(pairwise(order))
        for i in range(self.config.num_layers):
            self._keep(i, hidden, hidden_layers, features)
            if i in active:
                self._run_layer(i, rows, kv_cache[i], buffers, is_first=i == order[0], following=following.get(i))
        last = self.config.num_layers
        self._keep(last, hidden, hidden_layers, features)
        if last + 1 in hidden_layers:
            normed = rms_norm(hidden, self.base.final_norm, self.config.rms_norm_eps)
            self._keep(last + 1, normed, hidden_layers, features)

    def _run_layer(
        self,
        i: int,
        rows: AttentionRows,
        kv_layer: Tensor,
        buffers: PassBuffers,
        *,
        is_first: bool,
        following: int | None,
    ) -> None:
        self.launch_qkv(i, rows, kv_layer, buffers, is_first=is_first)
        self.launch_attention(i, rows, kv_layer, buffers)
        self.launch_output(i, buffers)
        self.launch_gate_up(i, buffers)
        self.launch_down(i, buffers, following)

    def _gains_of_qkv(self, i: int) -> Tensor | None:
        """Of the norm before a weight that cannot take them in."""
        layer = self.base.layers[i]
        return layer.input_norm if isinstance(layer.qkv.weight, PackedWeight) else None

    def _gains_of_mlp(self, i: int) -> Tensor | None:
        layer = self.base.layers[i]
        return layer.mlp_norm if isinstance(layer.gate_up.weight, PackedWeight) else None

    def launch_qkv(
        self, i: int, rows: AttentionRows, kv_layer: Tensor, buffers: PassBuffers, *, is_first: bool = False
    ) -> None:
        """`is_first`: no layer has written the stream and its squares, so its norm's scales are found here."""
        base, layer, cut = self.base, self.base.layers[i], self.cuts(i, buffers.hidden.shape[0]).qkv
        x = buffers.hidden if self._gains_of_qkv(i) is None else buffers.gained
        norm_qkv_rope(
            x, buffers.hidden, layer.qkv.weight, layer.qkv.bias, self._head_norms[i], base.cos, base.sin,
            rows.positions, rows.slots, buffers.query, kv_layer, self.heads, self.config.rms_norm_eps, cut.tile,
            scales=self._scales(cut, buffers) if is_first else None, squares=None if is_first else buffers.squares,
            pdl=self.pdl, row_tile=cut.rows,
        )  # fmt: skip

    def _scales(self, cut: Cut, buffers: PassBuffers) -> Tensor | None:
        """Of the rows' norms, where a product does not find them itself."""
        if cut.rows < SCALES_FROM:
            return None
        scale_rows(buffers.hidden, buffers.scales, self.config.rms_norm_eps, pdl=self.pdl)
        return buffers.scales

    def launch_attention(self, i: int, rows: AttentionRows, kv_layer: Tensor, buffers: PassBuffers) -> None:
        window, scale = self.config.window(i), self.config.head_dim**-0.5
        split_tree_attention(
            buffers.query, kv_layer, buffers.mixed, rows, buffers.attention, window, scale, pdl=self.pdl
        )

    def launch_output(self, i: int, buffers: PassBuffers) -> None:
        cut = self.cuts(i, buffers.hidden.shape[0]).output
        self._add(buffers.mixed.flatten(1), self.base.layers[i].output, cut, buffers, self._gains_of_mlp(i))

    def launch_gate_up(self, i: int, buffers: PassBuffers) -> None:
        gate_up, cut = self.base.layers[i].gate_up, self.cuts(i, buffers.hidden.shape[0]).gate_up
        x = buffers.hidden if self._gains_of_mlp(i) is None else buffers.gained
        norm_gate_up_silu(
            x, buffers.hidden, gate_up.weight, gate_up.bias, buffers.activation, self.config.rms_norm_eps,
            cut.tile, squares=buffers.squares, pdl=self.pdl, row_tile=cut.rows,
        )  # fmt: skip

    def launch_down(self, i: int, buffers: PassBuffers, following: int | None) -> None:
        """`following`: the layer that runs after this one"""
        cut = self.cuts(i, buffers.hidden.shape[0]).down
        gains = None if following is None else self._gains_of_qkv(following)
        self._add(buffers.activation, self.base.layers[i].down, cut, buffers, gains)

    def _add(self, x: Tensor, linear: Linear, cut: Cut, buffers: PassBuffers, gains: Tensor | None) -> None:
        linear_residual(
            x, linear.weight, linear.bias, buffers.hidden, buffers.parts, buffers.arrivals, cut.tile,
            gains=gains, gained=buffers.gained, squares=buffers.squares, pdl=self.pdl, row_tile=cut.rows,
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
        cut, normed = self._head_cut(len(wanted)), self._normed(wanted, buffers, count)
        head_logits(normed, self.base.head.weight, logits, cut.tile, count=count, pdl=self.pdl, row_tile=cut.rows)

    def write_tokens(
        self, wanted: Tensor, noise: RowNoise | None, buffers: PassBuffers, *, count: Tensor | None = None
    ) -> None:
        """`buffers.tokens[: len(wanted)]`: the token of each of these rows, or of the first `count`, after `run`,
        without logits in memory."""
        cut, normed = self._head_cut(len(wanted)), self._normed(wanted, buffers, count)
        head_tokens(
            normed, self.base.head.weight, buffers.scores, buffers.score_ids, buffers.tokens, buffers.token_scores,
            noise, cut.tile, count=count, pdl=self.pdl, row_tile=cut.rows,
        )  # fmt: skip

    def _normed(self, wanted: Tensor, buffers: PassBuffers, count: Tensor | None) -> Tensor:
        """What the head reads of these rows."""
        normed = buffers.normed[: len(wanted)]
        norm_wanted(
            buffers.hidden, wanted, self.base.final_norm, normed, self.config.rms_norm_eps, count=count, pdl=self.pdl
        )
        return normed

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
