"""An engine, its users, and a clock that runs only while it works: what takes turns in side_by_side.py.

The clock runs in the engine's steps and while it takes in a question (its tokens, its options). Users whose questions
are all answered ask others until the last answer is there, so that the batch stays full: with drafts, answers do not
end together, and a batch that empties says nothing about the load. For the same reason answers differ in length, by the
question alike for all engines: were all of them equally long, plain decoding would end and begin them in step, and read
all new prompts in one large pass, which costs half as much per token as it does when users come one by one.
"""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from paceline.bench.run.backend import Answer, Sampling
from paceline.bench.run.engine_backend import asked, fill, sampling_params
from paceline.bench.workloads.workload import Prompt
from paceline.errors import PacelineError
from paceline.llm import LLM

GOLDEN_RATIO = 0.618034
TURN_S = 0.01  # a step or two of one engine, then of another


class Lane:
    """One engine, its users and its own clock."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.spent_s = 0.0  # since the start
        self.began_s = 0.0  # what it was when the last questions came
        self.num_emitted = 0  # tokens, since then
        self.emitted_by_second: list[int] = []  # of its own clock, since then: tokens at the end of each whole one
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
        self.began_s, self.num_emitted, self.emitted_by_second = self.spent_s, 0, []
        for _ in range(num_users):
            self._ask_next()

    def step(self) -> None:
        with self._at_work():
            self.llm.step()
        while self.spent_s - self.began_s >= len(self.emitted_by_second) + 1:
            self.emitted_by_second.append(self.num_emitted)  # what this step brings came after that second's end
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

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """This engine's clock runs."""
        self._elsewhere_s = time.perf_counter() - self.spent_s
        try:
            yield
        finally:
            self.spent_s = self.now()

    def _ask_next(self) -> None:
        """The user whose answer is complete asks the next open question."""
        while self.is_busy:
            index, prompt = next(self._questions)
            counts = index < len(self.answers)
            answer = self.answers[index] if counts else Answer(prompt.prompt_id, prompt.category, 0.0)
            answer.begin_s = self.spent_s
            try:
                sampling = replace(self._sampling, max_tokens=length_of(index, self._sampling.max_tokens))
                with self._at_work():
                    question = asked(prompt, self.llm.get_tokenizer())
                    job = self.llm.submit(question, sampling_params(sampling, index, prompt))
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
