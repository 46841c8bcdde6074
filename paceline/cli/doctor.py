"""`paceline doctor`: what this machine has, which kernels run, and what a pass of 1, 2, 4, ... 64 rows costs.

Speculation pays when checking several tokens costs hardly more than computing one, so the table to look at is the last:
the time of a pass by its number of rows, beside the time that reading the weights once takes at this machine's
measured memory bandwidth. The first row should be near that limit, and the next ones near the first.
"""

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

from paceline.cli.options import add_model_arguments, model_options

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.forward import ForwardBatch
    from paceline.models.loader import LoadedModel

ROWS = (1, 2, 4, 8, 16, 32, 64)
BLOCK_SIZE = 16
FLAGS = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "amx_int8", "asimd")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--no-model", action="store_true", help="only the machine: load and time no model")
    parser.add_argument(
        "--context", type=int, default=256, metavar="TOKENS", help="tokens before the timed rows (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=15, help="passes per number of rows (default: %(default)s)")
    parser.add_argument(
        "--profile", action="store_true", help="also where the time goes: stages of a product, steps of a pass"
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", metavar="TOKENS", help="also plain decoding after so many tokens each"
    )
    parser.add_argument(
        "--threads", action="store_true", help="also decoding by how threads wait, alone and beside a busy process"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    from paceline.cli import doctor_contexts, doctor_profile, doctor_threads
    from paceline.errors import InvalidOptionError

    if args.context < 1 or args.repeats < 1:
        raise InvalidOptionError(
            f"--context and --repeats must be at least 1, but are {args.context} and {args.repeats}"
        )
    report: dict[str, Any] = {"machine": machine(), "kernels": kernels(args.num_threads)}
    if not args.no_model:
        from paceline.models.loader import load_model

        options = model_options(args)
        del options["max_model_len"]  # nothing is generated here
        model = load_model(args.model, **options, quiet=args.json)
        report["model"] = pass_costs(model, report["kernels"], args.context, args.repeats)
    if args.profile and report["kernels"]["native"]:
        found = [] if args.no_model else doctor_profile.steps(model, args.context, args.repeats)
        report["profile"] = {"products": doctor_profile.products(), "steps": found}
    if args.contexts and not args.no_model:
        bandwidth = report["kernels"].get("bandwidth")
        report["contexts"] = doctor_contexts.by_context(model, bandwidth, args.contexts, args.repeats)
    if args.threads and not args.no_model:
        report["threads"] = doctor_threads.waiting(model, args.context, args.repeats)
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
        if "profile" in report:
            doctor_profile.show(report["profile"])
        if "contexts" in report:
            doctor_contexts.show(report["contexts"])
        if report.get("threads"):
            doctor_threads.show(report["threads"])
    return 0


def machine() -> dict[str, Any]:
    import os
    import platform

    import torch

    from paceline.core.machine import cpu_info
    from paceline.ops.native import default_num_threads

    info = cpu_info()
    flags = set(info.get("flags", info.get("Features", "")).split())
    return {
        "cpu": info.get("model name", platform.processor() or platform.machine()),
        "cores": os.cpu_count(),
        "usable_cores": default_num_threads(),
        "instruction_sets": [flag for flag in FLAGS if flag in flags],
        "load_average": round(os.getloadavg()[0], 2),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def kernels(num_threads: int | None) -> dict[str, Any]:
    """Which kernels run, and the memory bandwidth they see with one thread and with all."""
    from paceline.ops import native

    if not native.available():
        return {"native": False, "reason": native.unavailable_reason()}
    threads = num_threads or native.default_num_threads()
    return {
        "native": True,
        "instruction_set": native.instruction_set(),
        "usable_instruction_sets": native.usable_instruction_sets(),
        "num_threads": threads,
        "bandwidth_one_thread": native.measure_bandwidth(1),  # bytes per second
        "bandwidth": native.measure_bandwidth(threads),
    }


def pass_costs(model: "LoadedModel", kernels: dict[str, Any], context: int, repeats: int) -> dict[str, Any]:
    """The measured time of passes of different widths, and the limit that memory sets."""
    from paceline.core.kv_tensor import allocate_kv
    from paceline.models.native import NativeDecoder

    config, decoder = model.config, model.decoder
    num_blocks = -(-(context + max(ROWS)) // BLOCK_SIZE)
    slots = num_blocks * BLOCK_SIZE
    cache = allocate_kv(config, slots, decoder.dtype, decoder.device).zero_()
    batches = {rows: chain_pass(rows, context, num_blocks, config.vocab_size) for rows in ROWS}
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for batch in batches.values():
        time_pass(decoder, batch, cache)  # warm up
    for _ in range(repeats):  # widths take turns, so that a slow moment hits all of them
        for rows, batch in batches.items():
            times[rows].append(time_pass(decoder, batch, cache))
    weight_bytes = decoder.weight_bytes if isinstance(decoder, NativeDecoder) else None
    limit = weight_bytes / kernels["bandwidth"] if weight_bytes else None
    one = statistics.median(times[1])
    return {
        "name": model.name,
        "execution": model.execution,
        "batch_invariant": decoder.batch_invariant,
        "context": context,
        "weight_bytes": weight_bytes,
        "limit_s": limit,
        "passes": [
            {
                "rows": rows,
                "median_s": statistics.median(seconds),
                "best_s": min(seconds),
                "over_one_row": statistics.median(seconds) / one,
                "over_limit": statistics.median(seconds) / limit if limit else None,
            }
            for rows, seconds in times.items()
        ],
    }


def time_pass(decoder: Any, batch: "ForwardBatch", cache: "Tensor") -> float:
    import torch

    started = time.perf_counter()
    decoder.forward(batch, cache)
    if cache.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def chain_pass(rows: int, context: int, num_blocks: int, vocab_size: int) -> "ForwardBatch":
    """The pass that verifies a draft chain: the last committed token after `context` others, then rows - 1 nodes."""
    import torch

    from paceline.core.packing import RequestRows, pack
    from paceline.core.tree import DraftTree

    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, vocab_size, (rows,), generator=generator).tolist()
    chain = RequestRows(range(num_blocks), tokens[:1], context, DraftTree.chain(tokens[1:]), num_wanted=rows)
    return pack([chain], BLOCK_SIZE)


def _print(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    machine, kernels = report["machine"], report["kernels"]
    console.print(f"machine   {machine['cpu']}, {machine['usable_cores']} of {machine['cores']} cores usable")
    console.print(f"          {' '.join(machine['instruction_sets'])}", highlight=False)
    if machine["cuda"]:
        console.print(f"cuda      {machine['cuda']}")
    if machine["load_average"] > 0.5 * machine["usable_cores"]:
        console.print(f"[yellow]busy      load average {machine['load_average']}: times below are not the machine's[/]")
    if not kernels["native"]:
        console.print(f"[yellow]kernels   torch's: {kernels['reason']}[/]")
    else:
        gb = kernels["bandwidth"] / 1e9
        others = [name for name in kernels["usable_instruction_sets"] if name != kernels["instruction_set"]]
        console.print(f"kernels   native, {kernels['instruction_set']}, {kernels['num_threads']} threads")
        console.print(f"          also here: {', '.join(others)}" if others else "", highlight=False)
        console.print(f"memory    {gb:.1f} GB/s read, {kernels['bandwidth_one_thread'] / 1e9:.1f} by one thread")
    model = report.get("model")
    if model is None:
        return
    console.print(f"model     {model['name']}: {model['execution']}")
    if model["batch_invariant"]:
        console.print("bits      promised: a request has the same answer in any batch, with or without speculation")
    else:
        console.print("[yellow]bits      not promised: an answer may change with its batch; see --batch-invariant[/]")
    if model["limit_s"]:
        megabytes, limit = model["weight_bytes"] / 1e6, model["limit_s"] * 1e3
        console.print(f"limit     {megabytes:.0f} MB of weights per pass take {limit:.2f} ms at that bandwidth")
    table = Table("rows", "ms (median)", "best", "over one row", "over the limit", "ms per row", box=box.SIMPLE)
    for row in model["passes"]:
        over_limit = f"{row['over_limit']:.2f}x" if row["over_limit"] else "-"
        median, best = row["median_s"] * 1e3, row["best_s"] * 1e3
        per_row = f"{median / row['rows']:.2f}"
        table.add_row(
            str(row["rows"]), f"{median:.2f}", f"{best:.2f}", f"{row['over_one_row']:.2f}x", over_limit, per_row
        )
    console.print(table)
