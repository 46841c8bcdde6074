"""All settings of a point at once, a step of one engine after a step of another.

A shared machine is faster now and slower then, by more than the differences that a comparison is about. So the engines
take turns, step by step: always the one that has had the least time so far is next, and each has a clock that runs only
during its own steps. Whatever slows the machine down slows all of them alike.

What is compared is the engine, called directly, after some other prompts of the same workload: the time that a server
takes around its steps is not in it, nor is the start, in which `auto` finds out what pays.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from paceline.bench.backend import Answer, Sampling
from paceline.bench.engine_backend import asked, engine_figures, fill, sampling_params
from paceline.bench.grid import Cell, Grid, Setting
from paceline.bench.provenance import provenance
from paceline.bench.records import Record, RecordFile
from paceline.bench.summary import summarize
from paceline.bench.sweep import RunOptions, line_of, record_of
from paceline.bench.workloads import Prompt, take
from paceline.errors import InvalidOptionError, PacelineError
from paceline.llm import LLM

WARM_UP_TOKENS = 96  # of each user, before the comparison: what is compared is an engine that has been running

MakeEngine = Callable[[Setting], LLM]


class Lane:
    """One engine, its users and its own clock."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.spent_s = 0.0  # since the start
        self.began_s = 0.0  # what it was when the last questions came
        self._step_began_s: float | None = None
        self._waiting: Iterator[tuple[int, Prompt]] = iter(())
        self._sampling = Sampling()
        self._running: list[tuple[Any, Answer]] = []  # jobs
        self._answers: dict[int, Answer] = {}
        llm.engine.core.speculator.use_clock(self.now)

    def now(self) -> float:
        """Seconds that this engine has been at work."""
        return self.spent_s + (0.0 if self._step_began_s is None else time.perf_counter() - self._step_began_s)

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def offer(self, prompts: Sequence[Prompt], sampling: Sampling, num_users: int) -> None:
        self._waiting, self._sampling, self._answers = iter(list(enumerate(prompts))), sampling, {}
        self.began_s = self.spent_s
        for _ in range(num_users):
            self._ask_next()

    def step(self) -> None:
        self._step_began_s = time.perf_counter()
        try:
            self.llm.step()
        finally:
            self.spent_s, self._step_began_s = self.now(), None
        for job, answer in list(self._running):
            num_tokens = job.requests[0].num_output_tokens
            if num_tokens > answer.num_output_tokens:
                answer.num_output_tokens = num_tokens
                answer.event_s.append(self.spent_s)
            if job.finished:
                self._running.remove((job, answer))
                fill(answer, job.output())
                self._ask_next()

    def answers(self) -> list[Answer]:
        return [answer for _, answer in sorted(self._answers.items())]

    def _ask_next(self) -> None:
        """The user whose answer is complete asks the next open question."""
        for index, prompt in self._waiting:
            answer = self._answers[index] = Answer(prompt.prompt_id, prompt.category, self.spent_s)
            try:
                job = self.llm.submit(asked(prompt, self.llm.get_tokenizer()), sampling_params(self._sampling, index))
            except PacelineError as error:
                answer.error = f"{type(error).__name__}: {error}"
                continue
            self._running.append((job, answer))
            return


def run_lanes(lanes: Sequence[Lane]) -> None:
    """Until all questions are answered."""
    while busy := [lane for lane in lanes if lane.is_busy]:
        min(busy, key=lambda lane: lane.spent_s - lane.began_s).step()


def run_side_by_side(
    grid: Grid,
    make_engine: MakeEngine,
    records: RecordFile,
    options: RunOptions,
    say: Callable[[str], None],
    arguments: dict[str, Any] | None = None,
) -> None:
    """Every point of the grid that is not recorded yet, with all settings that are to be compared at it."""
    grid.check()
    has_servers = any(setting.url is not None for setting in grid.settings)
    if has_servers or any(load.concurrency is None for load in grid.loads):
        raise InvalidOptionError("side by side run our own engines under --concurrency: for servers and rates, sweep")
    done, points = records.done(), _points(grid)
    todo = [cells for cells in points if not all(grid.key(cell) in done for cell in cells)]
    if len(todo) < len(points):
        say(f"{len(points) - len(todo)} of {len(points)} points are recorded in {records.path}; going on with the rest")
    begin_s = time.perf_counter()
    for number, cells in enumerate(todo):
        for record in _measure(grid, cells, make_engine, options):
            record["provenance"] = provenance(arguments)
            records.append(record)
            setting = record["cell"]["setting"]
            say(f"    {setting}: {line_of(record)}")
        left_s = (time.perf_counter() - begin_s) / (number + 1) * (len(todo) - number - 1)
        where = cells[0].title.partition(" ")[2]
        say(f"[{number + 1}/{len(todo)}] {where} (about {left_s / 60:.0f} min left)")


def _points(grid: Grid) -> list[list[Cell]]:
    """The grid's cells, those that differ in nothing but the setting together."""
    points: dict[Any, list[Cell]] = {}
    for cell in grid.cells():
        points.setdefault((cell.workload, cell.temperature, cell.load, cell.repeat), []).append(cell)
    return list(points.values())


def _measure(grid: Grid, cells: Sequence[Cell], make_engine: MakeEngine, options: RunOptions) -> Iterator[Record]:
    lanes: list[Lane | PacelineError] = []
    for cell in cells:
        try:
            lanes.append(Lane(make_engine(cell.setting)))
        except PacelineError as error:
            lanes.append(error)
    running = [lane for lane in lanes if isinstance(lane, Lane)]
    cell, users = cells[0], cells[0].load.concurrency or 1
    sampling = replace(grid.sampling, temperature=cell.temperature)
    num_requests = grid.requests_of(cell.load)
    count = users if options.num_warm_up is None else options.num_warm_up
    for lane in running:
        lane.offer(take(cell.workload, count, skip=num_requests), replace(sampling, max_tokens=WARM_UP_TOKENS), count)
    run_lanes(running)
    before = {id(lane): engine_figures(lane.llm) for lane in running}
    for lane in running:
        lane.offer(take(cell.workload, num_requests), sampling, users)
    run_lanes(running)
    for cell, found in zip(cells, lanes, strict=True):
        described = {"backend": "engine, side by side", "model": grid.model, "speculative_config": cell.setting.config}
        if not isinstance(found, Lane):
            yield record_of(grid, cell, [], {}, described, str(found))
            continue
        figures = {name: value - before[id(found)].get(name, 0.0) for name, value in engine_figures(found.llm).items()}
        answers = found.answers()
        yield record_of(grid, cell, answers, summarize(answers, None, figures, options.target), described)
