"""The drafters that share a tree: built, asked and told one by one, each with its own limits, faults and time.

Who is asked, and what becomes of the trees, is up to the owner: `merge` (spec/merge/merge.py) and `auto`
(spec/auto/controller.py).
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.core.block_rows import BlockRows
from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.spec.drafter_faults import DrafterFaults
from paceline.spec.engine_parts import EngineParts
from paceline.spec.proposer import Budget, Proposer, StepContext

if TYPE_CHECKING:
    from paceline.spec.config.speculative_config import SpeculativeConfig


class Members:
    def __init__(
        self, proposers: Mapping[str, Proposer], limits: Mapping[str, Budget], keys: Mapping[str, str] | None = None
    ) -> None:
        """`keys`: what tells each from another of the same method, in what is kept of them; its name, without."""
        self.proposers, self.limits = dict(proposers), dict(limits)
        self.keys = dict(keys or {name: name for name in proposers})
        self.faults = DrafterFaults()
        self.clock: Callable[[], float] = time.perf_counter
        self.seconds = dict.fromkeys(proposers, 0.0)  # host time spent on each so far

    @staticmethod
    def build(services: EngineParts, configs: "Sequence[SpeculativeConfig]") -> "Members":
        from paceline.spec.methods import build_proposer  # the table has rows for those who own members

        proposers: dict[str, Proposer] = {}
        limits, keys = {}, {}
        for config in configs:
            same = sum(name.split("#")[0] == config.method for name in proposers)
            name = config.method if not same else f"{config.method}#{same + 1}"
            proposers[name] = build_proposer(config.method, services, config.options)
            limits[name] = Budget(config.node_budget, config.num_speculative_tokens)
            options = repr(sorted(config.options.items())).encode()
            keys[name] = f"{config.method} {hashlib.sha256(options).hexdigest()[:12]}"
        return Members(proposers, limits, keys)

    def ask(self, name: str, step: StepContext, budgets: Sequence[Budget]) -> tuple[list[DraftTree], float]:
        """Its trees, and the time they took; a member that raises has none."""
        nothing = [EMPTY_TREE] * len(budgets)
        if name in self.faults.off:
            return nothing, 0.0
        begin_s = self.clock()
        try:
            trees = self.proposers[name].propose(step, self._limited(name, budgets))
            if len(trees) != len(budgets):
                raise ValueError(f"{name} drafted {len(trees)} trees for {len(budgets)} requests")
        except BaseException as error:
            self.faults.note(name, error)
            trees = nothing
        return trees, self._spent(name, begin_s)

    def tell(self, name: str, step: StepContext) -> float:
        """What the last pass brought; the time that took."""
        if name in self.faults.off:
            return 0.0
        begin_s = self.clock()
        try:
            self.proposers[name].observe(step)
        except BaseException as error:
            self.faults.note(name, error)
        return self._spent(name, begin_s)

    def forget(self, name: str, gone: Sequence[Request]) -> float:
        """Tell a member that is skipped which requests ended, and nothing else."""
        return self.tell(name, StepContext([], gone=gone)) if gone else 0.0

    def check_params(self, params: SamplingParams) -> None:
        for proposer in self.proposers.values():
            proposer.check_params(params)

    def use_clock(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        for proposer in self.proposers.values():
            proposer.use_clock(clock)

    def block_rows(self) -> list[BlockRows]:
        return [
            rows for name, one in self.proposers.items() if name not in self.faults.off for rows in one.block_rows()
        ]

    def figures(self) -> dict[str, dict[str, Any]]:
        figures: dict[str, dict[str, Any]] = {name: {"draft_s": spent_s} for name, spent_s in self.seconds.items()}
        self.faults.add_to(figures)
        return figures

    def _limited(self, name: str, budgets: Sequence[Budget]) -> Sequence[Budget]:
        """What the member may draft, by its own configuration too."""
        most, deepest, *_ = self.limits[name]
        for nodes, depth, *_ in budgets:
            if nodes > most or depth > deepest:
                break
        else:
            return budgets
        return [Budget(min(nodes, most), min(depth, deepest), *min_probs) for nodes, depth, *min_probs in budgets]

    def _spent(self, name: str, begin_s: float) -> float:
        spent_s = self.clock() - begin_s
        self.seconds[name] += spent_s
        return spent_s
