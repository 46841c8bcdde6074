"""`auto` without options: which members it has, and what happens where it cannot run."""

import logging
from typing import Any

import pytest

from paceline.core.sampling_params import SamplingParams
from paceline.engine import build
from paceline.errors import InvalidOptionError, ModelLoadError
from paceline.llm import LLM
from paceline.models.loader import LoadedModel
from paceline.spec.auto.controller import AutoProposer
from paceline.spec.auto.default_members import available_members
from paceline.spec.config.request_choice import choose
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.engine_parts import EngineParts
from paceline.spec.methods import TRAINING_FREE, build_proposer
from paceline.spec.proposer import Budget, Proposer
from tests.bench.toy_llm import toy_model

LIMITS: dict[str, Any] = {"max_num_seqs": 4, "num_kv_blocks": 64, "max_num_batched_tokens": 64}


def auto_of(llm: LLM) -> AutoProposer:
    proposer = llm.engine.core.speculator.proposers["auto"]
    assert isinstance(proposer, AutoProposer)
    return proposer


def test_without_a_configuration_auto_uses_the_methods_that_work_on_any_target() -> None:
    llm = LLM(toy_model(), **LIMITS)
    assert tuple(auto_of(llm).drafters.members) == TRAINING_FREE
    plain = LLM(toy_model(), {"method": "none"}, **LIMITS)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    tokens = [engine.generate("abcabcabc", params)[0].outputs[0].token_ids for engine in (llm, plain)]
    assert tokens[0] == tokens[1]


def test_the_shipped_drafter_is_a_member_where_it_fits_the_target(smollm2_float32: LoadedModel) -> None:
    services = EngineParts(vocab_size=49152, max_model_len=64, decoder=smollm2_float32.decoder)  # type: ignore[arg-type]
    members = available_members(services, Budget(24, 16))
    assert [member.method for member in members] == ["prediction", "grammar", "suffix", "eagle3"]
    assert members[-1].node_budget == 8 and members[0].node_budget == 24
    small = available_members(services, Budget(2, 2))
    assert {member.node_budget for member in small} == {2}


@pytest.mark.parametrize("error", [ModelLoadError("too old"), MemoryError("too large")], ids=str)
def test_a_shipped_drafter_that_cannot_be_built_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def build_others(method: str, *arguments: Any) -> Proposer:
        if method == "eagle3":
            raise error
        return build_proposer(method, *arguments)

    monkeypatch.setattr("paceline.spec.auto.default_members._has_shipped", lambda kind, services: True)
    monkeypatch.setattr("paceline.spec.methods.build_proposer", build_others)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        llm = LLM(toy_model(), **LIMITS)
    assert tuple(auto_of(llm).drafters.members) == TRAINING_FREE
    (warning,) = caplog.records
    assert warning.message == f"auto drafts without the shipped drafter, which does not work here ({error})"


@pytest.mark.parametrize("kind", [ModelLoadError, RuntimeError, MemoryError])
def test_where_auto_cannot_run_the_engine_says_so_and_decodes_plainly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    def fail(services: EngineParts, rounds: list[Any]) -> dict[int, float]:
        raise kind("no such kernel")

    monkeypatch.setattr("paceline.spec.auto.controller.calibrate", fail)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        llm = LLM(toy_model(), **LIMITS)
    assert [record.message for record in caplog.records] == [
        "speculation is off: 'auto' does not work here (no such kernel)"
    ]
    assert not llm.engine.core.speculator.proposers
    assert llm.generate("abc", SamplingParams(max_tokens=4))[0].finished
    with pytest.raises(kind):  # asked for by name it is an error
        LLM(toy_model(), build.DEFAULT_SPECULATION, **LIMITS)


def test_classic_rules_leave_out_members_that_sample_their_drafts() -> None:
    config = SpeculativeConfig.parse({"method": "auto", "rejection_sample_method": "multi_step"})
    assert config is not None
    assert tuple(member.method for member in config.options["members"]) == TRAINING_FREE


def test_a_request_with_a_prediction_stays_with_auto() -> None:
    config = SpeculativeConfig.parse({"method": "auto"})
    assert choose(config, {"prediction": "the text"}).method == "auto"
    with pytest.raises(InvalidOptionError, match="must be a list"):
        SpeculativeConfig.parse({"method": "auto", "members": "suffix"})
