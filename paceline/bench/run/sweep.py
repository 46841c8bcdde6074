"""Run a grid: each cell on a fresh backend, recorded as soon as it is measured; a rerun goes on where it stopped.

Every run starts with empty caches (prefix cache, past outputs, learned costs): the model's weights are shared, nothing
else is. A few other prompts of the same workload warm it up before the clock starts.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.bench.run.backend import Answer, Backend, Sampling
from paceline.bench.run.grid import Cell, Grid, Setting
from paceline.bench.run.load import Load, Progress, offer
from paceline.bench.run.provenance import provenance
from paceline.bench.run.results import Record, RecordFile
from paceline.bench.run.summary import LatencyTarget, summarize
from paceline.bench.workloads.workload import take
from paceline.errors import PacelineError

WARM_UP_TOKENS = 24
MakeBackend = Callable[[Setting], Backend]


class BackendLostError(PacelineError, RuntimeError):
    """The server or engine under test stopped answering; what was measured before is kept."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    num_warm_up: int | None = None  # None: one per user, at most 8
    target: LatencyTarget | None = None


def run_cell(
    backend: Backend, grid: Grid, cell: Cell, options: RunOptions, progress: Progress | None = None
) -> tuple[list[Answer], dict[str, Any]]:
    """Answers and summary of one run."""
    num_requests = grid.requests_of(cell.load)
    sampling = Sampling(**(asdict(grid.sampling) | {"temperature": cell.temperature}))
    asyncio.run(_warm_up(backend, cell, sampling, num_requests, options))
    counts_before, figures_before = backend.counts(), backend.figures()
    answers = asyncio.run(offer(backend, take(cell.workload, num_requests), sampling, cell.load, progress))
    counts = backend.counts()
    if counts is not None and counts_before is not None:
        counts = counts.since(counts_before)
    figures = since(figures_before, backend.figures())
    return answers, summarize(answers, counts, figures, options.target)


def run_sweep(
    grid: Grid,
    make_backend: MakeBackend,
    records: RecordFile,
    options: RunOptions,
    say: Callable[[str], None],
    arguments: dict[str, Any] | None = None,
) -> None:
    """Everything of the grid that is not recorded yet. Raises `BackendLostError` where going on makes no sense."""
    grid.check()
    done = records.done()
    todo = [cell for cell in grid.cells() if grid.key(cell) not in done]
    say_resumed(len(grid) - len(todo), len(grid), "runs", records, say)
    begin_s = time.perf_counter()
    for number, cell in enumerate(todo):
        record = _measure(grid, cell, make_backend, options)
        record["provenance"] = provenance(arguments)
        records.append(record)
        say(f"[{number + 1}/{len(todo)}] {cell.title}: {line_of(record)} ({time_left(begin_s, number + 1, len(todo))})")
        if record["status"] == "failed" and not record["summary"].get("num_output_tokens"):
            raise BackendLostError(
                f"{cell.title} got no answer at all: {record['error']}. The {number} runs before it are safe in "
                f"{records.path}; the same command goes on from there"
            )


def _measure(grid: Grid, cell: Cell, make_backend: MakeBackend, options: RunOptions) -> Record:
    try:
        backend = make_backend(cell.setting)
    except PacelineError as error:
        return record_of(grid, cell, [], {}, {}, str(error))
    try:
        answers, summary = run_cell(backend, grid, cell, options)
        return record_of(grid, cell, answers, summary, backend.describe())
    finally:
        backend.close()


def say_resumed(num_done: int, total: int, what: str, records: RecordFile, say: Callable[[str], None]) -> None:
    if num_done:
        say(f"{num_done} of {total} {what} are recorded in {records.path}; going on with the rest")


def time_left(begin_s: float, num_done: int, total: int) -> str:
    left_s = (time.perf_counter() - begin_s) / num_done * (total - num_done)
    return f"about {left_s / 60:.0f} min left"


def since(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """What a backend's totals grew by."""
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


def record_of(
    grid: Grid,
    cell: Cell,
    answers: Sequence[Answer],
    summary: dict[str, Any],
    backend: dict[str, Any],
    error: str | None = None,  # why there is nothing else
) -> Record:
    failed = summary.get("num_failed", 0)
    if failed:
        error = f"{failed} of {len(answers)} requests failed: {summary['errors'][0]}"
    return {
        "key": grid.key(cell),
        "cell": cell.describe(),
        "sampling": asdict(grid.sampling),
        "backend": backend,
        "status": "ok" if error is None else "failed",
        "error": error,
        "summary": summary,
        "requests": [_compact(answer) for answer in answers],
    }


async def _warm_up(backend: Backend, cell: Cell, sampling: Sampling, num_requests: int, options: RunOptions) -> None:
    users = cell.load.concurrency or 4
    count = min(8, users) if options.num_warm_up is None else options.num_warm_up
    if count == 0:
        return
    short = Sampling(**(asdict(sampling) | {"max_tokens": min(WARM_UP_TOKENS, sampling.max_tokens)}))
    prompts = take(cell.workload, count, skip=num_requests)  # others than the measured ones, where there are enough
    await offer(backend, prompts, short, Load(concurrency=count))


def _compact(answer: Answer) -> dict[str, Any]:
    compact: dict[str, Any] = {"prompt_id": answer.prompt_id, "category": answer.category}
    if answer.error is not None:
        return compact | {"error": answer.error}
    return compact | {
        "ttft_s": round(answer.ttft_s, 6),
        "e2e_s": round(answer.e2e_s, 6),
        "num_output_tokens": answer.num_output_tokens,
        "num_steps": None if answer.counts is None else answer.counts.num_steps,
        "output_hash": answer.output_hash,
    }


def line_of(record: Record) -> str:
    if record["status"] == "failed":
        return f"FAILED, {record['error']}"
    summary = record["summary"]
    line = f"{summary['tokens_per_s']:.1f} tok/s"
    if summary["speculation"] is not None:
        line += f", {summary['speculation']['mean_acceptance_length']:.2f} tokens per pass"
    return line
