"""What speculation is on a GPU when nobody chose the size of drafts."""

import pytest

from paceline.engine.captured_speculation import where_captured
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.feature.round_sizes import LARGEST, OPTIONS


def test_auto_is_the_trained_drafter_by_price_or_plain_decoding() -> None:
    config, may_fall_back = where_captured(SpeculativeConfig.parse("auto"))
    assert config is not None and config.method == "eagle3" and may_fall_back
    assert config.options["size_by_price"] and config.node_budget == LARGEST.num_nodes


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_a_drafter_with_rounds_takes_the_size_that_pays(method: str) -> None:
    config, may_fall_back = where_captured(SpeculativeConfig.parse({"method": method, "model": "untrained"}))
    assert config is not None and not may_fall_back
    assert (config.method, config.options["model"]) == (method, "untrained")
    assert config.options["size_by_price"] and config.num_speculative_tokens == LARGEST.max_depth


@pytest.mark.parametrize(
    "given",
    [
        {"method": "eagle3", "node_budget": 9},
        {"method": "eagle3", "num_speculative_tokens": 3},
        {"method": "eagle3", "rejection_sample_method": "rejection"},
        {"method": "auto", "members": ["ngram"]},
        {"method": "auto", "node_budget": 5},
        {"method": "ngram"},
        {"method": "none"},
    ],
)
def test_what_the_user_chose_is_kept(given: dict[str, object]) -> None:
    config = SpeculativeConfig.parse(given)
    assert where_captured(config) == (config, False)
    assert where_captured(None) == (None, False)


def test_the_largest_size_holds_all_others() -> None:
    assert all(option.nodes <= LARGEST.num_nodes and option.depth <= LARGEST.max_depth for option in OPTIONS)
