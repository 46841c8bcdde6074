"""All settings of a point at once, a step or two of one engine after a step or two of another.

A shared machine is faster now and slower then, by more than the differences that a comparison is about. So the engines
take turns of a hundredth of a second, and each has a clock that runs only while it works (lane.py). Whatever slows the
machine down slows all of them alike.

What is compared is the engine, called directly: the time that a server takes around its steps is not in it.

- *warm*: each engine has answered other prompts of the same workload before the comparison.
- *cold*: each engine is new, and its clock runs from its first request on: prompts, first trials of drafters, all of
  it. Not in it is what happens before a request can come: loading and measuring passes. That time is recorded as
  `start_s`. What only the first engine of a process pays (modules, threads, files) is nobody's: before the first
  comparison a throw-away engine of each setting answers something (`rehearsal.py`), and nothing that it learned is
  kept.

Neither reads or writes what engines keep on disk of what they learned: a round must not depend on the one before it.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from paceline.bench.run.engine_backend import engine_figures
from paceline.bench.run.grid import COLD, Cell, Grid, Setting
from paceline.bench.run.lane import Lane, run_lanes
from paceline.bench.run.provenance import provenance
from paceline.bench.run.rehearsal import rehearse
from paceline.bench.run.results import Record, RecordFile
from paceline.bench.run.summary import summarize
from paceline.bench.run.sweep import RunOptions, line_of, record_of, say_resumed, since
from paceline.bench.workloads.workload import take
from paceline.core.draft_counts import DraftCounts
from paceline.errors import InvalidOptionError, PacelineError
from paceline.llm import LLM

# Before a warm comparison: what is compared is an engine that has been running.
WARM_UP_TOKENS, WARM_UP_REQUESTS = 96, 4  # of each request; requests at least, and one of each user
LEARNED_CACHE = "PACELINE_LEARNED_CACHE"  # "off": engines neither read nor write what they learned

MakeEngine = Callable[[Setting], LLM]


def run_side_by_side(
    grid: Grid,
    make_engine: MakeEngine,
    records: RecordFile,
    options: RunOptions,
    say: Callable[[str], None],
    arguments: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,  # kept in every record
) -> None:
    """Every point of the grid that is not recorded yet, with all settings that are to be compared at it."""
    grid.check()
    has_servers = any(setting.url is not None for setting in [*grid.settings, *grid.cold_settings])
    if has_servers or any(load.concurrency is None for load in grid.loads):
        raise InvalidOptionError("side by side run our own engines under --concurrency: for servers and rates, sweep")
    done, points = records.done(), _points(grid)
    todo = [cells for cells in points if not all(grid.key(cell) in done for cell in cells)]
    say_resumed(len(points) - len(todo), len(points), "points", records, say)
    if not todo:
        return
    say("first a throw-away engine of each setting, to find out how long the rest takes")
    with _nothing_learned_on_disk():
        estimate = rehearse(grid, make_engine)
        expected_s = [sum(estimate.cell_s(cell, _num_tokens(grid, cell, options)) for cell in cells) for cells in todo]
        say(f"{len(todo)} points in {grid.num_repeats} rounds: about {sum(expected_s) / 60:.0f} min")
        begin_s = time.perf_counter()
        for number, cells in enumerate(todo, 1):
            measured = list(_measure(grid, cells, make_engine, options))
            for record in measured:
                record["provenance"] = provenance(arguments)
                if plan is not None:
                    record["plan"] = plan
            records.append(*measured)
            for record in measured:
                say(f"    {record['cell']['setting']}: {line_of(record)}")
            slower = (time.perf_counter() - begin_s) / sum(expected_s[:number])
            left_s = slower * sum(expected_s[number:])
            where = cells[0].title.partition(" ")[2]
            say(f"[{number}/{len(todo)}] {where} (about {left_s / 60:.0f} min left)")


@contextmanager
def _nothing_learned_on_disk() -> Iterator[None]:
    before = os.environ.get(LEARNED_CACHE)
    os.environ[LEARNED_CACHE] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ[LEARNED_CACHE]
        else:
            os.environ[LEARNED_CACHE] = before


def _points(grid: Grid) -> list[list[Cell]]:
    """The grid's cells, those that differ in nothing but the setting together."""
    points: dict[Any, list[Cell]] = {}
    for cell in grid.cells():
        where = (cell.workload, cell.temperature, cell.load, cell.repeat, cell.start)
        points.setdefault(where, []).append(cell)
    return list(points.values())


