"""Captured passes over weights of 16, 8 and 4 bits on a GPU: times beside the limit, errors, and bits over rows.

    python benchmarks/gpu_quantization.py [--models 1.5b,135m] [--formats bf16,fp8,...] [--sections bits,times,...]
    python benchmarks/gpu_quantization.py --tiny --device cpu      # rehearsal in Triton's interpreter, without a GPU

Random weights of a model's shape, context 320. Sections:

- bits: a row's logits at 1, 8, 32 and 128 rows, and with programs of many rows; and the error of the logits against
  the dequantized weights computed in float32, beside that of the same weights widened to bfloat16
- times: ms of one pass with the choice of tokens, as a CUDA graph, by rows, as a ratio to bf16, beside the limit
  (weights and keys over the measured bandwidth)
- kinds: microseconds a kernel at 1 and 128 rows
- tune: tiles by weight shape and format (ask for it); prints lines for ops/triton/tiles.py

Prints tables, then one JSON line.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

if "--tiny" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from gpu_kernels_setup import Clock, Room, decode_pass, model_config, random_weights, read_bandwidth
from gpu_kernels_tune import kind_launches
from gpu_quantization_formats import FORMATS, in_format
from gpu_quantization_tune import tune_formats
from torch import Tensor

from paceline.bench.run.provenance import provenance
from paceline.core.weights import QuantizedTensor
from paceline.models.decoder import Decoder
from paceline.models.dequantize import dequantize
from paceline.models.fused_cuts import Cuts, model_cuts
from paceline.models.fused_decoder import FusedDecoder, attention_rows
from paceline.ops.triton.fused_head import RowNoise
from paceline.ops.triton.tiles import Cut

CONTEXT, ROW_COUNTS = 320, (1, 8, 32, 128)


def with_rows(rows: int) -> Callable[[Decoder, int, int], Cuts]:
    """Programs of so many rows in every product."""

    def cuts(base: Decoder, layer: int, num_rows: int) -> Cuts:
        own = model_cuts(base, layer, 1)
        tiles = (cut.tile for cut in (own.qkv, own.output, own.gate_up, own.down, own.head))
        return Cuts(*(Cut(rows, replace(tile, warps=2, stages=min(tile.stages, 3))) for tile in tiles))

    return cuts


class Bench:
    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args, self.tiny = name, args, args.tiny
        self.device = torch.device(args.device)
        self.dtype = torch.float32 if self.tiny else torch.bfloat16
        self.context = 20 if self.tiny else CONTEXT
        self.row_counts = (1, 2, 17) if self.tiny else ROW_COUNTS
        self.config = model_config(name)
        self.weights = random_weights(self.config, self.device, self.dtype)
        plain = Decoder(self.config, self.weights, dtype=self.dtype, device=self.device)
        self.room = Room.make(plain, max(self.row_counts), self.context + 16)
        self.decoders = {"bf16": plain}
        self.clock = Clock(self.device, 30, 5)

    def decoder(self, form: str) -> Decoder:
        if form not in self.decoders:
            stored = in_format(self.weights, form, is_tiny=self.tiny)
            self.decoders[form] = Decoder(self.config, stored, dtype=self.dtype, device=self.device, packs=True)
        return self.decoders[form]

    def launch(self, fused: FusedDecoder, num_rows: int) -> Callable[[], None]:
        batch = decode_pass(self.room, self.config.vocab_size, num_rows, 1, self.context)
        rows = attention_rows(batch)
        buffers = fused.allocate(num_rows, rows.max_splits())
        noise = self.noise(num_rows)

        def run() -> None:
            fused.run(batch.token_ids, rows, self.room.kv, buffers)
            fused.write_tokens(batch.logits_rows, noise, buffers)

        return run

    def noise(self, num_rows: int) -> RowNoise:
        rows = torch.arange(num_rows, device=self.device)
        return RowNoise(torch.zeros(num_rows, device=self.device), rows * 12345 + 6, rows.int())

    def logits(self, decoder: Decoder | FusedDecoder, num_rows: int, kv: Tensor) -> Tensor:
        batch = decode_pass(self.room, self.config.vocab_size, num_rows, 1, self.context)
        return decoder.forward(batch, kv).logits

    def bits(self, form: str) -> dict[str, Any]:
        fused = FusedDecoder(self.decoder(form))
        whole = self.logits(fused, max(self.row_counts), self.room.kv.clone())
        result: dict[str, Any] = {}
        for count in self.row_counts:
            result[f"rows {count}"] = torch.equal(self.logits(fused, count, self.room.kv.clone()), whole[:count])
        for rows in (16, 32) if self.tiny else (16, 64):
            forced = FusedDecoder(self.decoder(form), cuts=with_rows(rows))
            found = self.logits(forced, max(self.row_counts), self.room.kv.clone())
            result[f"programs of {rows} rows"] = torch.equal(found, whole)
        result["error"] = self.error(form, whole[:8])
        same = [name for name, value in result.items() if value is True]
        other = [name for name, value in result.items() if value is False]
        print(f"  {form:10} same bits: {', '.join(same)}; other bits: {', '.join(other) or 'none'}")
        print(f"  {'':10} {result['error']}", flush=True)
        return result

    def error(self, form: str, found: Tensor) -> dict[str, float]:
        """Against the dequantized weights in float32: of these logits, and of the weights widened to the dtype."""
        stored = in_format(self.weights, form, is_tiny=self.tiny)
        wide = {name: self.wide(stored.pop(name)) for name in list(stored)}
        exact = Decoder(self.config, wide, device=self.device)
        expected = self.logits(exact, len(found), self.room.kv.float())
        del exact
        half = FusedDecoder(Decoder(self.config, wide, dtype=self.dtype, device=self.device))
        widened = self.logits(half, len(found), self.room.kv.clone())
        return {
            "logits_std": expected.std().item(),
            "mean_error": (found - expected).abs().mean().item(),
            "mean_error_widened": (widened - expected).abs().mean().item(),
            "max_error": (found - expected).abs().max().item(),
            "max_error_widened": (widened - expected).abs().max().item(),
        }

    def wide(self, weight: Tensor | QuantizedTensor) -> Tensor:
        return dequantize(weight).to(self.device) if isinstance(weight, QuantizedTensor) else weight.float()

    def times(self, form: str) -> dict[str, Any]:
        fused, cells = FusedDecoder(self.decoder(form)), {}
        for count in self.row_counts:
            cells[str(count)] = self.clock.time_ms(self.launch(fused, count))
        cells["limit"] = self.limit_ms(form)
        return cells

    def limit_ms(self, form: str) -> float:
        """At one row."""
        decoder, config = self.decoder(form), self.config
        keys = 2 * config.num_layers * self.context * config.kv_size * self.dtype.itemsize
        return (decoder.weight_bytes + keys) / self.args.bandwidth * 1e3

    def print_times(self, results: dict[str, dict[str, float]]) -> None:
        print(
            "  " + f"{'ms per pass':12}" + "".join(f"{count:>18}" for count in self.row_counts) + f"{'limit at 1':>12}"
        )
        for form, cells in results.items():
            texts = []
            for count in self.row_counts:
                ratio = results.get("bf16", cells)[str(count)] / cells[str(count)]
                texts.append(f"{cells[str(count)]:9.3f} ({ratio:4.2f}x)")
            print(f"  {form:12}" + "".join(f"{text:>18}" for text in texts) + f"{cells['limit']:12.3f}", flush=True)

    def kinds(self, form: str) -> dict[str, Any]:
        fused, result = FusedDecoder(self.decoder(form)), {}
        for count in (self.row_counts[0], self.row_counts[-1]):
            batch = decode_pass(self.room, self.config.vocab_size, count, 1, self.context)
            launches = kind_launches(fused, batch, self.room.kv, self.noise(count))
            wanted = {kind: launches[kind] for kind in launches if not kind.startswith("-")}
            clock = Clock(self.device, 10, 3)
            cells = {kind: clock.time_ms(launch) * 1e3 / number for kind, (launch, number) in wanted.items()}
            result[str(count)] = cells
            figures = "".join(f" {kind} {value:.1f}" for kind, value in cells.items())
            print(f"  {form:10} us at {count:3} rows:{figures}", flush=True)
        return result


def run(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for section in args.sections:
        print(f"{bench.name}: {section}", flush=True)
        begin, found = time.perf_counter(), {}
        if section == "tune":
            found = tune_formats(bench.decoder, args.formats, args.shapes, quick=args.tiny)
        else:
            for form in args.formats:
                try:
                    found[form] = getattr(bench, section)(form)
                except Exception:
                    traceback.print_exc()
        if section == "times":
            bench.print_times(found)
        record[section] = found
        print(f"  ({time.perf_counter() - begin:.0f} s)", flush=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1.5b")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--sections", default="bits,times,kinds")
    parser.add_argument("--shapes", default="", help="tune: only these of qkv,output,gate_up,down,head")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", default="", help="a file for the JSON line as well")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in float32, for a rehearsal without a GPU")
    args = parser.parse_args()
    args.formats, args.sections = args.formats.split(","), args.sections.split(",")
    args.shapes = [shape for shape in args.shapes.split(",") if shape]
    args.bandwidth = read_bandwidth(torch.device(args.device))
    print(f"copy bandwidth {args.bandwidth / 1e12:.2f} TB/s")
    record: dict[str, Any] = {"bandwidth": args.bandwidth}
    for model in ["tiny"] if args.tiny else args.models.split(","):
        record[model] = run(Bench(model, args), args)
    line = json.dumps(record | {"provenance": provenance()})
    if args.json:
        Path(args.json).write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
