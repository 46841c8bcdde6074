"""What speculation is where passes are captured, that is on a GPU, when nobody chose the size of drafts.

Only drafts that are made in rounds (engine/rounds.py) leave the host a pass behind. So `auto` is the trained drafter in
rounds there, or plain decoding where the target has none; and a drafter that has rounds, chosen by its name, takes the
size that pays (spec/round_sizes.py).
"""

from dataclasses import replace

from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.round_sizes import OPTIONS, largest_of

AUTO = "eagle3"


def where_captured(config: SpeculativeConfig | None) -> tuple[SpeculativeConfig | None, bool]:
    """The configuration to use, and whether plain decoding may take its place where it cannot be built."""
    if config is None or config.is_sized or config.rejection_sample_method != "sample_match":
        return config, False
    if config.method == "auto" and config.options.get("members") is None:
        drafter = SpeculativeConfig.parse({"method": AUTO})
        assert drafter is not None
        return _by_price(drafter), True
    if config.method in OPTIONS and config.options.get("draft_sampling") != "sampled":
        return _by_price(config), False
    return config, False


def _by_price(config: SpeculativeConfig) -> SpeculativeConfig:
    largest = largest_of(config.method)
    chosen: dict[str, bool | int | float] = {
        "size_by_price": True,
        "node_budget": largest.num_nodes,
        "num_speculative_tokens": largest.max_depth,
    }
    if "draft_min_prob" in config.options:
        chosen["draft_min_prob"] = 0.0  # a row costs next to nothing: the budget is filled
    return replace(config, options={**config.options, **chosen})
