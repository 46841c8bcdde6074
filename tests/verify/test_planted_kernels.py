"""`paceline verify --quick` on kernels that are not batch invariant: claimed or not, large or small, early or late."""

import dataclasses
import json
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.models.loader import LoadedModel
from paceline.ops import native
from paceline.verify import plan as plan_module
from paceline.verify.equality import EngineCase
from paceline.verify.forcing import check_seeded_forcing
from paceline.verify.plan import QUICK, run_plan
from paceline.verify.verdict import BITS, BROKEN, ROUNDING, make_verdict
from paceline.verify.workload import make_workload
from tests.verify.planted import Fault, model_with, rounds_by, wrong_from

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))

# Its answers and bits, drafted in two ways. Rules and distributions do not depend on the kernels.
PLAN = dataclasses.replace(QUICK, num_worlds=4, rules=(), shapes=((3, 2, 1),), methods=("ngram",))
LATE = 65 + 40  # the longest prompt has 65 tokens: nothing differs in the first 40 of any answer


def verify(model: LoadedModel, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr("paceline.models.loader.load_model", lambda name, **kwargs: model)
    monkeypatch.setattr(plan_module, "QUICK", PLAN)
    return main(["verify", "--quick", *options])


def test_quick_looks_at_long_answers_on_eight_prompts() -> None:
    assert QUICK.num_long_tokens >= 64 and QUICK.num_long_prompts >= 8


def test_sound_kernels_prove_bits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(model_with(), monkeypatch) == 0
    assert "proved: bits." in capsys.readouterr().out


@pytest.mark.parametrize("fault", [rounds_by(1e-6), wrong_from(LATE)], ids=["rounding", "late"])
def test_kernels_that_break_their_promise_are_found(
    fault: Fault, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(model_with(fault, claims=True), monkeypatch) == 1
    assert "FAILED: broken. A broken promise" in capsys.readouterr().out


def test_kernels_that_round_by_the_batch_fail_unless_rounding_is_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = model_with(rounds_by(1e-6), claims=False)
    assert verify(model, monkeypatch) == 1
    shown = capsys.readouterr().out
    assert "FAILED: agreement within rounding only." in shown and "--batch-invariant" in shown
    file = tmp_path / "proof.json"
    assert verify(model, monkeypatch, "--allow-rounding", "--json", str(file)) == 0
    assert "proved: agreement within rounding only." in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["passed"] and record["verdict"]["proved"] == ROUNDING
    compared = [check for check in record["checks"] if check["kind"] in ("greedy", "seeded")]
    assert any(check["figures"]["num_differing"] > 0 for check in compared)
    assert all(low <= high for low, high in (check["figures"]["interval"] for check in compared))


def test_rounding_excuses_no_wrong_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(model_with(wrong_from(LATE), claims=False), monkeypatch, "--allow-rounding") == 1
    assert "FAILED: broken. Rounding does not explain it (failed: forcing)" in capsys.readouterr().out


def test_a_fault_after_forty_tokens_is_found_in_answers_and_plain_batching_is_blamed() -> None:
    checks = list(run_plan(PLAN, model_with(wrong_from(LATE))))
    failed = [check for check in checks if not check.passed]
    plain = [check for check in failed if check.kind == "greedy" and check.case.startswith("plain")]
    assert plain and plain[0].figures["first_difference"] >= 40
    assert not any("12 tokens" in check.case for check in failed)  # what was looked at before finds nothing
    assert make_verdict(checks, promised=True, allow_rounding=True).proved == BROKEN


@pytest.mark.parametrize("claims", [True, False])
def test_forcing_tells_a_wrong_seeded_token_from_the_winner_of_its_race(claims: bool) -> None:
    model = model_with(lambda logits, positions: logits, claims=claims)
    workload = make_workload(model, 2, ["T=1", "penalties", "T=0.7 top_p"], 8, ignore_eos=True)
    workload.find_truth()
    case = EngineCase("plain", None, 1)
    right = check_seeded_forcing(workload, case, workload.truth)
    assert right is not None and right.passed and right.figures["num_tokens"] == 2 * 2 * 8  # not under top_p
    wrong = [[*answer[:-1], (answer[-1] + 2) % 96] for answer in workload.truth]
    found = check_seeded_forcing(workload, case, wrong)
    assert found is not None and not found.passed and not found.explained_by_rounding
    assert found.figures["num_off"] == 4


def test_the_bits_of_rows_show_what_no_answer_does() -> None:
    """So little that no token changes, in kernels that claim nothing."""
    checks = list(run_plan(PLAN, model_with(lambda logits, positions: logits * (1 + 2.0**-22), claims=False)))
    assert {check.kind for check in checks if not check.passed} == {"bits"}
    assert make_verdict(checks, promised=False, allow_rounding=False).proved == ROUNDING
    assert make_verdict([], promised=True, allow_rounding=False).proved == BITS
