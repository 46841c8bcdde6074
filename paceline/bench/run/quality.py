"""What a format loses: its distributions beside the reference's, and tasks that it gets right."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from paceline.bench.run.engine_backend import asked
from paceline.bench.workloads.workload import Prompt
from paceline.core.agreement import Agreement, Passage
from paceline.core.kv_tensor import allocate_kv
from paceline.core.packing import RequestRows, pack
from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidOptionError
from paceline.llm import LLM

BLOCK_SIZE = 16
NUM_TASKS = 40
TASK_TOKENS = 32
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Task:
    question: str
    answer: str


def check_same_tokens(reference: LLM, other: LLM, name: str) -> None:
    if reference.get_tokenizer().vocabulary() != other.get_tokenizer().vocabulary():
        raise InvalidOptionError(
            f"{name} has another vocabulary than the reference, so their distributions cannot be compared: give "
            "formats of one model"
        )


def agreement(reference: LLM, other: LLM, passages: Sequence[Passage]) -> Agreement:
    found = Agreement()
    for passage in passages:
        found.add(logits_of(reference, passage), logits_of(other, passage), passage.next_ids())
    return found


def logits_of(llm: LLM, passage: Passage) -> Tensor:
    """[tokens, vocab] float32 on the host, from the very decoder that serves"""
    decoder, num_tokens = llm.engine.model.decoder, len(passage.token_ids)
    config, blocks = decoder.config, range(-(-num_tokens // BLOCK_SIZE))
    cache = allocate_kv(config, len(blocks) * BLOCK_SIZE, decoder.dtype, decoder.device)
    rows = RequestRows(list(blocks), passage.token_ids, 0, num_wanted=num_tokens)
    return decoder.forward(pack([rows], BLOCK_SIZE), cache).logits.float().cpu()


def exact_matches(llm: LLM, tasks: Sequence[Task]) -> float:
    """The share of tasks answered rightly, decoded greedily."""
    tokenizer, params = llm.get_tokenizer(), SamplingParams(max_tokens=TASK_TOKENS, temperature=0.0)
    prompts = [asked(Prompt(str(i), "task", task.question), tokenizer) for i, task in enumerate(tasks)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    right = [is_right(output.outputs[0].text, task.answer) for output, task in zip(outputs, tasks, strict=True)]
    return sum(right) / len(right)


def is_right(text: str, answer: str) -> bool:
    """A number is right where it is the last one of the text; anything else where it is the whole text."""
    if _NUMBER.fullmatch(answer.strip()):
        numbers = _NUMBER.findall(text.replace(",", ""))
        return bool(numbers) and float(numbers[-1]) == float(answer)
    return " ".join(text.split()) == " ".join(answer.split())


def load_tasks(path: str | None, seed: int = 0) -> list[Task]:
    """JSON lines with `question` and `answer`; without a file, sums and products of small numbers."""
    if path is None:
        return _arithmetic(seed)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOptionError(f"cannot read the tasks {path}: {error}") from error
    tasks = [_task(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise InvalidOptionError(f"{path} holds no task")
    return tasks


def _task(line: str, where: str) -> Task:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidOptionError(f"{where} is not JSON: {error}") from error
    if not isinstance(entry, dict) or not {"question", "answer"} <= entry.keys():
        raise InvalidOptionError(f"{where} must be an object with `question` and `answer`, got {line[:60]!r}")
    return Task(str(entry["question"]), str(entry["answer"]))


def _arithmetic(seed: int) -> list[Task]:
    rng, tasks = random.Random(seed), []
    for i in range(NUM_TASKS):
        most = 50 if i % 2 else 9
        first, second = rng.randint(2, most), rng.randint(2, most)
        sign, result = ("+", first + second) if i % 2 else ("*", first * second)
        tasks.append(Task(f"What is {first} {sign} {second}? Answer with the number only.", str(result)))
    return tasks
