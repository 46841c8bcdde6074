"""`speculative_config` and a request's own choice: what is taken, what is refused and how the refusal helps."""

from typing import Any

import pytest

from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidOptionError
from paceline.spec.config.request_choice import PLAIN, choose
from paceline.spec.config.rule_options import RULE_OPTIONS
from paceline.spec.config.speculative_config import REJECTION_SAMPLE_METHODS, SpeculativeConfig
from paceline.spec.methods import PROPOSERS
from paceline.verifiers import VERIFIERS, make_verifier
from paceline.verifiers.rule_verifier import RuleVerifier
from tests.spec.replaying import request, speculator


def parse(given: Any) -> SpeculativeConfig:
    config = SpeculativeConfig.parse(given)
    assert config is not None
    return config


def test_none_parses_to_no_configuration() -> None:
    assert SpeculativeConfig.parse(None) is None


def test_vllm_keys_and_defaults() -> None:
    config = parse({"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4, "prompt_lookup_min": 2})
    assert config.options == {
        "num_speculative_tokens": 6,
        "node_budget": 6,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
        "size_by_price": False,
    }
    assert parse(config) is config
    assert parse("suffix").method == "suffix"
    assert parse({"model": "some/model"}).method == "draft_model"
    assert parse({"method": "ngram", "prompt_lookup_max": None}).options["prompt_lookup_max"] == 3


def test_every_row_parses_with_its_defaults_and_says_what_it_does() -> None:
    for name, row in PROPOSERS.items():
        config = parse({"method": name, **row.example})
        assert set(config.options) == set(row.options)
        assert row.summary and all(option.meaning for option in row.options.values())


def test_the_rules_are_the_verifiers() -> None:
    assert set(REJECTION_SAMPLE_METHODS) == set(VERIFIERS)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"method": "ngramm"}, r"Did you mean 'ngram'\? Known: .*suffix"),
        ({"method": "ngram", "prompt_lookup_maximum": 4}, "Did you mean 'prompt_lookup_max'"),
        ({"method": "ngram", "zzz": 1}, "unknown key 'zzz'.*Known: "),
        ({"method": "ngram", "members": ["suffix"]}, "'members' does not belong to method 'ngram' but to merge"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "whole number from 1 to 128, got 0"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "got 2.5"),
        ({"method": "ngram", "num_speculative_tokens": True}, "got True"),
        ({"method": "ngram", "prompt_lookup_min": 9}, "above prompt_lookup_max 3"),
        ({"method": "ngram", "node_budget": 5000}, "node_budget must be a whole number"),
        (
            {"method": "ngram", "epsilon": 0.2},
            "'epsilon' is an option of rejection_sample_method 'typical', but the rule",
        ),
        ({"method": "ngram", "rejection_sample_method": "typical", "epsilon": 0}, "epsilon must be a number above 0"),
        ({"method": "ngram", "rejection_sample_method": "typical", "alpha": 1.5}, "at most 1.0, got 1.5"),
        ({"method": "ngram", "rejection_sample_method": "typical", "alpha": "high"}, "alpha must be a number"),
        ({"method": "ngram", "rejection_sample_method": "strict"}, "one of sample_match, rejection"),
        ({"method": "suffix", "rejection_sample_method": "rejection"}, "verifies chains"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": float("nan")}, "number from 0.0 to 1.0"),
        ({"method": "merge", "members": ["ngram", "sufix"]}, "Did you mean 'suffix'"),
        ({"method": "merge", "members": []}, "must be a list such as"),
        ({"method": "merge", "members": "ngram"}, "must be a list such as"),
        ({"method": "merge", "members": ["merge"]}, "other than"),
        ({"method": "merge", "members": ["lookahead"]}, "other than"),
        ({"method": "merge", "members": [{"method": "ngram", "prompt_lookup_min": 0}]}, "prompt_lookup_min"),
        ({"method": "lookahead", "window_size": 0}, "window_size must be"),
        ({"method": "lookahead", "ngram_size": 1}, "ngram_size must be"),
        ({"method": "lookahead", "guess_set_size": 65}, "guess_set_size must be"),
        ({"method": "lookahead", "window_size": 64, "ngram_size": 16}, "node_budget must be"),
        ({"method": "lookahead", "node_budget": 8}, "need 42 nodes and depth 10"),
        ({"method": "recycling", "recycling_top_k": 0}, "recycling_top_k"),
        ({"num_speculative_tokens": 4}, "needs 'method'"),
        ({"method": 3}, "needs 'method'"),
        (["ngram"], "must be a dictionary"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_with_the_reason(given: Any, says: str) -> None:
    with pytest.raises(InvalidOptionError, match=says):
        SpeculativeConfig.parse(given)


def test_a_rule_s_own_options_reach_the_verifier() -> None:
    config = parse({"method": "ngram", "rejection_sample_method": "typical", "epsilon": 0.5})
    assert config.rule_options == {"epsilon": 0.5, "alpha": 0.3}
    assert "epsilon" not in config.options
    verifier = make_verifier(config.rejection_sample_method, **config.rule_options)
    assert isinstance(verifier, RuleVerifier) and verifier.rule.keywords == {"epsilon": 0.5, "alpha": 0.3}  # type: ignore[attr-defined]
    assert parse("ngram").rule_options == {}


def test_a_rules_defaults_are_those_of_its_verifier() -> None:
    defaults = {key: option.default for key, option in RULE_OPTIONS["typical"].items()}
    assert make_verifier("typical").rule.keywords == defaults  # type: ignore[attr-defined]


def test_members_share_the_size_of_the_whole_unless_they_have_their_own() -> None:
    config = parse({"method": "merge", "node_budget": 20, "members": ["ngram", {"method": "suffix", "node_budget": 3}]})
    assert [member.node_budget for member in config.options["members"]] == [20, 3]


def test_a_request_chooses_for_itself() -> None:
    engine = parse({"method": "ngram", "num_speculative_tokens": 4})
    assert choose(None, None) == PLAIN
    assert choose(engine, None).num_speculative_tokens == 4
    assert choose(engine, {"off": True}) == PLAIN
    assert choose(engine, {"off": False}).method == "ngram"
    assert choose(engine, {"num_speculative_tokens": 0}) == PLAIN
    longer = choose(engine, {"num_speculative_tokens": 9})
    assert (longer.num_speculative_tokens, longer.node_budget) == (9, 9)
    assert choose(engine, {"node_budget": 2}).node_budget == 2
    assert choose(None, {"method": "suffix"}).method == "suffix"
    assert choose(engine, {"prediction": "x"}).method == "prediction"
    with_member = parse({"method": "merge", "members": ["ngram", "prediction"]})
    assert choose(with_member, {"prediction": "x"}).method == "merge"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"of": True}, "Did you mean 'off'"),
        ({"off": "yes"}, "True or False"),
        ({"method": "nope"}, "unknown"),
        ({"method": 1}, "must be a name"),
        ({"method": "layer_skip"}, "must be set up with the engine"),
        ({"num_speculative_tokens": -1}, "from 0 to 128"),
        ({"node_budget": 10**6}, "from 0 to 512"),
        ("off", "must be a dictionary"),
    ],
    ids=str,
)
def test_a_bad_choice_is_refused_on_arrival(given: Any, says: str) -> None:
    spec = speculator({"method": "ngram"})
    with pytest.raises(InvalidOptionError, match=says):
        spec.check_request(SamplingParams(speculative=given))


def test_a_plain_engine_still_lets_a_request_draft() -> None:
    from paceline.spec.proposer import StepContext

    spec = speculator({"method": "none"})
    own = request([1, 2, 1, 2, 1], speculative={"method": "ngram", "num_speculative_tokens": 2})
    other = request([1, 2, 1, 2, 1], "b")
    drafts = spec.propose(StepContext([own, other]))
    assert [tree.token_ids for tree in drafts] == [[2, 1], []]
