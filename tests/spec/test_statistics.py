"""The figures of drafting, read while the engine goes on."""

from typing import Any

from paceline.core.draft_counts import DraftCounts
from paceline.spec.statistics import MethodStats


def test_a_member_that_joins_while_the_figures_are_read_does_no_harm() -> None:
    stats = MethodStats()

    class Interrupted(DraftCounts):
        def to_dict(self) -> dict[str, Any]:
            stats.counts.by_member["suffix"] = DraftCounts()  # as the engine's thread may, at any moment
            return DraftCounts.to_dict(self)

    stats.counts.by_member["ngram"] = Interrupted(num_draft_tokens=3)
    assert stats.to_dict()["by_member"]["ngram"]["num_draft_tokens"] == 3
    assert set(stats.to_dict()["by_member"]) == {"ngram", "suffix"}
