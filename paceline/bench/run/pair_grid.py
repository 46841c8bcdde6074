"""What is measured of a small model that drafts for a larger one: three grids over the same engine.

| grid   | settings                                   | asks                                                        |
|--------|--------------------------------------------|-------------------------------------------------------------|
| chains | plain, and K draft tokens for each K;      | how many tokens pay, for how many users;                    |
|        | the most that stop where unlikely;         | what it gains to stop drafting where the path is unlikely,  |
|        | K with the draft model's own weights       | and to draft in 4 bits (on a CPU)                           |
| trees  | width 1 to 5 at the first level            | tokens per pass over width (SpecInfer's first study)        |
| rules  | multi-step and naive sampling, T = 1       | how much more multi-step sampling accepts (its second one)  |

Naive sampling draws a token from the target and goes down to the child that has it, if one has; the drafter's own draws
are independent of it. Multi-step sampling tries the children one by one against the residual of the target's
distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.run.backend import Sampling
from paceline.bench.run.grid import PLAIN, Grid, Setting
from paceline.bench.run.load import Load

CHAIN, WIDTH, MULTI_STEP, NAIVE = "K=", "width ", "multi-step, width ", "naive, width "
STOPS, FILED = "until ", "the file's weights, K="
STUDIES = ("chains", "trees", "rules")
RULES = {MULTI_STEP: "multi_step", NAIVE: "sample_match"}


@dataclass(frozen=True, slots=True)
class PairPlan:
    target: str
    draft: str
    ks: Sequence[int]
    widths: Sequence[int]
    depth: int  # of the trees
    users: Sequence[int]
    workloads: Sequence[str]
    num_repeats: int
    sampling: Sampling
    num_requests: int | None = None
    min_probs: Sequence[float] = ()  # chains of the largest K that end after a path less likely than that
    file_ks: Sequence[int] = ()  # chains of the draft model with the weights that its file has
    studies: Sequence[str] = STUDIES

    def grids(self) -> list[Grid]:
        plain = Setting(PLAIN, {"method": "none"})
        chains = [Setting(f"{CHAIN}{k}", self._config(num_speculative_tokens=k)) for k in self.ks]
        chains += [
            Setting(
                f"{STOPS}{p:g}, K={max(self.ks)}", self._config(num_speculative_tokens=max(self.ks), draft_min_prob=p)
            )
            for p in self.min_probs
        ]
        chains += [
            Setting(f"{FILED}{k}", self._config(num_speculative_tokens=k, draft_quantization="file"))
            for k in self.file_ks
        ]
        trees = [Setting(f"{WIDTH}{width}", self._config(tree_widths=self._tree(width))) for width in self.widths]
        rules = [
            Setting(f"{name}{width}", self._sampled(width, rule))
            for name, rule in RULES.items()
            for width in self.widths
        ]
        users = [Load(concurrency=count) for count in self.users]
        alone = [Load(concurrency=1)]
        grids = {
            "chains": self._grid([plain, *chains], 0.0, users),
            "trees": self._grid(trees, 0.0, alone),  # tokens per pass: they need no plain run of their own
            "rules": self._grid(rules, 1.0, alone),
        }
        return [grid for study, grid in grids.items() if study in self.studies]

    def _grid(self, settings: list[Setting], temperature: float, loads: list[Load]) -> Grid:
        model = f"{self.target} drafted by {self.draft}"
        return Grid(
            settings,
            self.workloads,
            [temperature],
            loads,
            self.num_repeats,
            self.sampling,
            self.num_requests,
            model,
        )

    def _config(self, **options: Any) -> dict[str, Any]:
        return {"method": "draft_model", "model": self.draft} | options

    def _sampled(self, width: int, rule: str) -> dict[str, Any]:
        sampled = self._config(tree_widths=self._tree(width), draft_sampling="sampled")
        return sampled | {"rejection_sample_method": rule}

    def _tree(self, width: int) -> list[int]:
        """Several first tokens, each with one path below: what SpecInfer widens."""
        return [width, *[1] * (self.depth - 1)]
