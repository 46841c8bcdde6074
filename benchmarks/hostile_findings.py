"""What a run of `hostile.py` found: every time and every answer belongs to the attack that was under way."""

import statistics
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from hostile_attacks import ATTACKS

BEFORE, QUIET, WARM_UP = "before", "none", "warm-up"  # slices without an attack; those of the warm-up count for nothing
MAX_ADDED_GAP_S = 0.05  # a target: see hostile_report.py
MEMORY_SETTLED_S = 300.0
SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "longest": 1.0}  # of the gaps, in order of length


class Slices:
    """What was under way when; every time measured is given to one attack."""

    def __init__(self) -> None:
        self._begins_s: list[float] = []
        self._names: list[str] = []
        self._samples: dict[str, list[tuple[float, float]]] = defaultdict(list)  # kind -> (time, seconds)

    def begin(self, name: str) -> None:
        self._begins_s.append(time.perf_counter())
        self._names.append(name)

    def at(self, time_s: float) -> str:
        return self._names[max(0, bisect_right(self._begins_s, time_s) - 1)]

    def add(self, kind: str, end_s: float, seconds: float) -> None:
        self._samples[kind].append((end_s, seconds))

    def of(self, kind: str) -> dict[str, list[float]]:
        """Attack -> seconds, sorted."""
        found: dict[str, list[float]] = defaultdict(list)
        for end_s, seconds in self._samples[kind]:
            found[self.at(end_s)].append(seconds)
        return {name: sorted(values) for name, values in found.items()}


class Findings:
    def __init__(self) -> None:
        self.slices = Slices()
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.wrong: list[str] = []
        self.answers: dict[str, Counter[str]] = defaultdict(Counter)  # that attackers got
        self.samples: dict[str, list[str]] = defaultdict(list)  # of 5xx
        self.memory: list[tuple[float, float]] = []  # (time, MiB) since the last start of the server
        self.rss_mib: dict[str, list[tuple[float, float, float]]] = defaultdict(list)  # each slice: before, after, peak
        self.deaths: list[dict[str, Any]] = []
        self.others: dict[str, list[float]] = defaultdict(list)  # share of the CPU that other processes took
        self.held: dict[str, Any] = {}

    def count(self, outcome: str) -> None:
        """Of a friendly answer that just ended."""
        self.outcomes[self.slices.at(time.perf_counter())][outcome] += 1

    def result(self, order: Sequence[str], slice_s: float, exit_code: int) -> dict[str, Any]:
        kinds = {kind: self.slices.of(kind) for kind in ("gap", "first", "health", "stall")}
        quiet_s = max(kinds["gap"].get(BEFORE, []) + kinds["gap"].get(QUIET, []), default=0.0)
        rows = {name: self.row(name, kinds, quiet_s) for name in dict.fromkeys((BEFORE, *order))}
        outcomes = sum(self.outcomes.values(), Counter())
        peak_mib = max((peak for slices in self.rss_mib.values() for *_, peak in slices), default=0.0)
        seen = [mib for _, mib in self.memory] or [0.0]
        half_s = (self.memory[-1][0] - self.memory[0][0]) / 2 if self.memory else 0.0
        settled_s = min(MEMORY_SETTLED_S, half_s)
        settled = [mib for at_s, mib in self.memory if at_s - self.memory[0][0] >= settled_s] or seen
        begin_mib, end_mib = statistics.median(settled[:5]), statistics.median(settled[-5:])
        return {
            "slice_s": slice_s,
            "attacks": rows,
            "right": outcomes["right"],
            "wrong": outcomes["wrong"],
            "lost": sum(count for what, count in outcomes.items() if what.startswith("lost")),
            "examples": self.wrong[:3],
            "deaths": self.deaths,
            "exit_code": exit_code,
            "held": self.held,
            "rss_mib": {"first": seen[0], "settled": begin_mib, "end": end_mib, "peak": peak_mib},
            "rss_growth": end_mib / max(begin_mib, 1.0) - 1,
        }

    def row(self, name: str, kinds: dict[str, dict[str, list[float]]], quiet_s: float) -> dict[str, Any]:
        measured = kinds["gap"].get(name, [])
        longest_s = measured[-1] if measured else None
        others = self.others[name]
        return {
            "kind": ATTACKS[name].kind if name in ATTACKS else "",
            "gaps": len(measured),
            "others_cpu": sum(others) / max(1, len(others)),
            "gap_s": {label: measured[int(share * (len(measured) - 1))] for label, share in SHARES.items() if measured},
            "added_gap_s": None if longest_s is None else longest_s - quiet_s,
            "over": sum(gap > quiet_s + MAX_ADDED_GAP_S for gap in measured),
            **{f"{kind}_s": max(kinds[kind].get(name) or [0.0]) for kind in ("first", "health", "stall")},
            "friends": dict(self.outcomes[name]),
            "answers": dict(self.answers[name]),
            "num_5xx": sum(count for status, count in self.answers[name].items() if status.startswith("5")),
            "samples_5xx": self.samples[name][:3],
            "rss_mib": self.rss_mib[name],
        }
