"""What to look at: a grid of methods, trees, batch sizes, chunkings and settings, small, usual or large."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidOptionError
from paceline.models.loader import LoadedModel
from paceline.prove.check import Check
from paceline.prove.distribution import check_distribution
from paceline.prove.equality import EngineCase, check_equality, run_case
from paceline.prove.forcing import check_forcing
from paceline.prove.rules import check_rules
from paceline.prove.workload import GREEDY, SETTINGS, make_workload
from paceline.spec.config import SpeculativeConfig
from paceline.spec.proposers import PROPOSERS

FALSE_ALARM = 1e-6  # of a whole run, shared by its statistical checks
Shape = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    methods: tuple[str, ...]  # besides oracle trees; () for none
    shapes: tuple[Shape, ...]  # of oracle trees
    batch_sizes: tuple[int, ...]
    chunks: tuple[int | None, ...]
    settings: tuple[str, ...]
    num_prompts: int
    max_tokens: int
    num_worlds: int
    num_samples: int
    rules: tuple[str, ...]  # whose distribution is sampled on the real model
    extra: tuple[Mapping[str, Any], ...] = ()  # whole speculative_configs of the user's


QUICK = Plan(
    methods=("ngram",),
    shapes=("chain", (3, 2, 1)),
    batch_sizes=(1, 16),
    chunks=(None,),
    settings=("greedy", "T=1", "T=0.7 top_p", "penalties"),
    num_prompts=3,
    max_tokens=12,
    num_worlds=12,
    num_samples=240,
    rules=("sample_match", "rejection"),
)
USUAL = Plan(
    methods=tuple(name for name in PROPOSERS if name not in ("none", "oracle")),
    shapes=("chain", (4, 2, 1), (8,), "random"),
    batch_sizes=(1, 8, 32),
    chunks=(None, 40),
    settings=tuple(SETTINGS),
    num_prompts=8,
    max_tokens=32,
    num_worlds=60,
    num_samples=2_000,
    rules=("sample_match", "rejection", "multi_step", "block"),
)
THOROUGH = Plan(
    methods=USUAL.methods,
    shapes=("chain", (4, 2, 1), (8,), (2, 2, 2, 2), (1, 1, 3, 1, 1), (16,), "random"),
    batch_sizes=(1, 2, 7, 32, 64),
    chunks=(None, 33, 64, 200),
    settings=tuple(SETTINGS),
    num_prompts=64,
    max_tokens=128,
    num_worlds=2_000,
    num_samples=50_000,
    rules=USUAL.rules,
)


def engine_cases(plan: Plan) -> Iterator[EngineCase]:
    configs: list[tuple[str, Mapping[str, Any]]] = []
    for shape in plan.shapes:
        oracle = {"method": "oracle", "shape": shape, "accuracy": 0.7, "num_speculative_tokens": 6, "node_budget": 24}
        configs.append((f"oracle {shape if isinstance(shape, str) else list(shape)}", oracle))
    configs += [(name, example_config(name)) for name in plan.methods]
    configs += [(str(config.get("method", "draft_model")), config) for config in plan.extra]
    for name, config in configs:
        for batch_size in plan.batch_sizes:
            for chunk in plan.chunks:
                yield EngineCase(name, config, batch_size, chunk)


def example_config(method: str) -> dict[str, Any]:
    """A configuration in which a method runs on any target."""
    if method not in PROPOSERS:
        raise InvalidOptionError(f"unknown method {method!r}; choose from {', '.join(PROPOSERS)}")
    return {"method": method, **PROPOSERS[method].example}


def drafts_for(rule: str) -> Mapping[str, Any]:
    """Drafts that a rule is made for: the target's first layer draws from its own q; oracle trees for sample_match."""
    if rule == "sample_match":
        return {"method": "oracle", "shape": (2, 1), "rejection_sample_method": rule}
    config: dict[str, Any] = {"method": "draft_model", "num_draft_layers": 1, "rejection_sample_method": rule}
    config["draft_sampling"] = "sampled"
    return config | ({"tree_widths": [2, 2]} if rule == "multi_step" else {"num_speculative_tokens": 2})


def check_configs(plan: Plan) -> None:
    """Refuse a configuration that cannot run before any time is spent."""
    for config in plan.extra:
        SpeculativeConfig.parse(config)


def run_plan(plan: Plan, model: LoadedModel, on_case: Callable[[str], None] | None = None) -> Iterator[Check]:
    """Every check, as it is done. `on_case(what)` is told what comes next."""
    note = on_case or (lambda what: None)
    note("enumerating the rules")
    yield from check_rules(plan.num_worlds)
    note("plain decoding")
    workload = make_workload(model, plan.num_prompts, plan.settings, plan.max_tokens)
    workload.find_truth()
    cases = list(engine_cases(plan))
    last_of_its_name = {case.name: case for case in cases}
    for case in cases:
        note(case.label)
        outputs, seconds = run_case(workload, case)
        yield from check_equality(workload, case, outputs, seconds)
        if case is last_of_its_name[case.name] and GREEDY in plan.settings:
            yield check_forcing(workload, case, outputs)
    sampled = [(rule, drafts_for(rule)) for rule in plan.rules]
    sampled += [(json.dumps(config), config) for config in plan.extra]
    for name, config in sampled:
        note(f"sampling with {name}")
        yield check_distribution(workload, name, config, plan.num_samples, FALSE_ALARM / len(sampled))
