"""The figures of drafting, read while the engine goes on."""

import json
from typing import Any

from paceline.core.draft_counts import DraftCounts
from paceline.core.tree import DraftTree
from paceline.spec.statistics import MethodStats


def test_a_member_may_be_added_while_the_figures_are_read() -> None:
    stats = MethodStats()

    class Interrupted(DraftCounts):
        def to_dict(self) -> dict[str, Any]:
            stats.counts.by_member["suffix"] = DraftCounts()  # as the engine's thread may, at any moment
            return DraftCounts.to_dict(self)

    stats.counts.by_member["ngram"] = Interrupted(num_draft_tokens=3)
    assert stats.to_dict()["by_member"]["ngram"]["num_draft_tokens"] == 3
    assert set(stats.to_dict()["by_member"]) == {"ngram", "suffix"}


def test_a_methods_figures_have_their_names_and_counts_can_be_read_back_from_them() -> None:
    stats = MethodStats(num_proposals=3, draft_s=0.5)
    tree = DraftTree([1, 2], [-1, 0], members=[("ngram",), ("suffix",)])
    stats.counts.count(tree, [0], 2)
    nodes = {"num_draft_tokens": 2, "num_accepted_tokens": 1, "num_wasted_tokens": 1, "draft_acceptance_rate": 0.5}
    expected = nodes | {
        "accepted_per_position": [1],
        "num_steps": 1,
        "num_emitted_tokens": 2,
        "num_drafts": 1,
        "num_proposals": 3,
        "mean_acceptance_length": 2.0,
        "draft_s": 0.5,
        "by_member": {
            "ngram": {
                "num_draft_tokens": 1,
                "num_accepted_tokens": 1,
                "num_wasted_tokens": 0,
                "draft_acceptance_rate": 1.0,
                "accepted_per_position": [1],
            },
            "suffix": {
                "num_draft_tokens": 1,
                "num_accepted_tokens": 0,
                "num_wasted_tokens": 1,
                "draft_acceptance_rate": 0.0,
                "accepted_per_position": [],
            },
        },
    }
    assert json.dumps(stats.to_dict()) == json.dumps(expected), "the order of the keys is part of the output"
    read = DraftCounts.from_dict(json.loads(json.dumps(expected)))
    assert read.to_dict() == stats.counts.to_dict() and read.members_dict() == stats.counts.members_dict()
    assert (read.num_steps, read.num_drafts, read.num_emitted_tokens) == (1, 1, 2)
    assert DraftCounts.from_dict({"num_failures": 2}) == DraftCounts(), "a method that only failed has counted nothing"
