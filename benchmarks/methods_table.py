"""Tables of benchmarks/methods.py: records of single answers in, one row per method out."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

NUM_POSITIONS = 4  # of the acceptance by position that the table shows; the record has all of them


def label(config: dict[str, Any]) -> str:
    extra = [f"{key}={value}" for key, value in config.items() if key not in ("method", "members")]
    names = [member if isinstance(member, str) else label(member) for member in config.get("members", ())]
    members = f"({','.join(names)})" if names else ""
    short = " ".join(extra).replace("num_speculative_tokens", "K").replace("node_budget", "nodes")
    return f"{config['method']}{members} {short}".strip()


def summarize(configs: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One result per configuration, the first of which is plain decoding."""
    by_label: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_label[label(record["config"])].append(record)
    plain = {record["prompt"]: record for record in by_label[label(configs[0])] if "error" not in record}
    return [_result(config, by_label[label(config)], plain) for config in configs]


def _result(
    config: dict[str, Any], records: Sequence[dict[str, Any]], plain: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    good = [record for record in records if "error" not in record]
    categories: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in good:
        categories[record["category"]].append(record)
    both = [record for record in good if record["prompt"] in plain]
    beside = [plain[record["prompt"]] for record in both]
    drafts = max(1, sum(record["drafts"] for record in good))
    return {
        "method": label(config),
        "config": config,
        "mean_acceptance_length": _length(good),
        "draft_acceptance_rate": sum(r["accepted"] for r in good) / max(1, sum(r["nodes"] for r in good)),
        "acceptance_per_position": [count / drafts for count in _positions(good)],
        "nodes_per_step": sum(r["nodes"] for r in good) / max(1, sum(r["steps"] for r in good)),
        "draft_ms_per_step": 1e3 * sum(r["draft_s"] for r in good) / max(1, sum(r["steps"] for r in good)),
        "tokens_per_s": _speed(good),
        "speedup": _speed(both) / _speed(beside) if both else 0.0,
        "tokens": sum(len(r["token_ids"]) for r in good),
        "failed": len(records) - len(good),
        "differs_from_plain": sum(r["token_ids"] != p["token_ids"] for r, p in zip(both, beside, strict=True)),
        "by_category": {
            name: {"mean_acceptance_length": _length(part), "tokens_per_s": _speed(part)}
            for name, part in sorted(categories.items())
        },
    }


def _length(records: Sequence[dict[str, Any]]) -> float:
    return sum(len(r["token_ids"]) for r in records) / max(1, sum(r["steps"] for r in records))


def _speed(records: Sequence[dict[str, Any]]) -> float:
    seconds = sum(record["seconds"] for record in records)
    return sum(len(r["token_ids"]) for r in records) / seconds if seconds else 0.0


def _positions(records: Sequence[dict[str, Any]]) -> list[int]:
    depth = max((len(r["accepted_per_position"]) for r in records), default=0)
    counts = [0] * depth
    for record in records:
        for position, count in enumerate(record["accepted_per_position"]):
            counts[position] += count
    return counts


def _cells(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    categories = list(results[0]["by_category"])
    head = ["method", "length", "rate", "by position", "nodes", "draft ms", "tok/s", "x plain"]
    lines = [[*head, *(category[:8] for category in categories)]]
    for result in results:
        positions = result["acceptance_per_position"][:NUM_POSITIONS]
        lines.append(
            [
                result["method"],
                f"{result['mean_acceptance_length']:.2f}",
                f"{result['draft_acceptance_rate']:.2f}",
                " ".join(f"{rate:.2f}" for rate in positions) or "-",
                f"{result['nodes_per_step']:.1f}",
                f"{result['draft_ms_per_step']:.2f}",
                f"{result['tokens_per_s']:.1f}",
                f"{result['speedup']:.2f}",
                *(f"{result['by_category'][c]['mean_acceptance_length']:.2f}" for c in categories),
            ]
        )
    return lines


def _warnings(results: Sequence[dict[str, Any]]) -> list[str]:
    """Speculation never changes the output, and a failed request has no figures: say so where it is not so."""
    lines = [
        f"NOT EQUAL: {result['method']} differs from plain decoding on {result['differs_from_plain']} prompts"
        for result in results
        if result["differs_from_plain"]
    ]
    return lines + [f"FAILED: {r['method']}, {r['failed']} requests, left out" for r in results if r["failed"]]


def as_text(results: Sequence[dict[str, Any]]) -> str:
    lines = _cells(results)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    return "\n".join([*rows, *_warnings(results)])


def as_markdown(results: Sequence[dict[str, Any]]) -> str:
    head, *lines = _cells(results)
    rows = [head, ["---"] * len(head), *lines]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return "\n\n".join([table, *_warnings(results)])
