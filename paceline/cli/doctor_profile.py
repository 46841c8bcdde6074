"""`paceline doctor --profile`: which stages of a product, and which steps of a pass, take the time.

The first table takes the quantized products apart, on one thread and from the caches: time per block, the share of
what a bare loop of byte dot products reaches, and what leaving out a stage saves. Stages overlap, so the savings need
not add up to the whole. The second one says how long the threads work at each step of a pass, and wait for each other.
"""

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.models.loader import LoadedModel

ROWS = (1, 4, 8, 16, 32, 64)
# Kinds that are held alike run alike.
KINDS = {"Q4_0": "Q4_0", "Q4_1": "Q4_1, Q4_K", "Q8_0": "Q8_0, Q6_K, int8"}


def products() -> list[dict[str, Any]]:
    from paceline.ops.native.profile import product_stages

    report = []
    for kind, kinds in KINDS.items():
        for rows in ROWS:
            found = product_stages(kind, rows)
            entry: dict[str, Any] = {"kinds": kinds, "rows": rows, "block_s": found.block_s}
            entry |= {"share_of_peak": found.share_of_peak, "stages_s": found.stages_s}
            report.append(entry)
    return report


def steps(model: "LoadedModel", context: int, repeats: int) -> list[dict[str, Any]]:
    """Medians over passes, summed over threads: seconds of work at each step, and of waiting after all steps."""
    from paceline.cli.doctor import BLOCK_SIZE, chain_pass
    from paceline.core.kv_tensor import allocate_kv
    from paceline.models.native import NativeDecoder
    from paceline.ops.native.profile import STEPS, profiled_steps

    decoder = model.decoder
    if not isinstance(decoder, NativeDecoder):
        return []
    num_blocks = -(-(context + max(ROWS)) // BLOCK_SIZE)
    cache = allocate_kv(model.config, num_blocks * BLOCK_SIZE, decoder.dtype, decoder.device)
    report = []
    for rows in ROWS:
        batch = chain_pass(rows, context, num_blocks, model.config.vocab_size)
        passes = []
        with profiled_steps(decoder.handle, decoder.num_threads) as seconds:
            for _ in range(repeats + 1):
                seconds[:] = 0.0
                decoder.forward(batch, cache)
                passes.append(seconds.sum(axis=0))
        working = {name: statistics.median(p[i, 0] for p in passes[1:]) for i, name in enumerate(STEPS)}
        waiting = statistics.median(p[:, 1].sum() for p in passes[1:])
        report.append({"rows": rows, "num_threads": decoder.num_threads, "working_s": working, "waiting_s": waiting})
    return report


def show(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print("products  ns for 16 outputs x 32 inputs of one row, one thread; a stage: what leaving it out saves")
    stages = ("unpacking", "dots", "scales", "sums")
    table = Table("weights", "rows", "ns", "of peak", *stages, box=box.SIMPLE, padding=(0, 1), pad_edge=False)
    for entry in report["products"]:
        parts = entry["stages_s"] or {}
        cells = [f"{1e9 * parts[name]:.2f}" if name in parts else "-" for name in stages]
        peak = f"{100 * entry['share_of_peak']:.0f} %"
        table.add_row(entry["kinds"], str(entry["rows"]), f"{1e9 * entry['block_s']:.2f}", peak, *cells)
    console.print(table)
    if not report["steps"]:
        return
    console.print("steps     ms of a pass of so many rows, all threads together")
    table = Table("rows", *(str(entry["rows"]) for entry in report["steps"]), box=box.SIMPLE)
    for name in report["steps"][0]["working_s"]:
        table.add_row(name, *(f"{1e3 * entry['working_s'][name]:.2f}" for entry in report["steps"]))
    table.add_row("waiting", *(f"{1e3 * entry['waiting_s']:.2f}" for entry in report["steps"]))
    console.print(table)
