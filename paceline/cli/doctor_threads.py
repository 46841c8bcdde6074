"""`paceline doctor --threads`: plain decoding by how the threads wait, alone and beside a busy process.

A thread that loses its processor keeps the others waiting. The table shows the mean time of a pass of one row with all
threads spinning, with all threads giving way, and by the choice that the engine makes by itself (`src/crowd.h`).
Ways take turns, so that a slow moment hits all of them.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.models.loader import LoadedModel

HOST_S = 4e-4  # of Python between two passes, as an engine has it
PASSES = 48  # of one way in one turn: a time slice is a few passes long
BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:  # it ends with a doctor that is killed
    sum(range(100_000))
"""


def waiting(model: "LoadedModel", context: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of a pass for each way, alone and beside one busy process; [] without native kernels."""
    from paceline.models.native import NativeDecoder
    from paceline.ops.native.team import WAITING

    if not isinstance(model.decoder, NativeDecoder):
        return []
    alone = _measure(model, context, rounds)
    with busy_process():
        beside = _measure(model, context, rounds)
    return [{"way": way, "alone": alone[way], "beside": beside[way]} for way in WAITING]


@contextmanager
def busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        time.sleep(0.3)  # until it has started
        yield
    finally:
        process.kill()
        process.wait()


def _measure(model: "LoadedModel", context: int, rounds: int) -> dict[str, dict[str, float]]:
    from paceline.cli.doctor import BLOCK_SIZE, chain_pass
    from paceline.core.kv_tensor import allocate_kv
    from paceline.ops.native.team import WAITING, last_num_threads, set_waiting

    decoder = model.decoder
    num_blocks = -(-(context + 1) // BLOCK_SIZE)
    cache = allocate_kv(model.config, num_blocks * BLOCK_SIZE, decoder.dtype, decoder.device)
    batch = chain_pass(1, context, num_blocks, model.config.vocab_size)
    times: dict[str, list[float]] = {way: [] for way in WAITING}
    threads: dict[str, list[float]] = {way: [] for way in WAITING}
    try:
        for _ in range(rounds):
            for way in WAITING:
                set_waiting(way)
                for i in range(PASSES + 8):
                    started = time.perf_counter()
                    decoder.forward(batch, cache)
                    ended = time.perf_counter()
                    while time.perf_counter() - ended < HOST_S:
                        pass
                    if i >= 8:  # what the way before left behind, and the first choices of `auto`
                        times[way].append(ended - started)
                        threads[way].append(last_num_threads())
    finally:
        set_waiting("auto")
    return {
        way: {
            "mean_s": statistics.mean(seconds),
            "median_s": statistics.median(seconds),
            "threads": statistics.mean(threads[way]),
        }
        for way, seconds in times.items()
    }


def show(report: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print("threads   ms of a pass of one row: mean [median] (threads that took part)")
    table = Table("threads wait by", "alone", "beside a busy process", box=box.SIMPLE)
    for entry in report:
        cells = [
            f"{1e3 * found['mean_s']:.2f} [{1e3 * found['median_s']:.2f}] ({found['threads']:.1f})"
            for found in (entry["alone"], entry["beside"])
        ]
        table.add_row(entry["way"], *cells)
    console.print(table)
