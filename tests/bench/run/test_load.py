"""Closed and open loops, and what a run's summary says."""

import asyncio
import time

import pytest

from paceline.bench.analyse.intervals import median
from paceline.bench.run.backend import Answer, Sampling
from paceline.bench.run.load import Load, offer
from paceline.bench.run.summary import LatencyTarget, summarize
from paceline.bench.workloads.workload import take
from paceline.core.draft_counts import DraftCounts
from paceline.errors import InvalidOptionError
from tests.bench.toy_llm import FakeBackend


def test_a_closed_loop_keeps_so_many_users_busy() -> None:
    backend = FakeBackend(token_s=0.001)
    answers = asyncio.run(offer(backend, take("chat", 9), Sampling(max_tokens=3), Load(concurrency=3)))
    assert backend.most_running == 3
    assert [a.output_hash for a in answers] == [f"same-{i}" for i in range(9)]


def test_an_open_loop_does_not_wait_for_answers() -> None:
    backend = FakeBackend(token_s=0.2)
    begin_s = time.perf_counter()
    answers = asyncio.run(offer(backend, take("chat", 8), Sampling(max_tokens=1), Load(rate_per_s=200.0)))
    assert backend.most_running > 4
    assert time.perf_counter() - begin_s < 8 * 0.2
    starts = [a.begin_s for a in answers]
    assert starts == sorted(starts)


def test_poisson_arrivals_come_at_the_rate_asked_for() -> None:
    """200 gaps of mean 1 ms: their sum is 0.2 s with a standard deviation of 14 ms; sleeping only adds."""
    backend = FakeBackend()
    answers = asyncio.run(offer(backend, take("random", 201), Sampling(max_tokens=1), Load(rate_per_s=1000.0)))
    assert answers[-1].begin_s - answers[0].begin_s > 0.13


@pytest.mark.parametrize("given", [{}, {"concurrency": 1, "rate_per_s": 1.0}, {"concurrency": 0}, {"rate_per_s": 0.0}])
def test_a_load_is_either_users_or_a_rate(given: dict[str, float]) -> None:
    with pytest.raises(InvalidOptionError):
        Load(**given)  # type: ignore[arg-type]


def _answers() -> list[Answer]:
    counts = DraftCounts(num_steps=2, num_drafts=2, num_draft_tokens=4, num_accepted_tokens=3)
    counts.accepted_per_position = [2, 1]
    first = Answer("a", "chat", 0.0, [1.0, 1.5, 2.0], 10, 5, "x", counts)
    second = Answer(
        "b", "code", 1.0, [2.0, 4.0], 10, 3, "y", DraftCounts(num_steps=2, num_drafts=1, num_draft_tokens=2)
    )
    return [first, second, Answer("c", "code", 0.0, error="ValueError: no")]


def test_summary_counts_times_and_leaves_failures_out() -> None:
    summary = summarize(_answers(), target=LatencyTarget(ttft_s=1.0, tpot_s=0.5))
    assert (summary["num_requests"], summary["num_failed"], summary["errors"]) == (3, 1, ["ValueError: no"])
    assert summary["wall_s"] == 4.0 and summary["tokens_per_s"] == 2.0
    assert summary["ttft_s"]["p50"] == 1.0 and summary["e2e_s"]["p50"] == 2.5
    assert summary["inter_token_s"]["mean"] == pytest.approx(1.0)
    # a: 4 tokens in 1 s after the first; b: 2 tokens in 2 s
    assert summary["tokens_per_s_per_user"] == pytest.approx((4 + 1) / 2)
    assert summary["goodput"] == {"num_met": 1, "requests_per_s": 0.25}
    speculation = summary["speculation"]
    assert speculation["mean_acceptance_length"] == 2.0 and speculation["draft_acceptance_rate"] == 0.5
    assert speculation["acceptance_by_position"] == pytest.approx([2 / 3, 1 / 3])
    assert summary["by_category"]["chat"]["mean_acceptance_length"] == 2.5


def test_summary_of_nothing_but_failures_has_no_speed() -> None:
    assert "tokens_per_s" not in summarize([Answer("c", "code", 0.0, error="x")])


@pytest.mark.parametrize(
    ("count", "expected"),
    # trimmed on each side, and the chance to hold the median: 1 - 2 * sum of binomials
    [(1, (0, 0.0)), (3, (0, 0.75)), (6, (0, 1 - 2 / 64)), (9, (1, 1 - 2 * (1 + 9) / 512))],
)
def test_intervals_of_medians_cover_what_they_say(count: int, expected: tuple[int, float]) -> None:
    found = median(list(range(count)))
    trim, coverage = expected
    assert (found.low, found.high) == (trim, count - 1 - trim)
    assert found.coverage == pytest.approx(coverage)
