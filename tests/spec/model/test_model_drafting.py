"""Drafting with a model. A draft model that is the target itself must never be wrong: that proves its KV stays in step.

Known bugs that these tests would catch: draft KV spoiled after a bonus token, a stale input token after a rejection,
KV left behind while speculation was off."""

from dataclasses import dataclass
from typing import Any

import pytest

from paceline.errors import InvalidOptionError
from paceline.spec.config.method import num_nodes
from paceline.spec.config.speculative_config import SpeculativeConfig
from tests.toy import ToyDecoder, ToyTokenizer, run_all, toy_core, toy_request

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5], [4, 4, 4, 4], list(range(20)), [7, 8] * 9, [0, 1, 2]]


@dataclass
class Twin:
    """A loaded model that computes exactly what the toy target computes."""

    decoder: ToyDecoder
    tokenizer: ToyTokenizer


def twin(sharpness: float = 3.0) -> Twin:
    return Twin(ToyDecoder(sharpness), ToyTokenizer())


def acceptance(core: Any) -> float:
    [stats] = core.speculator.stats().values()
    assert stats["num_drafts"] > 0
    return float(stats["draft_acceptance_rate"])


def batch(**params: Any) -> list[Any]:
    # no EOS inside a draft: what comes after it would count as rejected
    return [toy_request(str(i), p, max_tokens=13, seed=i, ignore_eos=True, **params) for i, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_twin_is_always_right(k: int, params: dict[str, Any]) -> None:
    core = toy_core({"method": "draft_model", "model": twin(), "num_speculative_tokens": k}, num_blocks=256)
    run_all(core, batch(**params))
    assert acceptance(core) == 1.0


@pytest.mark.parametrize("options", [{"num_blocks": 11, "max_num_batched_tokens": 12}, {"num_blocks": 64}], ids=str)
def test_a_twin_is_right_after_preemption_chunks_and_prefix_hits(options: dict[str, Any]) -> None:
    core = toy_core({"method": "draft_model", "model": twin(), "num_speculative_tokens": 4}, **options)
    run_all(core, batch())
    run_all(core, [toy_request("again", PROMPTS[3], ignore_eos=True)])
    assert acceptance(core) == 1.0


def test_a_twin_is_right_after_steps_without_speculation() -> None:
    """Its KV falls behind while it is not asked, and must be computed before its next draft."""
    core = toy_core({"method": "draft_model", "model": twin(), "num_speculative_tokens": 3}, num_blocks=64)
    request = toy_request("a", [1, 2, 3], max_tokens=24, ignore_eos=True)
    core.add_request(request)
    propose = core.speculator.propose
    for i in range(40):
        # every other few steps the engine decodes plainly
        core.speculator.propose = propose if i % 4 < 2 else lambda step: [type(request.draft)()] * len(step.requests)
        core.step()
        if not core.has_requests:
            break
    assert not core.has_requests
    assert acceptance(core) == 1.0


def test_a_twin_with_a_width_schedule_fills_the_tree() -> None:
    core = toy_core({"method": "draft_model", "model": twin(), "tree_widths": [2, 2, 1]}, num_blocks=256)
    run_all(core, batch())
    stats = core.speculator.stats()["draft_model"]
    # the first child is the target's own choice, so every level is accepted until max_tokens cuts the tree
    assert stats["accepted_per_position"][0] == stats["num_drafts"]
    assert stats["mean_acceptance_length"] > 3.0
    assert stats["num_draft_tokens"] <= num_nodes([2, 2, 1]) * stats["num_drafts"]


def test_a_sampled_twin_is_accepted_by_the_classic_rule() -> None:
    """p = q: the rejection rule accepts everything."""
    from paceline.verifiers import make_verifier

    for rule, widths in (("rejection", None), ("block", None), ("multi_step", [2, 1])):
        config = {"method": "draft_model", "model": twin(), "rejection_sample_method": rule, "tree_widths": widths}
        core = toy_core(config, num_blocks=256)
        core.verifier = core.launcher.verifier = make_verifier(rule)
        run_all(core, batch(temperature=1.0))
        stats = core.speculator.stats()["draft_model"]
        assert stats["accepted_per_position"][0] == stats["num_drafts"]


def test_a_worse_model_changes_nothing_but_the_speed() -> None:
    requests, other = batch(temperature=1.0), batch(temperature=1.0)
    core = toy_core({"method": "draft_model", "model": twin(1.0)}, num_blocks=256)
    assert run_all(core, requests) == [run_all(toy_core(), [r])[0] for r in other]
    assert 0.0 < acceptance(core) < 1.0


def test_a_chain_stops_where_its_path_is_unlikely() -> None:
    """By the model's own probabilities: at 1 nearly no path is likely enough, at 0 every one is."""
    drafted = {}
    for min_prob in (0.0, 0.6, 1.0):
        options = {"num_speculative_tokens": 5, "draft_min_prob": min_prob}
        core = toy_core({"method": "draft_model", "model": twin(), **options}, num_blocks=256)
        answers = run_all(core, batch())
        assert answers == run_all(toy_core(num_blocks=256), batch())
        stats = core.speculator.stats()["draft_model"]
        drafted[min_prob] = stats["num_draft_tokens"] / stats["num_drafts"]
        assert acceptance(core) == 1.0  # a twin is right whatever its chances are, and its keys stay in step
    assert drafted[0.0] > drafted[0.6] > drafted[1.0] >= 1.0


def test_sampled_drafts_do_not_stop_by_what_was_drawn() -> None:
    config = {"method": "draft_model", "model": twin(), "rejection_sample_method": "rejection"}
    core = toy_core(config | {"num_speculative_tokens": 3, "draft_min_prob": 1.0}, num_blocks=256)
    requests = batch(temperature=1.0)
    for request in requests:
        core.add_request(request)
    while not all(request.draft for request in requests):
        core.step()
    assert [len(request.draft) for request in requests] == [3] * len(requests)


def test_all_layers_of_the_target_are_always_right() -> None:
    for config in ({"method": "layer_skip", "draft_layers": [0]}, {"method": "draft_model", "num_draft_layers": 1}):
        core = toy_core(config, num_blocks=256)
        run_all(core, batch(temperature=1.0))
        assert acceptance(core) == 1.0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"method": "draft_model", "model": "x", "num_draft_layers": 2}, "takes either 'model'"),
        ({"method": "draft_model", "model": "x", "tree_widths": [9, 9], "node_budget": 20}, "more than the 20 slots"),
        ({"method": "draft_model", "model": "x", "tree_widths": [2, 2], "num_speculative_tokens": 5}, "2 levels"),
        ({"method": "draft_model", "model": "x", "tree_widths": []}, "must not be empty"),
        ({"method": "draft_model", "model": "x", "tree_widths": [2], "rejection_sample_method": "block"}, "chains"),
        (
            {"method": "layer_skip", "draft_sampling": "coupled", "rejection_sample_method": "rejection"},
            "coupled drafts share",
        ),
        ({"method": "layer_skip", "draft_layers": [-1]}, "from 0"),
    ],
    ids=str,
)
def test_bad_options_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidOptionError, match=says):
        SpeculativeConfig.parse(given)


def test_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="layers 0 to 0"):
        toy_core({"method": "layer_skip", "draft_layers": [0, 4]})
    with pytest.raises(InvalidOptionError, match="only 1 layers"):
        toy_core({"method": "draft_model", "num_draft_layers": 2})


def test_classic_rules_get_sampled_drafts() -> None:
    config = SpeculativeConfig.parse({"method": "draft_model", "model": "x", "rejection_sample_method": "rejection"})
    assert config is not None and config.options["draft_sampling"] == "sampled"
