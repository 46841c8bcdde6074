"""What a simulated run was like: latencies, hits, and what it cost."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BINS_PER_DECADE = 200  # a bin is 1.2 % wide


class Gaps:
    """Times between the items of streams, as a histogram: there are as many as passes x streams.

    `spread`: equally likely factors by which passes that do the same differ (`WorkerSpec.pass_spread`)."""

    def __init__(self, spread: Sequence[float] = (1.0,)) -> None:
        self._counts: Counter[int] = Counter()
        self._shifts = Counter(round(math.log10(factor) * BINS_PER_DECADE) for factor in spread)

    def note(self, seconds: float, count: int) -> None:
        self._counts[round(math.log10(seconds) * BINS_PER_DECADE)] += count

    def percentile(self, percent: float) -> float:
        """Of all gaps; 0 where there is none."""
        counts: Counter[int] = Counter()
        for bin_, count in self._counts.items():
            for shift, times in self._shifts.items():
                counts[bin_ + shift] += count * times
        rank = percent / 100 * counts.total()
        seen = 0
        for bin_, count in sorted(counts.items()):
            seen += count
            if seen >= rank:
                return float(10 ** (bin_ / BINS_PER_DECADE))
        return 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run. Arrays have one entry per request."""

    fleet: str
    num_workers: int
    dollars_per_hour: float
    ttft_s: Floats
    e2e_s: Floats
    num_output_tokens: NDArray[np.int64]
    num_prompt_tokens: int
    num_computed_tokens: int  # of the prompts, here or there
    num_remote: int  # prompts that a prefill worker computed
    gaps: Gaps = field(repr=False)
    duration_s: float  # from the first arrival to the last token

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that nobody had to compute."""
        return 1 - self.num_computed_tokens / self.num_prompt_tokens

    @property
    def tokens_per_s(self) -> float:
        return float(self.num_output_tokens.sum()) / self.duration_s

    @property
    def dollars_per_million_tokens(self) -> float | None:
        return self.dollars_per_hour / 3600 / self.tokens_per_s * 1e6 if self.dollars_per_hour else None

    def tpot_s(self) -> Floats:
        """Per request: mean time per output token after the first."""
        several = self.num_output_tokens > 1
        found: Floats = (self.e2e_s - self.ttft_s)[several] / (self.num_output_tokens[several] - 1)
        return found if found.size else np.zeros(1)

    def meets(self, ttft_s: float | None, gap_s: float | None, percent: float = 99.0) -> bool:
        """That percentile of first tokens and of gaps is within the targets."""
        if ttft_s is not None and float(np.percentile(self.ttft_s, percent)) > ttft_s:
            return False
        return gap_s is None or self.gaps.percentile(percent) <= gap_s

    def row(self) -> dict[str, Any]:
        ttft, tpot = np.percentile(self.ttft_s, [50, 99]) * 1e3, np.percentile(self.tpot_s(), [50, 99]) * 1e3
        return {
            "workers": self.fleet,
            "TTFT p50 ms": float(ttft[0]),
            "p99": float(ttft[1]),
            "gap p50 ms": 1e3 * self.gaps.percentile(50),
            "gap p99": 1e3 * self.gaps.percentile(99),
            "TPOT p50 ms": float(tpot[0]),
            "TPOT p99": float(tpot[1]),
            "hit rate": self.hit_rate,
            "remote": self.num_remote / len(self.ttft_s),
            "tokens/s": self.tokens_per_s,
            "$/h": self.dollars_per_hour or None,
            "$/M tokens": self.dollars_per_million_tokens,
        }
