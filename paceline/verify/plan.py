"""What to look at: small, usual or large.

Two workloads: a grid of methods, trees, batch sizes, chunkings and settings with short answers, and long answers in one
batch, because a difference of rounding needs tens of tokens to show."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidOptionError
from paceline.models.loader import LoadedModel
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.methods import PROPOSERS
from paceline.verify.bits import check_bits
from paceline.verify.check import Check
from paceline.verify.distribution import check_distribution
from paceline.verify.equality import EngineCase, check_equality, run_case
from paceline.verify.forcing import check_forcing, check_seeded_forcing
from paceline.verify.rules import check_rules
from paceline.verify.workload import GREEDY, LONG_SETTINGS, SETTINGS, Workload, make_workload, tokens_of

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
    num_long_prompts: int  # greedy and seeded, in one batch, against plain decoding alone and in that batch
    num_long_tokens: int  # of each of their answers: a difference may come late
    extra: tuple[Mapping[str, Any], ...] = ()  # whole speculative_configs of the user's


QUICK = Plan(
    methods=("ngram", "auto"),
    shapes=("chain", (3, 2, 1)),
    batch_sizes=(1, 16),
    chunks=(None,),
    settings=("greedy", "T=1", "T=0.7 top_p", "penalties", "JSON schema", "greedy, JSON schema"),
    num_prompts=3,
    max_tokens=12,
    num_worlds=12,
    num_samples=240,
    rules=("sample_match", "rejection"),
    num_long_prompts=8,
    num_long_tokens=64,
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
    num_long_prompts=24,
    num_long_tokens=128,
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
    num_long_prompts=64,
    num_long_tokens=256,
)


def configurations(plan: Plan) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for shape in plan.shapes:
        oracle = {"method": "oracle", "shape": shape, "accuracy": 0.7, "num_speculative_tokens": 6, "node_budget": 24}
        yield f"oracle {shape if isinstance(shape, str) else list(shape)}", oracle
    yield from ((name, example_config(name)) for name in plan.methods)
    yield from ((str(config.get("method", "draft_model")), config) for config in plan.extra)


def engine_cases(plan: Plan) -> Iterator[EngineCase]:
    """Short answers, in every way."""
    for name, config in configurations(plan):
        for batch_size in plan.batch_sizes:
            for chunk in plan.chunks:
                yield EngineCase(name, config, batch_size, chunk)


def long_cases(plan: Plan) -> Iterator[EngineCase]:
    """Long answers, all in one batch; plainly first, to tell what batching alone changes."""
    batch_size = min(64, plan.num_long_prompts * len(LONG_SETTINGS))
    yield EngineCase("plain", None, batch_size)
    yield from (EngineCase(name, config, batch_size) for name, config in configurations(plan))


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
    yield from _check_long_answers(plan, model, note)
    note("plain decoding, short answers")
    workload = make_workload(model, plan.num_prompts, plan.settings, plan.max_tokens)
    workload.find_truth()
    cases = list(engine_cases(plan))
    last_of_its_name = {case.name: case for case in cases}
    for case in cases:
        note(case.label)
        yield from _check_case(workload, case, always_force=case is last_of_its_name[case.name])
    sampled = [(rule, drafts_for(rule)) for rule in plan.rules]
    sampled += [(json.dumps(config), config) for config in plan.extra]
    for name, config in sampled:
        note(f"sampling with {name}")
        yield check_distribution(workload, name, config, plan.num_samples, FALSE_ALARM / len(sampled))


def _check_long_answers(plan: Plan, model: LoadedModel, note: Callable[[str], None]) -> Iterator[Check]:
    note("plain decoding, long answers, one at a time")
    workload = make_workload(model, plan.num_long_prompts, LONG_SETTINGS, plan.num_long_tokens, ignore_eos=True)
    workload.find_truth()
    note("bits")
    yield from check_bits(workload)
    alone = EngineCase("plain", None, 1)
    yield from _force(workload, alone, workload.truth, {"greedy", "seeded"})
    for case in long_cases(plan):
        note(f"{case.label}, {plan.num_long_tokens} tokens")
        yield from _check_case(workload, case, always_force=False)


def _check_case(workload: Workload, case: EngineCase, *, always_force: bool) -> Iterator[Check]:
    """Equality, and teacher forcing of what differs. What is equal to the truth was forced with it."""
    outputs, seconds = run_case(workload, case)
    checks = list(check_equality(workload, case, outputs, seconds))
    yield from checks
    kinds = {check.kind for check in checks if not check.passed} | ({"greedy"} if always_force else set())
    yield from _force(workload, case, tokens_of(outputs), kinds)


def _force(workload: Workload, case: EngineCase, answers: list[list[int]], kinds: set[str]) -> Iterator[Check]:
    if "greedy" in kinds and GREEDY in workload.settings:
        yield check_forcing(workload, case, answers)
    if "seeded" in kinds:
        forced = check_seeded_forcing(workload, case, answers)
        yield from () if forced is None else (forced,)
