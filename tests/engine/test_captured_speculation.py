"""What speculation is on a GPU when nobody chose the size of drafts."""

import pytest

from paceline.engine.captured_speculation import where_captured
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.round_sizes import OPTIONS, largest_of


def test_auto_is_the_trained_drafter_by_price_or_plain_decoding() -> None:
    config, may_fall_back = where_captured(SpeculativeConfig.parse("auto"))
    assert config is not None and config.method == "eagle3" and may_fall_back
    assert config.options["size_by_price"] and config.node_budget == largest_of("eagle3").num_nodes


@pytest.mark.parametrize("method", OPTIONS)
def test_a_drafter_with_rounds_takes_the_size_that_pays(method: str) -> None:
    others: dict[str, dict[str, object]] = {
        "ngram": {"prompt_lookup_max": 5},
        "layer_skip": {"draft_sampling": "greedy"},
    }
    own = others.get(method, {"model": "untrained"})
    config, may_fall_back = where_captured(SpeculativeConfig.parse({"method": method, **own}))
    assert config is not None and not may_fall_back
    assert config.method == method and own.items() <= config.options.items()
    assert config.options["size_by_price"] and config.num_speculative_tokens == largest_of(method).max_depth


@pytest.mark.parametrize(
    "given",
    [
        {"method": "eagle3", "node_budget": 9},
        {"method": "eagle3", "num_speculative_tokens": 3},
        {"method": "eagle3", "rejection_sample_method": "rejection"},
        {"method": "auto", "members": ["ngram"]},
        {"method": "auto", "node_budget": 5},
        {"method": "ngram", "num_speculative_tokens": 4},
        {"method": "suffix"},
        {"method": "none"},
    ],
)
def test_what_the_user_chose_is_kept(given: dict[str, object]) -> None:
    config = SpeculativeConfig.parse(given)
    assert where_captured(config) == (config, False)
    assert where_captured(None) == (None, False)


@pytest.mark.parametrize("method", OPTIONS)
def test_the_largest_size_holds_all_others(method: str) -> None:
    nodes, depth = largest_of(method)[:2]
    assert all(option.nodes <= nodes and option.depth <= depth for option in OPTIONS[method])
