"""Attention over the paged cache on a GPU: prompts and decoding, time a layer beside the limits, and bits.

    python benchmarks/gpu_attention.py [--models 135m,1.5b] [--sweep] [--json FILE]
    python benchmarks/gpu_attention.py --float8        # decoding with keys and values in FP8 beside bfloat16, and bits
    python benchmarks/gpu_attention.py --rehearse      # tiny, in Triton's interpreter, without a GPU

Random keys and values of SmolLM2-135M's (and Qwen2.5-1.5B's) shape; no model file. Columns, in microseconds a layer:

- now: as the engine cuts the pass into programs
- rows: row by row, one program each, so that every row of a prompt reads all of its keys itself
- limit: the larger of bytes (every key once a request) over the measured copy bandwidth, and operations over PEAK_FLOPS

`bits` compares rows of a prompt in blocks with the same rows one by one, as tree nodes, in other chunks and with other
numbers of programs. `--sweep` tries other shapes of blocks and numbers of programs. Prints tables, then one JSON line.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

if "--rehearse" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from gpu_kernels_setup import BLOCK_SIZE, SHAPES, Clock, read_bandwidth
from torch import Tensor

from paceline.bench.run.provenance import provenance
from paceline.core.kv_tensor import FLOAT8, as_float8, raw
from paceline.ops.triton.split_attention import (
    AttentionRows,
    AttentionScratch,
    Programs,
    block_shape,
    programs_for,
    row_warps,
    split_tree_attention,
)

PEAK_FLOPS = 989e12  # of an H200 in bfloat16, as NVIDIA gives it
CACHE_BYTES = 100 << 20  # keys that all layers together must exceed, so that none is found in the L2 cache
CHUNKS = [(rows, at) for at in (0, 1024, 7168) for rows in (128, 512, 1024, 2048)]
DECODES = [(rows, context) for context in (320, 2048, 8192) for rows in (1, 8, 32, 128)]
SWEPT_CHUNKS = [(128, 0), (128, 7168), (1024, 0), (1024, 7168), (2048, 7168)]
SWEPT_DECODES = [(1, 320), (8, 320), (32, 320), (128, 320), (1, 8192), (32, 8192)]


@dataclass(frozen=True)
class Part:
    """Rows of one request: tokens [begin, begin + count), of which all but the first are tree nodes if `nodes`."""

    begin: int
    count: int
    nodes: bool = False


@dataclass(frozen=True)
class Case:
    rows: AttentionRows
    query: Tensor
    kv: Tensor  # [layers, 2, slots, kv heads, dim]
    limit_us: float


class Bench:
    def __init__(self, name: str, device: torch.device, bandwidth: float, *, tiny: bool, float8: bool = False) -> None:
        _, _, self.layers, self.heads, self.kv_heads, self.dim, _, _ = SHAPES[name]
        self.device, self.bandwidth, self.tiny = device, bandwidth, tiny
        self.dtype = torch.float32 if tiny else torch.bfloat16
        self.kv_dtype = FLOAT8 if float8 else self.dtype
        self.clock = Clock(device, replays=10, rounds=3)

    def case(self, parts: list[Part], *, one_layer: bool = False) -> Case:
        """Keys are noise, the same for a request in every case of one layer; tables are in a scrambled order."""
        width = max(-(-(part.begin + part.count) // BLOCK_SIZE) for part in parts)
        order = torch.randperm(len(parts) * width, generator=torch.Generator().manual_seed(1)).view(len(parts), width)
        columns: list[list[int]] = [[] for _ in range(6)]
        for request, part in enumerate(parts):
            top = len(columns[0])
            for i in range(part.count):
                at, node = part.begin + i, part.nodes and i > 0
                slot = int(order[request, at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE
                parent = top + i - 1 if node and i > 1 else -1
                row = (at, slot, part.begin + 1 if node else at + 1, parent, int(node), request)
                for column, value in zip(columns, row, strict=True):
                    column.append(value)
        ints = [torch.tensor(column, dtype=torch.int32, device=self.device) for column in columns]
        rows = AttentionRows(*ints, block_tables=order.int().to(self.device), block_size=BLOCK_SIZE)
        slots = len(parts) * width * BLOCK_SIZE
        layer_bytes = 2 * slots * self.kv_heads * self.dim * self.kv_dtype.itemsize
        layers = 1 if self.tiny or one_layer else min(self.layers, -(-CACHE_BYTES // layer_bytes))
        generator = torch.Generator(device=self.device).manual_seed(2)
        kv = torch.empty(layers, 2, slots, self.kv_heads, self.dim, dtype=self.kv_dtype, device=self.device)
        for layer in raw(kv):
            made = torch.randn(layer.shape, generator=generator, device=self.device)
            layer.copy_(raw(as_float8(made)) if self.kv_dtype == FLOAT8 else made)
        query = torch.randn(len(columns[0]), self.heads, self.dim, generator=generator, device=self.device)
        return Case(rows, query.to(self.dtype), kv, self.limit_us(parts))

    def limit_us(self, parts: list[Part]) -> float:
        keys, pairs = 0, 0  # read once a request; pairs of a row and a key
        for part in parts:
            keys += part.begin + part.count
            pairs += part.count * part.begin + part.count * (part.count + 1) // 2
        rows = sum(part.count for part in parts)
        size = self.dtype.itemsize
        moved = 2 * keys * self.kv_heads * self.dim * self.kv_dtype.itemsize + 2 * rows * self.heads * self.dim * size
        return max(moved / self.bandwidth, 4 * pairs * self.heads * self.dim / PEAK_FLOPS) * 1e6

    def programs(self, case: Case) -> Programs:
        return programs_for(
            len(case.query), self.heads, self.kv_heads, self.dim, self.dtype, case.rows.max_splits()
        )  # fmt: skip

    def rows_only(self, parts: int = 1) -> Programs:
        return Programs(parts, 1, 16, 1, row_warps(self.heads, self.kv_heads))

    def launcher(self, case: Case, programs: Programs) -> tuple[Callable[[], None], Tensor]:
        rows = len(case.query) if programs.leaves_parts else 0
        size = max(1, rows * self.heads * case.rows.max_splits())
        scratch = AttentionScratch(
            best=torch.empty(size, device=self.device),
            total=torch.empty(size, device=self.device),
            mixed=torch.empty(size * self.dim, device=self.device),
            arrivals=torch.zeros(max(1, rows * self.kv_heads), dtype=torch.int32, device=self.device),
        )
        out = torch.empty_like(case.query)

        def launch() -> None:
            for layer in case.kv:
                split_tree_attention(
                    case.query, layer, out, case.rows, scratch, None, self.dim**-0.5, programs=programs
                )  # fmt: skip

        return launch, out

    def time_us(self, case: Case, programs: Programs) -> float:
        launch, _ = self.launcher(case, programs)
        return self.clock.time_ms(launch) * 1e3 / len(case.kv)

    def outputs(self, case: Case, programs: Programs) -> Tensor:
        launch, out = self.launcher(case, programs)
        launch()
        return out

    # times

    def table(self, cases: dict[str, list[Part]]) -> dict[str, Any]:
        print(f"  {'us a layer':28}{'now':>9}{'rows':>9}{'limit':>9}{'share':>8}   programs")
        result: dict[str, Any] = {}
        for name, parts in cases.items():
            case = self.case(parts)
            cut = self.programs(case)
            cells = {
                "now": self.time_us(case, cut),
                "rows": self.time_us(case, self.rows_only()),
                "limit": case.limit_us,
            }
            cells["share"] = cells["limit"] / cells["now"]
            result[name] = cells | {"programs": str(cut)}
            figures = "".join(f"{cells[key]:9.1f}" for key in ("now", "rows", "limit"))
            blocks = f", blocks of {cut.block_rows} x {cut.block_parts}" if cut.block_rows > 1 else ""
            print(f"  {name:28}{figures}{cells['share']:8.1%}   {cut.parts} a row{blocks}", flush=True)
        return result

    def times(self) -> dict[str, Any]:
        chunks, decodes = (CHUNKS, DECODES) if not self.tiny else ([(5, 0), (33, 7)], [(1, 30), (2, 70)])
        cases = {f"{rows} prompt rows at {at}": [Part(at, rows)] for rows, at in chunks}
        cases |= {f"{rows} decoding at {context}": [Part(context - 1, 1)] * rows for rows, context in decodes}
        if not self.tiny:
            cases["896 at 1024, 128 decoding"] = [Part(1024, 896), *[Part(319, 1)] * 128]
        return self.table(cases)

    def beside_float8(self, other: "Bench") -> dict[str, Any]:
        """Decoding, with keys and values in this bench's type and in FP8."""
        print(f"  {'us a layer':28}{'bfloat16':>9}{'fp8':>9}{'ratio':>8}{'limits':>18}{'share':>8}")
        result: dict[str, Any] = {}
        for rows, context in DECODES if not self.tiny else [(1, 30), (2, 70)]:
            cells: dict[str, float] = {}
            for name, bench in (("bfloat16", self), ("fp8", other)):
                case = bench.case([Part(context - 1, 1)] * rows)
                cells |= {name: bench.time_us(case, bench.programs(case)), f"{name}_limit": case.limit_us}
                del case
            cells["ratio"] = cells["bfloat16"] / cells["fp8"]
            share = cells["fp8_limit"] / cells["fp8"]
            result[f"{rows} decoding at {context}"] = cells
            limits = f"{cells['bfloat16_limit']:.1f} / {cells['fp8_limit']:.1f}"
            print(
                f"  {f'{rows} decoding at {context}':28}{cells['bfloat16']:9.1f}{cells['fp8']:9.1f}"
                f"{cells['ratio']:7.2f}x{limits:>18}{share:8.1%}",
                flush=True,
            )
        return result

    # bits

    def bits(self) -> dict[str, bool]:
        """Rows [begin, begin + count) of one request in every way in which they can be computed."""
        begin, count, alone_at = (17, 6, 3) if self.tiny else (1000, 300, 177)
        whole_case = self.case([Part(begin, count)], one_layer=True)
        rows, lines, warps = block_shape(self.heads, self.kv_heads, self.dim, self.dtype)
        blocks = Programs(1, rows, lines, 1, warps)
        whole = self.outputs(whole_case, blocks)

        def same(case: Case, first: int, programs: Programs | None) -> bool:
            """A case whose rows are those from `first` on, over the keys of the whole one."""
            num_rows = len(case.query)
            query = whole_case.query[first : first + num_rows].contiguous()
            moved = replace(case, query=query, kv=whole_case.kv, rows=replace(case.rows, block_tables=tables))
            cut = self.programs(moved) if programs is None else programs
            found = [self.outputs(moved, cut) for _ in range(1 if self.tiny else 20)]  # a race would show now and then
            return all(torch.equal(out, whole[first : first + num_rows]) for out in found)

        tables = whole_case.rows.block_tables
        middle = count // 2 + 1
        result = {
            "as the engine cuts it": same(whole_case, 0, None),
            "8 programs a block": same(whole_case, 0, replace(blocks, block_parts=8)),
            "row by row": same(whole_case, 0, self.rows_only()),
            "row by row, 4 programs each": same(whole_case, 0, self.rows_only(4)),
            "second half, other blocks": same(self._part(whole_case, middle, count), middle, blocks),
            "one row alone": same(self._part(whole_case, alone_at, alone_at + 1), alone_at, None),
            "tree nodes": same(self._nodes(whole_case), 0, None),
        }
        for label, equal in result.items():
            print(f"  {label:32} {'same bits' if equal else 'OTHER BITS'}")
        return result

    def _part(self, case: Case, first: int, end: int) -> Case:
        rows = case.rows
        cut = {
            name: value[first:end].contiguous()
            for name, value in (
                ("positions", rows.positions),
                ("slots", rows.slots),
                ("context_lens", rows.context_lens),
                ("parents", rows.parents),
                ("is_node", rows.is_node),
                ("req_ids", rows.req_ids),
            )
        }
        return replace(case, rows=replace(rows, **cut), query=case.query[first:end].contiguous())

    def _nodes(self, case: Case) -> Case:
        """All rows but the first as a chain of draft nodes behind it."""
        rows, count = case.rows, len(case.query)
        place = torch.arange(count, dtype=torch.int32, device=self.device)
        context = rows.context_lens[:1].expand(count).contiguous()
        parents = torch.where(place > 1, place - 1, torch.full_like(place, -1))
        return replace(case, rows=replace(rows, context_lens=context, parents=parents, is_node=(place > 0).int()))

    # sweep

    def sweep(self) -> dict[str, Any]:
        group = self.heads // self.kv_heads
        result: dict[str, Any] = {}
        for rows, at in SWEPT_CHUNKS if not self.tiny else [(9, 20)]:
            case = self.case([Part(at, rows)])
            for lines, warps in ((16, 2), (16, 4), (32, 2), (32, 4), (64, 2)) if not self.tiny else ((16, 2),):
                for parts in (1, 2, 4, 8):
                    cut = Programs(1, max(1, lines // group), lines, parts, warps)
                    self._try(
                        f"{rows} prompt rows at {at}: {lines} lines, {warps} warps, {parts} a block", case, cut, result
                    )
        for rows, context in SWEPT_DECODES if not self.tiny else [(2, 20)]:
            case = self.case([Part(context - 1, 1)] * rows)
            for warps in (2, 4):
                for parts in (1, 2, 4, 8, 16):
                    cut = replace(self.rows_only(parts), warps=warps)
                    self._try(f"{rows} decoding at {context}: {warps} warps, {parts} a row", case, cut, result)
        return result

    def _try(self, name: str, case: Case, cut: Programs, result: dict[str, Any]) -> None:
        try:
            result[name] = self.time_us(case, cut)
            print(f"  {name:60}{result[name]:9.1f} us", flush=True)
        except Exception as error:
            print(f"  {name}: {type(error).__name__} {str(error)[:120]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="135m", help="of 135m,1.5b")
    parser.add_argument("--sweep", action="store_true", help="other shapes of blocks, other numbers of programs")
    parser.add_argument("--float8", action="store_true", help="only this: FP8 keys and values beside bfloat16")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes in Triton's interpreter, on a CPU")
    parser.add_argument("--json", default="", help="a file for the JSON line as well")
    args = parser.parse_args()
    device = torch.device("cpu" if args.rehearse else "cuda")
    bandwidth = read_bandwidth(device)
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    record: dict[str, Any] = {"bandwidth": bandwidth, "peak_flops": PEAK_FLOPS}
    for model in ["tiny"] if args.rehearse else args.models.split(","):
        bench, record[model] = Bench(model, device, bandwidth, tiny=args.rehearse), {}
        sections = {"bits": bench.bits, "times": bench.times} | ({"sweep": bench.sweep} if args.sweep else {})
        if args.float8:
            float8 = Bench(model, device, bandwidth, tiny=args.rehearse, float8=True)
            sections = {"fp8 bits": float8.bits, "fp8 times": partial(bench.beside_float8, float8)}
        for name, section in sections.items():
            print(f"{model}: {name}", flush=True)
            begin = time.perf_counter()
            record[model][name] = section()
            print(f"  ({time.perf_counter() - begin:.0f} s)", flush=True)
    line = json.dumps(record | {"provenance": provenance()})
    if args.json:
        Path(args.json).write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
