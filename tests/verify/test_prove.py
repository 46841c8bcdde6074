"""The proof can fail: every kind of check is shown a broken engine or rule, and the command exits accordingly."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from paceline.errors import InvalidOptionError
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.verifiers import multi_step
from paceline.verify import distribution, rules
from paceline.verify import plan as plan_module
from paceline.verify.check import Check
from paceline.verify.distribution import chi_square, chi_square_tail, excess_total_variation
from paceline.verify.equality import EngineCase, check_equality
from paceline.verify.forcing import check_forcing
from paceline.verify.plan import QUICK, THOROUGH, USUAL, engine_cases, example_config, long_cases
from paceline.verify.workload import Workload


def test_the_rules_pass_and_a_broken_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = list(rules.check_rules(8))
    assert {check.case.partition(",")[0] for check in checks} == {
        "sample_match",
        "rejection",
        "multi_step",
        "block",
        "spechub",
    }
    assert all(check.passed and check.figures["num_worlds"] > 4 for check in checks)
    monkeypatch.setattr(multi_step, "residual", lambda p, q: p)
    broken = {check.case: check.passed for check in rules.check_rules(8)}
    assert not broken["rejection"] and not broken["multi_step"]
    assert broken["sample_match"] and broken["block"]


def output_of(token_ids: list[int]) -> RequestOutput:
    return RequestOutput("r", None, [1], [CompletionOutput(0, "", token_ids)], finished=True)


def workload_of(truth: list[list[int]], batch_invariant: bool = True) -> Workload:
    import torch

    model: Any = SimpleNamespace(decoder=SimpleNamespace(batch_invariant=batch_invariant, dtype=torch.float32))
    return Workload(model, [[1, 2]], ["greedy", "T=1"], 3, truth)


CASE = EngineCase("oracle", {"method": "oracle"}, 4, 32)


def test_equality_sees_one_token_in_the_right_column() -> None:
    workload = workload_of([[5, 6, 7], [8, 9, 9]])
    same = list(check_equality(workload, CASE, [output_of([5, 6, 7]), output_of([8, 9, 9])], 1.0))
    assert [(check.kind, check.passed) for check in same] == [("greedy", True), ("seeded", True)]
    greedy, seeded = check_equality(workload, CASE, [output_of([5, 6, 7]), output_of([8, 9, 1])], 1.0)
    assert greedy.passed and not seeded.passed
    assert seeded.figures["differing"][0]["first_difference"] == 2
    shorter, _ = check_equality(workload, CASE, [output_of([5, 6]), output_of([8, 9, 9])], 1.0)
    assert not shorter.passed and shorter.figures["differing"][0]["first_difference"] == 2


def test_a_rule_that_promises_no_seeded_equality_is_not_asked_for_it() -> None:
    case = EngineCase("draft_model", {"method": "draft_model", "rejection_sample_method": "rejection"})
    workload = workload_of([[5, 6, 7], [8, 9, 9]])
    checks = list(check_equality(workload, case, [output_of([5, 6, 7]), output_of([1, 1, 1])], 1.0))
    assert [(check.kind, check.passed) for check in checks] == [("greedy", True)]


def sampled_check(token_of: Any, num_samples: int, monkeypatch: pytest.MonkeyPatch) -> Check:
    """The distribution check on an engine that emits token 0 and then token_of(seed), where p is half and half."""

    def generate(prompts: Any, params: Any) -> list[RequestOutput]:
        return [output_of([0, token_of(p.seed), 0]) for p in params]

    engine = SimpleNamespace(generate=generate)
    monkeypatch.setattr(Workload, "engine", lambda self, *args, **options: engine)
    monkeypatch.setattr(distribution, "model_distribution", lambda plain, tokens: {3: 0.5, 4: 0.5})
    return distribution.check_distribution(workload_of([]), "rule", {"method": "ngram"}, num_samples, 1e-6)


def test_a_distribution_passes_fails_or_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    fair = sampled_check(lambda seed: 3 + seed % 2, 400, monkeypatch)
    assert fair.passed and fair.figures["num_samples"] == 400 and fair.figures["degrees_of_freedom"] == 1
    assert not sampled_check(lambda seed: 3 + (seed % 3 == 0), 400, monkeypatch).passed
    assert not sampled_check(lambda seed: 5 - (seed % 50 != 0) - seed % 2, 400, monkeypatch).passed  # impossible token
    few = sampled_check(lambda seed: 3 + seed % 2, 10, monkeypatch)
    assert not few.passed and "too few" in few.finding


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_difference_fails_everywhere_and_rounding_excuses_it_only_where_no_bits_are_promised(
    batch_invariant: bool,
) -> None:
    workload = workload_of([[5, 6, 7], [8, 9, 9]], batch_invariant=batch_invariant)
    greedy, seeded = check_equality(workload, CASE, [output_of([5, 6, 1]), output_of([8, 9, 9])], 1.0)
    assert not greedy.passed and greedy.explained_by_rounding is not batch_invariant
    assert ("not promised" in greedy.finding) is not batch_invariant
    assert "1 of 1 (100 %, 95 % interval 21 to 100 %) answers differ, the first at token 2" in greedy.finding
    assert seeded.passed and not seeded.explained_by_rounding and seeded.figures["first_difference"] is None


@pytest.mark.parametrize(
    ("gap", "batch_invariant", "passes"),
    [(0.0, True, True), (1e-6, True, False), (1e-6, False, True), (0.1, False, False)],
)
def test_forcing_allows_ties_within_rounding_only(
    gap: float, batch_invariant: bool, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries: list[TokenLogprobs | None] = [None, None, TokenLogprobs(5, -1.0 - gap, 2, {4: -1.0})]
    answer = RequestOutput("r", None, [], [], finished=True, prompt_token_logprobs=entries)
    engine = SimpleNamespace(generate=lambda prompt, params: [answer])
    monkeypatch.setattr(Workload, "engine", lambda self, **options: engine)
    assert check_forcing(workload_of([[5], [8]], batch_invariant), CASE, [[5], [8]]).passed == passes


def test_the_statistics_agree_with_their_textbook_values() -> None:
    assert chi_square_tail(3.841, 1) == pytest.approx(0.05, abs=1e-4)
    assert chi_square_tail(18.307, 10) == pytest.approx(0.05, abs=1e-4)
    assert chi_square_tail(0.0, 0) == 1.0
    expected = {0: 0.5, 1: 0.3, 2: 0.2}
    assert chi_square(Counter({0: 50, 1: 30, 2: 20}), expected) == (pytest.approx(0.0), 2)
    assert chi_square(Counter({0: 60, 1: 20, 2: 20}), expected)[0] == pytest.approx(2 + 100 / 30)
    assert chi_square(Counter({0: 50, 1: 30, 7: 20}), expected)[0] == math.inf
    assert chi_square_tail(math.inf, 3) == 0.0
    _, freedom = chi_square(Counter({0: 10, 1: 7, 2: 3}), expected)
    assert freedom == 1  # the third token is too rare for a cell of its own


def test_total_variation_fails_only_for_another_distribution() -> None:
    expected = {0: 0.5, 1: 0.5}
    assert excess_total_variation(Counter({0: 520, 1: 480}), expected, 1e-6) < 0
    assert excess_total_variation(Counter({0: 650, 1: 350}), expected, 1e-6) > 0


def test_plans_grow_and_name_only_what_exists() -> None:
    sizes = [len(list(engine_cases(plan))) for plan in (QUICK, USUAL, THOROUGH)]
    assert sizes == sorted(sizes) and sizes[0] >= 6
    for case in engine_cases(THOROUGH):
        assert SpeculativeConfig.parse(case.speculative) is not None
    for rule in USUAL.rules:
        SpeculativeConfig.parse(plan_module.drafts_for(rule))
    with pytest.raises(InvalidOptionError, match="unknown method 'telepathy'"):
        example_config("telepathy")


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(execution="a stand-in", decoder=SimpleNamespace(batch_invariant=True))
    monkeypatch.setattr("paceline.models.loader.load_model", lambda name, **options: model)


@pytest.mark.parametrize("passed", [True, False])
def test_the_command_reports_and_exits(
    passed: bool, no_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def checks(plan: Any, model: Any, note: Any) -> Iterator[Check]:
        note("something")
        yield Check("greedy", "oracle [3, 2], batch 1", True, "0 of 3 outputs differ", {"num_tokens": 9})
        yield Check("seeded", "oracle [3, 2], batch 1", passed, "1 of 3 outputs differ")

    monkeypatch.setattr(plan_module, "run_plan", checks)
    file = tmp_path / "proof.json"
    assert main(["verify", "--quick", "--json", str(file)]) == (0 if passed else 1)
    shown = capsys.readouterr()
    assert "oracle [3, 2], batch 1" in shown.out and "something" in shown.err
    assert ("all 2 checks passed" if passed else "1 of 2 checks FAILED") in shown.out
    assert ("proved: bits." if passed else "FAILED: broken. A broken promise") in shown.out
    record = json.loads(file.read_text())
    assert record["passed"] is passed and record["checks"][0]["figures"] == {"num_tokens": 9}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "ngram,telepathy"], "unknown 'telepathy'"),
        (["--settings", "hot"], "choose from greedy"),
        (["--rules", "typical"], "unknown 'typical'"),
        (["--shapes", "4xtwo"], "got 'two'"),
        (["--batch-sizes", "0"], "from 1 up, got '0'"),
        (["--chunks", "whole,-1"], "from 1 up, got '-1'"),
        (["--speculative-config", "{"], "is not JSON"),
        (["--speculative-config", "[]"], "must be a JSON object"),
        (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": -3}'], "num_speculative_tokens"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    arguments: list[str], message: str, no_model: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_command_overlays_the_plan(no_model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(plan_module, "run_plan", lambda plan, model, note: seen.append(plan) or iter(()))
    arguments = "--methods none --shapes chain,4x2 --batch-sizes 1,3 --chunks whole,40 --settings greedy --rules block"
    sizes = "--prompts 2 --max-tokens 7 --samples 11 --long-prompts 5 --long-tokens 99"
    main(["verify", "--quick", *arguments.split(), *sizes.split(), "--speculative-config", '{"method": "ngram"}'])
    (plan,) = seen
    assert plan.methods == () and plan.shapes == ("chain", (4, 2)) and plan.batch_sizes == (1, 3)
    assert plan.chunks == (None, 40) and plan.settings == ("greedy",) and plan.rules == ("block",)
    assert (plan.num_prompts, plan.max_tokens, plan.num_samples) == (2, 7, 11)
    assert (plan.num_long_prompts, plan.num_long_tokens) == (5, 99)
    assert [case.name for case in engine_cases(plan)][-1] == "ngram"
    assert [case.label for case in long_cases(plan)][:2] == ["plain, batch 10", "oracle chain, batch 10"]
    main(["verify", "--quick", "--methods", "all"])
    assert {"eagle", "eagle3", "merge", "suffix"} <= set(seen[-1].methods) and "oracle" not in seen[-1].methods


@pytest.mark.slow
def test_quick_on_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--quick"]) == 0
    assert "proved: bits." in capsys.readouterr().out
