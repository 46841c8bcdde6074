"""What each part of serving adds, alone and among the others.

The memory for keys and values is the same in all runs. A part that is off is replaced by what was done before it:

| part           | on                                    | off                                                        |
|----------------|---------------------------------------|------------------------------------------------------------|
| batching       | as many requests at once as fit       | one after the other                                        |
| paging         | blocks of 16 tokens                   | a request reserves room for the longest one                |
| prefix sharing | blocks that were computed are reused  | every prompt is computed                                   |
| quantization   | the second model                      | the first, in full precision                               |
| speculation    | `auto`                                | no drafts                                                  |

Blocks can only be shared where they are smaller than a prompt, so prefix sharing adds nothing without paging.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.run.backend import Sampling
from paceline.bench.run.format_grid import Format
from paceline.bench.run.grid import Grid, Setting
from paceline.bench.run.load import Load
from paceline.bench.workloads.workload import take

PARTS = ("batching", "paging", "prefix sharing", "quantization", "speculation")
NONE, ALL = "none", "all"
BLOCK = 16
RESERVED = 1024  # tokens of the longest request: prompt and answer
NUM_RESERVED = 4  # so many requests fit without paging

PREFACE = (
    "You answer questions for the visitors of a small town library. Keep to these rules. Books may be kept for four "
    "weeks, films and games for one week; both can be renewed twice, unless somebody else waits for them. Whoever "
    "brings something back late pays ten cents for each day and piece, children pay nothing. Reading rooms are open "
    "from nine in the morning to eight in the evening, on Saturdays until two. Computers may be used for an hour a "
    "day; printing costs five cents a page. Rare books are read in the cellar room only, with clean hands and a "
    "pencil, and are asked for a day before. The library buys what at least three people have asked for, if it can be "
    "bought. Answer in plain words, briefly, without repeating the question, and say so when a rule does not cover it."
)


@dataclass(frozen=True, slots=True)
class ContributionPlan:
    full: Format
    quantized: Format
    users: int
    workload: str  # a file of prompts, see `prompt_lines`
    num_rounds: int
    sampling: Sampling
    num_requests: int

    def formats(self) -> list[Format]:
        """One for each combination: the weights, with the engine's options."""
        return [self._format(parts) for parts in combinations()]

    def grid(self) -> Grid:
        settings = [
            Setting(combination_name(parts), _drafts(parts), form=combination_name(parts)) for parts in combinations()
        ]
        loads, model = [Load(concurrency=self.users)], f"{self.full.model}, {self.quantized.model}"
        rounds, requests = self.num_rounds, self.num_requests
        return Grid(settings, [self.workload], [0.0], loads, rounds, self.sampling, requests, model)

    def _format(self, parts: Sequence[str]) -> Format:
        weights = self.quantized if "quantization" in parts else self.full
        block = BLOCK if "paging" in parts else RESERVED
        options: dict[str, Any] = {
            "max_model_len": RESERVED,
            "block_size": block,
            "num_kv_blocks": NUM_RESERVED * RESERVED // block,
            "max_num_seqs": self.users if "batching" in parts else 1,
            "enable_prefix_caching": "prefix sharing" in parts,
        }
        return Format(combination_name(parts), weights.model, weights.options | options)


def combinations() -> list[tuple[str, ...]]:
    """None, each alone, all, all but each."""
    alone = [(part,) for part in PARTS]
    others = [tuple(part for part in PARTS if part != left_out) for left_out in PARTS]
    return [(), *alone, PARTS, *others]


def combination_name(parts: Sequence[str]) -> str:
    if len(parts) == len(PARTS) - 1:
        return f"all but {next(part for part in PARTS if part not in parts)}"
    return {0: NONE, len(PARTS): ALL}.get(len(parts)) or ", ".join(parts)


def prompt_lines(count: int) -> list[str]:
    """JSON lines: questions behind one long preface, as every call of an application has."""
    asked = take("chat,extraction", count)
    return [json.dumps({"id": p.prompt_id, "prompt": f"{PREFACE}\n\n{p.text}", "category": "shared"}) for p in asked]


def _drafts(parts: Sequence[str]) -> dict[str, Any]:
    return {"method": "auto" if "speculation" in parts else "none"}
