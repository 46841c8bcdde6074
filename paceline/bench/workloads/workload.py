"""What is asked of the engine: prompts by category, shipped with us or read from a file.

>>> [prompt.category for prompt in take("chat", 2)]
['chat', 'chat']

A workload is a category's name, a comma-separated list of them, `all`, `agents`, or the path of a file (see
loaders.py). Those of agents hold their answers to a JSON schema; `all` has the others.
"""

import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidOptionError

SHUFFLE_SEED = 20_240  # one fixed order, so that every run takes the same first prompts


@dataclass(frozen=True, slots=True)
class Prompt:
    prompt_id: str
    category: str
    text: str
    chat: bool = True  # goes through the model's chat template; otherwise it is completed as it is
    history: tuple[tuple[str, str], ...] = ()  # (role, text) of the messages before it
    schema: str | None = None  # JSON: what the answer is held to

    @property
    def messages(self) -> list[dict[str, str]]:
        said = [*self.history, ("user", self.text)]
        return [{"role": role, "content": text} for role, text in said]


# category -> module with its TEMPLATES; `random` is made up on the spot
CATEGORIES = {
    "chat": "paceline.bench.workloads.prompts.chat",
    "code": "paceline.bench.workloads.prompts.code",
    "code_edit": "paceline.bench.workloads.prompts.code_edit",
    "extraction": "paceline.bench.workloads.prompts.extraction",
    "summary": "paceline.bench.workloads.prompts.summary",
    "translation": "paceline.bench.workloads.prompts.translation",
    "maths": "paceline.bench.workloads.prompts.maths",
    "repetitive": "paceline.bench.workloads.prompts.repetitive",
    "random": "",
}
AGENT_CATEGORIES = ("schema_extraction", "tool_loop")

_WORDS = (
    "anchor basil cradle dune ember fjord gravel harp inkwell jigsaw kettle lantern marble nettle orchid pebble "
    "quartz ribbon saddle thimble umbrella velvet walnut xylophone yarn zephyr amber birch copper dusk elbow "
    "ferry goblet hazel iris jasper kiosk linen mosaic needle oyster parsley quill rafter spindle tundra urn "
    "valve willow axle"
)
RANDOM_WORDS = _WORDS.split()


def load_workload(name: str) -> list[Prompt]:
    """All prompts of a workload, in a fixed shuffled order."""
    if name == "all":
        return _interleave([load_workload(category) for category in CATEGORIES])
    if name == "agents":
        return _interleave([load_workload(category) for category in AGENT_CATEGORIES])
    if "," in name:
        return _interleave([load_workload(part.strip()) for part in name.split(",")])
    if name == "random":
        return [_random_prompt(i) for i in range(256)]
    if name in CATEGORIES:
        return _shipped(name)
    if name == "schema_extraction":
        return _schema_extraction(name)
    if name == "tool_loop":
        return _tool_loop(name)
    if Path(name).is_file():
        from paceline.bench.workloads.loaders import load_file

        return load_file(Path(name))
    raise InvalidOptionError(
        f"unknown workload {name!r}: neither a file nor one of {', '.join((*CATEGORIES, *AGENT_CATEGORIES))}, all, "
        "agents (or a comma-separated list)"
    )


def take(name: str, count: int, skip: int = 0) -> list[Prompt]:
    """`count` prompts from the `skip`-th on, going round where the workload is smaller."""
    prompts = load_workload(name)
    return [prompts[i % len(prompts)] for i in range(skip, skip + count)]


def _shipped(category: str) -> list[Prompt]:
    templates = importlib.import_module(CATEGORIES[category]).TEMPLATES
    texts = [text for template in templates for text in template.fill()]
    random.Random(SHUFFLE_SEED).shuffle(texts)
    return [Prompt(f"{category}-{i}", category, text) for i, text in enumerate(texts)]


def _schema_extraction(category: str) -> list[Prompt]:
    from paceline.bench.workloads.prompts.schema_extraction import TASKS

    asked = [(text, task.schema) for task in TASKS for text in task.template.fill()]
    random.Random(SHUFFLE_SEED).shuffle(asked)
    return [Prompt(f"{category}-{i}", category, text, schema=schema) for i, (text, schema) in enumerate(asked)]


def _tool_loop(category: str) -> list[Prompt]:
    """Turns in their order: one loop after the other."""
    from paceline.bench.workloads.prompts.tool_loop import LOOPS

    turns = [turn for loop in LOOPS for turn in loop]
    return [
        Prompt(f"{category}-{i}", category, turn.text, history=turn.history, schema=turn.schema)
        for i, turn in enumerate(turns)
    ]


def _random_prompt(index: int) -> Prompt:
    """Random words: the answer can be copied neither from the prompt nor, mostly, from itself."""
    words = random.Random(f"{SHUFFLE_SEED}/{index}").choices(RANDOM_WORDS, k=40)
    return Prompt(f"random-{index}", "random", " ".join(words), chat=False)


def _interleave(lists: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """One of each in turn, so that any first n prompts hold every category; stops with the shortest list."""
    return [prompt for group in zip(*lists, strict=False) for prompt in group]
