"""The fused decode kernels on a GPU: do they compute the right thing, the same bits at any batch size, and how fast.

    python benchmarks/gpu_kernels.py [--models 135m,1.5b] [--only parity,bits,graph,kinds,price] [--pdl off,on]
    python benchmarks/gpu_kernels.py --tiny --device cpu      # rehearsal in Triton's interpreter, without a GPU

Random weights of SmolLM2-135M's and Qwen2.5-1.5B's shape, context 320. Sections (each goes on when another fails):

- parity: the error of the fused pass and of models/decoder.py in bfloat16, both against float32
- bits: a row's logits at 1 to 512 rows, as tree nodes and as plain text, in graphs and with larger row tiles
- graph: one pass with the choice of tokens, captured in a CUDA graph, per (requests x rows of each)
- kinds: microseconds a kernel: each kind alone in a graph over all layers; "-kind" is a layer without that kind,
  so that `layer` less `-kind` is what the kind takes among the others
- price: what batch invariance costs: all products of a pass in our kernels beside cuBLAS, which may choose anew
  for every number of rows
- draft: a whole EAGLE-3 draft by batch and by kernel, and what the host spends on one
- wide: one pass of many rows by rows of a program, outputs and warps: time, and whether the bits stay (ask for it)
- tune: tiles per weight shape, and the steps of attention (long: ask for it)

The limit is weights and keys over the measured copy bandwidth. Prints tables, then one JSON line.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if "--tiny" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from gpu_kernels_draft import draft_figures, make_drafter
from gpu_kernels_setup import Clock, Room, capture, decode_pass, model_config, random_weights, read_bandwidth
from gpu_kernels_tune import kind_launches, tune_attention, tune_products
from torch import Tensor

from paceline.bench.run.provenance import provenance
from paceline.core.forward import ForwardBatch
from paceline.models.decoder import Decoder
from paceline.models.fused_cuts import Cuts, model_cuts
from paceline.models.fused_decoder import FusedDecoder, attention_rows
from paceline.ops.triton.fused_head import RowNoise
from paceline.ops.triton.product import NO_PDL, PDL, PDL_PREFETCH
from paceline.ops.triton.tiles import Cut

CONTEXT = 320
BUCKETS = [(1, 1), (1, 8), (1, 16), (1, 32), (8, 1), (8, 4), (32, 1), (32, 4), (128, 1), (128, 4)]
ROW_COUNTS = [1, 2, 4, 8, 16, 64, 128, 512]
PDL_LEVELS = {"off": NO_PDL, "on": PDL, "prefetch": PDL_PREFETCH}
SECTIONS = ["parity", "bits", "graph", "kinds", "price", "draft", "wide", "tune"]


def forced(rows: int, out: int | None = None, warps: int = 2) -> Callable[[Decoder, int, int], Cuts]:
    """Programs of so many rows in every product, with the outputs of its own tile unless said."""

    def cuts(base: Decoder, layer: int, num_rows: int) -> Cuts:
        own = model_cuts(base, layer, 1)
        tiles = [cut.tile for cut in (own.qkv, own.output, own.gate_up, own.down, own.head)]
        return Cuts(*(Cut(rows, replace(t, out=out or t.out, into=min(t.into, 64), warps=warps)) for t in tiles))

    return cuts


class Bench:
    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        self.device = torch.device(args.device)
        self.tiny = args.tiny
        self.dtype = torch.float32 if self.tiny else torch.bfloat16
        self.context = 20 if self.tiny else CONTEXT
        self.buckets = [(1, 1), (2, 3)] if self.tiny else BUCKETS
        self.row_counts = [1, 2, 17] if self.tiny else ROW_COUNTS
        self.config = model_config(name)
        self.weights = random_weights(self.config, self.device, self.dtype)
        self.base = Decoder(self.config, self.weights, dtype=self.dtype, device=self.device)
        most = max(max(n for n, _ in self.buckets), max(self.row_counts) // 4 + 1)
        self.room = Room.make(self.base, most, self.context + 64)
        self.clock = Clock(self.device)
        self.bandwidth = args.bandwidth

    def batch(self, num_requests: int, rows_each: int, **options: Any) -> ForwardBatch:
        return decode_pass(self.room, self.config.vocab_size, num_requests, rows_each, self.context, **options)

    # parity

    def parity(self) -> dict[str, Any]:
        batch = self.batch(2, 3) if self.tiny else self.batch(8, 4)
        wide = Decoder(self.config, self.weights, dtype=torch.float32, device=self.device)
        exact = wide.forward(batch, self.room.kv.float()).logits
        del wide
        result: dict[str, Any] = {"logits_std": exact.std().item()}
        candidates: list[tuple[str, Any]] = [("decoder", self.base), ("fused", FusedDecoder(self.base))]
        if self.device.type == "cuda":
            candidates.append(("fused pdl", FusedDecoder(self.base, pdl=PDL_LEVELS["prefetch"])))
        for label, decoder in candidates:
            error = (decoder.forward(batch, self.room.kv.clone()).logits - exact).abs()
            result[label] = {"max": error.max().item(), "mean": error.mean().item()}
            print(f"  {label:10} error: max {error.max():.4f}, mean {error.mean():.5f} (logits: std {exact.std():.3f})")
        fused = FusedDecoder(self.base)
        logits = fused.forward(batch, self.room.kv.clone()).logits
        result["tokens_are_argmax"] = self._tokens_agree(fused, batch, logits)
        print(f"  token kernel picks the argmax of the logits kernel (greedy, noisy): {result['tokens_are_argmax']}")
        return result

    def _tokens_agree(self, fused: FusedDecoder, batch: ForwardBatch, logits: Tensor) -> list[bool]:
        from paceline.ops.fused_reference import noisy_scores

        rows = attention_rows(batch)
        buffers = fused.allocate(batch.num_rows, rows.max_splits())
        noise = self._noise(batch, 0.8)
        fused.run(batch.token_ids, rows, self.room.kv.clone(), buffers)
        fused.write_tokens(batch.logits_rows, None, buffers)
        greedy = bool((buffers.tokens == logits.argmax(-1)).all())
        fused.write_tokens(batch.logits_rows, noise, buffers)
        scores = noisy_scores(logits, noise.temperatures, noise.seeds, noise.positions)
        return [greedy, bool((buffers.tokens == scores.argmax(-1)).all())]

    def _noise(self, batch: ForwardBatch, temperature: float) -> RowNoise:
        rows = torch.arange(batch.num_rows, device=self.device)
        return RowNoise((rows % 4 > 0).float() * temperature, rows * 12345 + 6, batch.positions + 1)

    # bits

    def bits(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        fused = FusedDecoder(self.base)
        largest = max(self.row_counts)
        whole_batch = self.batch(-(-largest // 4), 4)
        whole = fused.forward(whole_batch, self.room.kv.clone()).logits
        for rows in self.row_counts:
            each = min(rows, 4)
            found = fused.forward(self.batch(-(-rows // each), each), self.room.kv.clone()).logits
            # with fewer rows of each request they are the first ones of its chain
            picked = whole.view(-1, 4, whole.shape[-1])[: -(-rows // each), :each].reshape(-1, whole.shape[-1])
            result[f"rows {rows}"] = torch.equal(found, picked)
        chunk = fused.forward(self.batch(2, 4, as_chunk=True), self.room.kv.clone()).logits
        result["tree nodes as plain text"] = torch.equal(chunk, whole[: len(chunk)])
        for rows in [16, 32] if self.tiny else [16, 32, 64, 128]:
            wide = FusedDecoder(self.base, cuts=forced(rows))
            result[f"programs of {rows} rows"] = self._tried(partial(self._same_bits, wide, whole_batch, whole))
        if self.device.type == "cuda":
            for pdl in PDL_LEVELS:
                result[f"graph, pdl {pdl}"] = self._tried(partial(self._graph_bits, whole_batch, whole, pdl))
        for label, same in result.items():
            print(f"  {label:34} {'same bits' if same is True else same}")
        return result

    def _same_bits(self, fused: FusedDecoder, batch: ForwardBatch, expected: Tensor) -> bool | str:
        logits = fused.forward(batch, self.room.kv.clone()).logits
        different = (logits != expected).any(-1)
        return True if not different.any() else f"{int(different.sum())} of {len(logits)} rows differ"

    def _graph_bits(self, batch: ForwardBatch, expected: Tensor, pdl: str) -> bool:
        launch, logits = self._launch(
            FusedDecoder(self.base, pdl=PDL_LEVELS[pdl]), batch, self.room.kv.clone(), tokens=False
        )
        graph = capture(launch)
        same = True
        for _ in range(20):  # a race would show now and then
            logits.zero_()
            graph.replay()
            same = same and torch.equal(logits, expected)
        return same

    def _tried(self, check: Callable[[], Any]) -> Any:
        try:
            return check()
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"

    # graph

    def _launch(
        self, fused: FusedDecoder, batch: ForwardBatch, kv: Tensor, *, tokens: bool
    ) -> tuple[Callable[[], None], Tensor]:
        rows = attention_rows(batch)
        buffers = fused.allocate(batch.num_rows, rows.max_splits())
        logits = torch.empty(0 if tokens else batch.num_rows, self.config.vocab_size, device=self.device)
        noise = self._noise(batch, 0.0)

        def launch() -> None:
            fused.run(batch.token_ids, rows, kv, buffers)
            if tokens:
                fused.write_tokens(batch.logits_rows, noise, buffers)
            else:
                fused.write_logits(batch.logits_rows, logits, buffers)

        return launch, logits

    def limit_ms(self, num_requests: int, rows_each: int) -> float:
        config, size = self.config, self.dtype.itemsize
        products = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
        weights = config.num_layers * products + config.vocab_size * config.hidden_size
        keys = 2 * config.num_layers * num_requests * (self.context + rows_each) * config.kv_size
        return (weights + keys) * size / self.bandwidth * 1e3

    def graph(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        variants = [("pdl " + pdl, {"pdl": PDL_LEVELS[pdl]}) for pdl in self.args.pdl]
        print("  " + f"{'ms per replay':14}" + "".join(f"{label:>13}" for label, _ in variants) + f"{'limit':>13}")
        for bucket in self.buckets:
            batch, cells = self.batch(*bucket), {}
            for label, options in variants:
                try:
                    launch, _ = self._launch(FusedDecoder(self.base, **options), batch, self.room.kv, tokens=True)
                    cells[label] = self.clock.time_ms(launch)
                except Exception:
                    traceback.print_exc()
            cells["limit"] = self.limit_ms(*bucket)
            result["{}x{}".format(*bucket)] = cells
            figures = "".join(
                f"{cells.get(label, float('nan')):13.3f}" for label in [v for v, _ in variants] + ["limit"]
            )
            print(f"  {'{}x{}'.format(*bucket):14}{figures}", flush=True)
        return result

    # kinds

    def kinds(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        buckets = self.buckets if self.tiny else [(1, 1), (1, 16), (8, 4), (32, 4), (128, 1), (128, 4)]
        for pdl in self.args.pdl:
            for bucket in buckets:
                batch = self.batch(*bucket)
                fused = FusedDecoder(self.base, pdl=PDL_LEVELS[pdl])
                cells = {}
                for kind, (launch, count) in kind_launches(fused, batch, self.room.kv, self._noise(batch, 0.0)).items():
                    try:
                        cells[kind] = Clock(self.device, 20, 3).time_ms(launch) * 1e3 / count
                    except Exception:
                        traceback.print_exc()
                result["{}x{} pdl {}".format(*bucket, pdl)] = cells
                if len(result) == 1:
                    print("  " + f"{'us per kernel':20}" + "".join(f"{kind:>11}" for kind in cells))
                figures = "".join(f"{value:11.2f}" for value in cells.values())
                print(f"  {'{}x{} pdl {}'.format(*bucket, pdl):20}{figures}", flush=True)
        return result

    # price

    def price(self) -> dict[str, Any]:
        """The products alone: attention, RoPE and tokens are the same kernels on both sides, so they are left out."""
        result: dict[str, Any] = {}
        fused, layers, head = FusedDecoder(self.base), self.base.layers, self.base.head.weight
        print(f"  {'ms, all products':20}{'ours':>10}{'cuBLAS':>10}{'price':>10}")
        for num_rows in [1, 2] if self.tiny else [1, 8, 16, 32, 64, 128, 256, 512]:
            batch = self.batch(num_rows, 1) if self.tiny else self.batch(-(-num_rows // 4), min(4, num_rows))
            rows = attention_rows(batch)
            buffers = fused.allocate(batch.num_rows, rows.max_splits())

            def ours() -> None:
                for i in range(len(layers)):
                    fused.launch_qkv(i, rows, self.room.kv[i], buffers)  # noqa: B023
                    fused.launch_output(i, buffers)  # noqa: B023
                    fused.launch_gate_up(i, buffers)  # noqa: B023
                    fused.launch_down(i, buffers, None)  # noqa: B023
                fused.write_tokens(batch.logits_rows, None, buffers)  # noqa: B023

            def cublas() -> None:
                hidden, mixed = buffers.hidden, buffers.mixed.flatten(1)  # noqa: B023
                for layer in layers:
                    torch.mm(hidden, layer.qkv.weight.T)
                    torch.mm(mixed, layer.output.weight.T)
                    torch.mm(hidden, layer.gate_up.weight.T)
                    torch.mm(buffers.activation, layer.down.weight.T)  # noqa: B023
                torch.mm(hidden, head.T).argmax(-1)

            own, other = self.clock.time_ms(ours), self.clock.time_ms(cublas)
            result[str(batch.num_rows)] = {"ours_ms": own, "cublas_ms": other}
            print(f"  {batch.num_rows:>7} rows         {own:10.3f}{other:10.3f}{own / other:9.2f}x", flush=True)
        return result

    # draft

    def draft(self) -> dict[str, Any]:
        drafter = make_drafter(self.name, self.config, self.context, self.device, self.dtype)
        pdls = {label: PDL_LEVELS[label] for label in self.args.pdl}
        return draft_figures(drafter, Clock(self.device, 20, 3), pdls, self.bandwidth, self.tiny)

    # wide

    def wide(self) -> dict[str, Any]:
        """(rows of a program, outputs, warps) of all products at once; None: as the decoder chooses."""
        shapes = [None, (16, 32, 2), (32, 64, 2), (32, 64, 4), (32, 128, 4), (64, 32, 2), (64, 64, 2), (64, 128, 2)]
        result: dict[str, Any] = {}
        counts = [(2, 3)] if self.tiny else [(128, 1), (64, 4), (128, 4), (128, 8)]
        for bucket in counts:
            batch = self.batch(*bucket)
            expected = FusedDecoder(self.base, cuts=forced(16)).forward(batch, self.room.kv.clone()).logits
            for shape in shapes[:3] if self.tiny else shapes:
                fused = FusedDecoder(self.base) if shape is None else FusedDecoder(self.base, cuts=forced(*shape))
                cells: dict[str, Any] = {}
                try:
                    cells["same_bits"] = self._same_bits(fused, batch, expected)
                    launch, _ = self._launch(fused, batch, self.room.kv, tokens=True)
                    cells["ms"] = Clock(self.device, 20, 3).time_ms(launch)
                except Exception as error:
                    cells["error"] = f"{type(error).__name__}: {str(error)[:120]}"
                result[f"{batch.num_rows} rows, {shape}"] = cells
                print(f"  {batch.num_rows} rows, {shape!s:14} {cells}", flush=True)
        return result

    # tune

    def tune(self) -> dict[str, Any]:
        bucket_batches = {
            rows: self.batch(max(1, rows // 4), min(4, rows)) for rows in ((1, 8) if self.tiny else (1, 16, 512))
        }
        result = {"products": tune_products(self.base, self.clock, self.args.shapes, quick=self.tiny)}
        if not self.args.shapes:
            result["attention"] = tune_attention(self.base, bucket_batches, self.room.kv, self.clock, quick=self.tiny)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="135m,1.5b")
    parser.add_argument("--only", default="parity,bits,graph,kinds,draft", help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--tune", action="store_true", help="the section tune as well")
    parser.add_argument("--shapes", default="", help="tune: only these of qkv,output,gate_up,down,head")
    parser.add_argument("--pdl", default=",".join(PDL_LEVELS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", default="", help="a file for the JSON line as well")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in float32, for a rehearsal without a GPU")
    args = parser.parse_args()
    args.pdl = ["off"] if args.tiny else args.pdl.split(",")
    args.shapes = [shape for shape in args.shapes.split(",") if shape]
    sections = [*args.only.split(","), *(["tune"] if args.tune else [])]
    args.bandwidth = read_bandwidth(torch.device(args.device))
    print(f"copy bandwidth {args.bandwidth / 1e12:.2f} TB/s")
    record: dict[str, Any] = {"bandwidth": args.bandwidth}
    for model in ["tiny"] if args.tiny else args.models.split(","):
        bench = Bench(model, args)
        record[model] = {}
        for section in sections:
            print(f"{model}: {section}", flush=True)
            begin = time.perf_counter()
            try:
                record[model][section] = getattr(bench, section)()
            except Exception:
                traceback.print_exc()
            print(f"  ({time.perf_counter() - begin:.0f} s)", flush=True)
        del bench
        if args.device == "cuda":
            torch.cuda.empty_cache()
    line = json.dumps(record | {"provenance": provenance()})
    if args.json:
        Path(args.json).write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
