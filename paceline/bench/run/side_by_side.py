"""All settings of a point at once, a step or two of one engine after a step or two of another.

A shared machine is faster now and slower then, by more than the differences that a comparison is about. So the engines
take turns of a hundredth of a second, and each has a clock that runs only during its own steps. Whatever slows the
machine down slows all of them alike.

What is compared is the engine, called directly, after some other prompts of the same workload: the time that a server
takes around its steps is not in it, nor is the start, in which `auto` finds out what pays. Users whose questions are
all answered ask others until the last answer is there, so that the batch stays full: with drafts, answers do not end
together, and a batch that empties says nothing about the load. For the same reason answers differ in length, by the
question alike for all engines: were all of them equally long, plain decoding would end and begin them in step, and read
all new prompts in one large pass, which costs half as much per token as it does when users come one by one.
"""

import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from paceline.bench.run.backend import Answer, Sampling
from paceline.bench.run.engine_backend import asked, engine_figures, fill, sampling_params
from paceline.bench.run.grid import Cell, Grid, Setting
from paceline.bench.run.provenance import provenance
from paceline.bench.run.results import Record, RecordFile
from paceline.bench.run.summary import summarize
from paceline.bench.run.sweep import RunOptions, line_of, record_of, say_resumed, since, time_left
from paceline.bench.workloads.workload import Prompt, take
from paceline.core.draft_counts import DraftCounts
from paceline.errors import InvalidOptionError, PacelineError
from paceline.llm import LLM

# Before the comparison: what is compared is an engine that has been running.
WARM_UP_TOKENS, WARM_UP_REQUESTS = 96, 4  # of each request; requests at least, and one of each user
GOLDEN_RATIO = 0.618034
TURN_S = 0.01  # a step or two of one engine, then of another

MakeEngine = Callable[[Setting], LLM]


