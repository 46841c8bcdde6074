"""What one run showed: latencies, throughput, goodput, acceptance. Failed requests are counted, never timed."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.bench.run.backend import Answer
from paceline.core.draft_counts import DraftCounts


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """What a request must keep to count as good; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met_by(self, answer: Answer) -> bool:
        tpot_s = answer.tpot_s
        return (self.ttft_s is None or answer.ttft_s <= self.ttft_s) and (
            self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s
        )


def summarize(
    answers: Sequence[Answer],
    server_counts: DraftCounts | None = None,  # of the run, where answers carry none
    figures: dict[str, float] | None = None,  # passes of the engine and seconds by phase, during the run
    target: LatencyTarget | None = None,
) -> dict[str, Any]:
    """Ready for JSON. Times in seconds, speeds in tokens per second."""
    good = [answer for answer in answers if answer.error is None]
    summary: dict[str, Any] = {"num_requests": len(answers), "num_failed": len(answers) - len(good)}
    if len(good) < len(answers):
        summary["errors"] = sorted({answer.error for answer in answers if answer.error is not None})[:5]
    if not good:
        return summary
    begin_s, end_s = min(a.begin_s for a in good), max(a.event_s[-1] for a in good)
    wall_s = end_s - begin_s
    num_tokens = sum(a.num_output_tokens for a in good)
    users = [1 / a.tpot_s for a in good if a.tpot_s]
    summary |= {
        "wall_s": wall_s,
        "num_output_tokens": num_tokens,
        "num_prompt_tokens": sum(a.num_prompt_tokens for a in good),
        "tokens_per_s": num_tokens / wall_s,
        "tokens_per_s_per_user": float(np.median(users)) if users else None,
        "requests_per_s": len(good) / wall_s,
        "ttft_s": percentiles([a.ttft_s for a in good]),
        "inter_token_s": percentiles(_gaps(good)),
        "e2e_s": percentiles([a.e2e_s for a in good]),
        "speculation": _speculation(good, server_counts),
        "by_category": _by_category(good),
        "engine": figures or {},
    }
    if target is not None:
        num_met = sum(target.met_by(a) for a in good)
        summary["goodput"] = {"num_met": num_met, "requests_per_s": num_met / wall_s}
    return summary


def percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99), "mean": float(np.mean(values))}


def _gaps(answers: Sequence[Answer]) -> list[float]:
    """Time between two pieces of text. Tokens of one step come together, so one piece may hold several."""
    return [later - earlier for a in answers for earlier, later in zip(a.event_s, a.event_s[1:], strict=False)]


def _speculation(answers: Sequence[Answer], server_counts: DraftCounts | None) -> dict[str, Any] | None:
    counts = server_counts
    own = [a.counts for a in answers if a.counts is not None]
    if own:
        counts = DraftCounts.total(own)
    if counts is None:
        return None
    num_tokens = sum(a.num_output_tokens for a in answers)
    # A server that does not count its steps: every pass emits one token more than it accepted.
    num_steps = counts.num_steps or max(1, num_tokens - counts.num_accepted_tokens)
    return {
        "num_steps": num_steps,
        "num_drafts": counts.num_drafts,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_accepted_tokens": counts.num_accepted_tokens,
        "mean_acceptance_length": num_tokens / num_steps,
        "draft_acceptance_rate": counts.draft_acceptance_rate,
        "wasted_share": _ratio(counts.num_wasted_tokens, counts.num_draft_tokens),
        "acceptance_by_position": [_ratio(count, counts.num_drafts) for count in counts.accepted_per_position],
    }


def _by_category(answers: Sequence[Answer]) -> dict[str, Any]:
    groups: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        groups[answer.category].append(answer)
    result = {}
    for category, group in sorted(groups.items()):
        users = [1 / a.tpot_s for a in group if a.tpot_s]
        steps = sum(a.counts.num_steps for a in group if a.counts is not None)
        result[category] = {
            "num_requests": len(group),
            "tokens_per_s_per_user": float(np.median(users)) if users else None,
            "mean_acceptance_length": sum(a.num_output_tokens for a in group) / steps if steps else None,
        }
    return result


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