def _num_warm_up(cell: Cell, options: RunOptions) -> int:
    """Requests before the comparison."""
    if cell.start == COLD:
        return 0
    users = cell.load.concurrency or 1
    return max(users, WARM_UP_REQUESTS) if options.num_warm_up is None else options.num_warm_up


def _num_tokens(grid: Grid, cell: Cell, options: RunOptions) -> int:
    measured = grid.requests_of(cell.load) * grid.sampling.max_tokens
    return measured + _num_warm_up(cell, options) * WARM_UP_TOKENS


def _measure(grid: Grid, cells: Sequence[Cell], make_engine: MakeEngine, options: RunOptions) -> Iterator[Record]:
    lanes: list[tuple[Lane, float] | PacelineError] = []  # with the seconds that its start took
    for cell in cells:
        begin_s = time.perf_counter()
        try:
            lane = Lane(make_engine(cell.setting))
        except PacelineError as error:
            lanes.append(error)
        else:
            lanes.append((lane, time.perf_counter() - begin_s))
    running = [found[0] for found in lanes if not isinstance(found, PacelineError)]
    before = iter(_compare(grid, cells[0], running, options))
    for cell, found in zip(cells, lanes, strict=True):
        described = {"backend": "engine, side by side", "model": grid.model, "speculative_config": cell.setting.config}
        if isinstance(found, PacelineError):
            yield record_of(grid, cell, [], {}, described, str(found))
        else:
            lane, start_s = found
            summary = _summary(lane, *next(before), options) | {"start_s": start_s}
            yield record_of(grid, cell, lane.answers, summary, described)


def _compare(
    grid: Grid, cell: Cell, lanes: Sequence[Lane], options: RunOptions
) -> list[tuple[DraftCounts, dict[str, float]]]:
    """Asks all engines the same. The engines' totals when that began: what a warm one has from before."""
    users, sampling = cell.load.concurrency or 1, replace(grid.sampling, temperature=cell.temperature)
    num_requests, count = grid.requests_of(cell.load), _num_warm_up(cell, options)
    others = take(cell.workload, users, skip=num_requests + count)
    if count:
        for lane in lanes:
            warm_up = take(cell.workload, count, skip=num_requests)
            lane.offer(warm_up, others, replace(sampling, max_tokens=WARM_UP_TOKENS), users)
        run_lanes(lanes)
    before = [(_counts(lane.llm), engine_figures(lane.llm)) for lane in lanes]
    gc.collect()
    gc.freeze()  # what is there stays: looking through it now and then would stop one engine or another
    for lane in lanes:
        lane.offer(take(cell.workload, num_requests), others, sampling, users)
    run_lanes(lanes)
    gc.unfreeze()
    return before


def _summary(lane: Lane, counts: DraftCounts, figures: dict[str, float], options: RunOptions) -> dict[str, Any]:
    """Of the time since the questions came: `counts` and `figures` are the engine's totals at that moment."""
    during = _counts(lane.llm).since(counts)
    for answer in lane.answers:
        answer.counts = None  # the engine's totals count: they hold the unfinished answers too
    summary = summarize(lane.answers, during, since(figures, engine_figures(lane.llm)), options.target)
    if summary["num_failed"] < len(lane.answers):
        wall_s = lane.spent_s - lane.began_s
        summary |= {"wall_s": wall_s, "num_output_tokens": lane.num_emitted, "tokens_per_s": lane.num_emitted / wall_s}
        summary["tokens_by_second"] = lane.emitted_by_second
        summary["speculation"]["mean_acceptance_length"] = lane.num_emitted / max(1, during.num_steps)
    return summary


def _counts(llm: LLM) -> DraftCounts:
    """Of all requests since the engine's start."""
    return DraftCounts.total(map(DraftCounts.from_dict, llm.stats()["speculation"].values()))