class Lane:
    """One engine, its users and its own clock."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.spent_s = 0.0  # since the start
        self.began_s = 0.0  # what it was when the last questions came
        self.num_emitted = 0  # tokens, since then
        self.answers: list[Answer] = []  # to the questions that count
        self._elsewhere_s = 0.0  # on the machine's clock, outside this engine's steps
        self._questions: Iterator[tuple[int, Prompt]] = iter(())
        self._num_open = 0  # questions that count and are not answered yet
        self._sampling = Sampling()
        self._running: dict[int, tuple[Any, Answer]] = {}  # number of the question -> its job, and the answer so far
        llm.engine.core.speculator.use_clock(self.now)

    def now(self) -> float:
        """Seconds that this engine has been at work, during a step of its own: asked several times in each."""
        return time.perf_counter() - self._elsewhere_s

    @property
    def is_busy(self) -> bool:
        return self._num_open > 0

    def offer(self, prompts: Sequence[Prompt], others: Sequence[Prompt], sampling: Sampling, num_users: int) -> None:
        """`others`: what is asked, round and round, by users who have nothing else to ask."""
        self._questions = enumerate(itertools.chain(prompts, itertools.cycle(others)))
        self.answers = [Answer(prompt.prompt_id, prompt.category, 0.0) for prompt in prompts]
        self._sampling, self._num_open = sampling, len(prompts)
        self.began_s, self.num_emitted = self.spent_s, 0
        for _ in range(num_users):
            self._ask_next()

    def step(self) -> None:
        self._elsewhere_s = time.perf_counter() - self.spent_s
        try:
            self.llm.step()
        finally:
            self.spent_s = self.now()
        for index, (job, answer) in list(self._running.items()):
            num_new = job.requests[0].num_output_tokens - answer.num_output_tokens
            if num_new:
                self.num_emitted += num_new
                answer.num_output_tokens += num_new
                answer.event_s.append(self.spent_s)
            if job.finished:
                del self._running[index]
                fill(answer, job.output())
                self._num_open -= index < len(self.answers)
                self._ask_next()
        if not self.is_busy:
            for job, _ in self._running.values():
                self.llm.cancel(job)
            self._running.clear()

    def _ask_next(self) -> None:
        """The user whose answer is complete asks the next open question."""
        while self.is_busy:
            index, prompt = next(self._questions)
            counts = index < len(self.answers)
            answer = self.answers[index] if counts else Answer(prompt.prompt_id, prompt.category, 0.0)
            answer.begin_s = self.spent_s
            try:
                sampling = replace(self._sampling, max_tokens=length_of(index, self._sampling.max_tokens))
                job = self.llm.submit(asked(prompt, self.llm.get_tokenizer()), sampling_params(sampling, index, prompt))
            except PacelineError as error:
                if not counts:
                    raise
                answer.error = f"{type(error).__name__}: {error}"
                self._num_open -= 1
                continue
            self._running[index] = job, answer
            return


def length_of(index: int, typical: int) -> int:
    """Tokens of an answer: half to one and a half of what is typical, evenly spread over any few in a row."""
    return max(1, round(typical * (0.5 + (index * GOLDEN_RATIO) % 1.0)))


def run_lanes(lanes: Sequence[Lane]) -> None:
    """Until all questions are answered. Turns are short, in random order: none always comes after the same one."""
    rng, until_s = random.Random(0), 0.0
    while busy := [lane for lane in lanes if lane.is_busy]:
        until_s += TURN_S
        for lane in rng.sample(busy, len(busy)):
            while lane.is_busy and lane.spent_s - lane.began_s < until_s:
                lane.step()


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
    say_resumed(len(points) - len(todo), len(points), "points", records, say)
    begin_s = time.perf_counter()
    for number, cells in enumerate(todo):
        for record in _measure(grid, cells, make_engine, options):
            record["provenance"] = provenance(arguments)
            records.append(record)
            setting = record["cell"]["setting"]
            say(f"    {setting}: {line_of(record)}")
        where = cells[0].title.partition(" ")[2]
        say(f"[{number + 1}/{len(todo)}] {where} ({time_left(begin_s, number + 1, len(todo))})")


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
    count = max(users, WARM_UP_REQUESTS) if options.num_warm_up is None else options.num_warm_up
    others = take(cell.workload, users, skip=num_requests + count)
    for lane in running:
        warm_up = take(cell.workload, count, skip=num_requests)
        lane.offer(warm_up, others, replace(sampling, max_tokens=WARM_UP_TOKENS), users)
    run_lanes(running)
    before = [(_counts(lane.llm), engine_figures(lane.llm)) for lane in running]
    gc.collect()
    gc.freeze()  # what is there stays: looking through it now and then would stop one engine or another
    for lane in running:
        lane.offer(take(cell.workload, num_requests), others, sampling, users)
    run_lanes(running)
    gc.unfreeze()
    earlier = iter(before)
    for cell, found in zip(cells, lanes, strict=True):
        described = {"backend": "engine, side by side", "model": grid.model, "speculative_config": cell.setting.config}
        if isinstance(found, Lane):
            summary = _summary(found, *next(earlier), options)
            yield record_of(grid, cell, found.answers, summary, described)
        else:
            yield record_of(grid, cell, [], {}, described, str(found))


def _summary(lane: Lane, counts: DraftCounts, figures: dict[str, float], options: RunOptions) -> dict[str, Any]:
    """Of the time since the questions came: `counts` and `figures` are the engine's totals at that moment."""
    during = _counts(lane.llm).since(counts)
    for answer in lane.answers:
        answer.counts = None  # the engine's totals count: they hold the unfinished answers too
    summary = summarize(lane.answers, during, since(figures, engine_figures(lane.llm)), options.target)
    if summary["num_failed"] < len(lane.answers):
        wall_s = lane.spent_s - lane.began_s
        summary |= {"wall_s": wall_s, "num_output_tokens": lane.num_emitted, "tokens_per_s": lane.num_emitted / wall_s}
        summary["speculation"]["mean_acceptance_length"] = lane.num_emitted / max(1, during.num_steps)
    return summary


def _counts(llm: LLM) -> DraftCounts:
    """Of all requests since the engine's start."""
    return DraftCounts.total(map(DraftCounts.from_dict, llm.stats()["speculation"].values()))
