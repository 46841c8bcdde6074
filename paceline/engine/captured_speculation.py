"""What speculation is where passes are captured, that is on a GPU, when nobody chose the size of drafts.

Only drafts that are made in rounds (engine/rounds.py) leave the host a pass behind. So `auto` is the trained drafter in
rounds there, or plain decoding where the target has none; and a drafter that has rounds, chosen by its name, takes the
size that pays (spec/feature/round_sizes.py).
"""

from dataclasses import replace

from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.feature.round_sizes import LARGEST

HAVE_ROUNDS = ("eagle3", "eagle")
BY_PRICE = {
    "size_by_price": True,
    "node_budget": LARGEST.num_nodes,
    "num_speculative_tokens": LARGEST.max_depth,
    "draft_min_prob": 0.0,  # a row costs next to nothing: the budget is filled
}


def where_captured(config: SpeculativeConfig | None) -> tuple[SpeculativeConfig | None, bool]:
    """The configuration to use, and whether plain decoding may take its place where it cannot be built."""
    if config is None or config.is_sized or config.rejection_sample_method != "sample_match":
        return config, False
    if config.method == "auto" and config.options.get("members") is None:
        drafter = SpeculativeConfig.parse({"method": HAVE_ROUNDS[0]})
        assert drafter is not None
        return replace(drafter, options={**drafter.options, **BY_PRICE}), True
    if config.method in HAVE_ROUNDS and config.options["draft_sampling"] != "sampled":
        return replace(config, options={**config.options, **BY_PRICE}), False
    return config, False
