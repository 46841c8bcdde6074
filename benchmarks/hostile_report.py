"""The table of `hostile.py`, and its targets."""

from collections import Counter
from typing import Any

from hostile_attacks import ATTACKS
from hostile_findings import MAX_ADDED_GAP_S, SHARES

MAX_HEALTH_S, MAX_GROWTH = 0.1, 0.10  # targets, beside the gap that an attack may add


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f}"


def report(result: dict[str, Any]) -> bool:
    """The table; True where every target was met."""
    columns = ("gaps", *SHARES, "added", "over", "first", "health", "stall", "others", "right", "bad", "MiB", "peak")
    print(f"{'attack (times in ms)':<23} {'kind':<5} {' '.join(f'{title:>7}' for title in columns)}  answers")
    for name, row in result["attacks"].items():
        gaps_s, friends = row["gap_s"], Counter(row["friends"])
        grown = sum(after - before for before, after, _ in row["rss_mib"])
        peak = max((peak for *_, peak in row["rss_mib"]), default=0.0)
        cells = [row["gaps"], *(ms(gaps_s.get(label)) for label in SHARES), ms(row["added_gap_s"]), row["over"]]
        cells += [ms(row[f"{kind}_s"]) for kind in ("first", "health", "stall")]
        cells += [
            f"{row['others_cpu']:.0%}",
            friends["right"],
            friends.total() - friends["right"],
            f"{grown:+.0f}",
            f"{peak:.0f}",
        ]
        answers = ", ".join(f"{count} x {status}" for status, count in row["answers"].items())
        print(f"{name:<23} {row['kind']:<5} {' '.join(f'{cell:>7}' for cell in cells)}  {answers}")
        for sample in row["samples_5xx"][:1]:
            print(f"    5xx: {sample}")
    rows = {name: row for name, row in result["attacks"].items() if name in ATTACKS}
    slow = [name for name, row in rows.items() if row["gaps"] == 0 or row["added_gap_s"] > MAX_ADDED_GAP_S]
    unhealthy = [name for name, row in rows.items() if row["health_s"] > MAX_HEALTH_S]
    failing = {name: row["num_5xx"] for name, row in rows.items() if row["num_5xx"]}
    memory, held, deaths = result["rss_mib"], result["held"], result["deaths"]
    grew = ", ".join(f"{mib:.0f} MiB {when}" for when, mib in memory.items())
    texts = f"{result['right']} right, {result['wrong']} wrong, {result['lost']} lost"
    checks = [
        line("texts", texts, result["right"] > 0 and result["wrong"] + result["lost"] == 0),
        line("added gap", f"over {1000 * MAX_ADDED_GAP_S:.0f} ms: {', '.join(slow) or 'none'}", not slow),
        line("health", f"over {1000 * MAX_HEALTH_S:.0f} ms: {', '.join(unhealthy) or 'none'}", not unhealthy),
        line("5xx", f"{failing or 'none'}", not failing),
        line(
            "server",
            f"died: {deaths or 'never'}, exit code {result['exit_code']}",
            not deaths and result["exit_code"] == 0,
        ),
        line("memory", f"{grew}: grew {result['rss_growth']:+.1%}", result["rss_growth"] <= MAX_GROWTH),
    ]
    if held and not deaths:
        closed = (
            f"the server closed {held['closed']} of {held['opened']}, the last after {held['longest_closed_s']:.0f} s"
        )
        print(f"slow connections kept through the run: {closed}")
    return all(checks)


def line(what: str, text: str, reached: bool) -> bool:
    print(f"{what:<12} {'ok    ' if reached else 'MISSED'} {text}")
    return reached
