"""The matrix of formats: what each one costs, loses and gains, with and without drafters, and which one to take.

Ratios are taken within a round and are the median over rounds: a format's speed over the reference's, both without a
drafter, and a drafter's speed over the same format's without one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.analyse.cells import Analysis, CellResult, analyse
from paceline.bench.analyse.intervals import Median, median
from paceline.bench.run.format_grid import NO_DRAFTER, setting_name
from paceline.bench.run.results import Record
from paceline.lab.money import dollars_per_million_tokens

Quality = Mapping[str, Any]  # kl, same_top, perplexity, reference_perplexity, exact_match, bytes


@dataclass(frozen=True, slots=True)
class Drafted:
    """A drafter on a format, with so many users."""

    drafter: str
    users: int
    tokens_per_pass: float | None
    tokens_per_s: float
    speedup: Median | None  # over the same format without it

    @property
    def text(self) -> str:
        return "no drafter" if self.drafter == NO_DRAFTER else self.drafter


@dataclass(frozen=True, slots=True)
class FormatFigures:
    name: str
    quality: Quality
    plain: dict[int, CellResult]  # users -> without a drafter
    of_reference: dict[int, Median]  # users -> how many times as fast as the reference
    drafted: list[Drafted]  # `none` among them

    @property
    def ttft_s(self) -> float | None:
        return self.plain[min(self.plain)].mean_of("ttft_s", "p50") if self.plain else None

    def speed(self, users: int) -> float | None:
        return self.plain[users].tokens_per_s.value if users in self.plain else None

    def best(self, users: int) -> Drafted | None:
        """The fastest way to run it with so many users."""
        found = [drafted for drafted in self.drafted if drafted.users == users]
        return max(found, key=lambda drafted: drafted.tokens_per_s) if found else None

    @property
    def perplexity_ratio(self) -> float:
        return float(self.quality["perplexity"] / self.quality["reference_perplexity"])


def format_figures(records: Sequence[Record], qualities: Mapping[str, Quality]) -> list[FormatFigures]:
    """In the order of `qualities`, whose first is the reference."""
    analysis = analyse(records)
    reference = next(iter(qualities))
    base = _cells(analysis, reference, NO_DRAFTER)
    figures = []
    for name, quality in qualities.items():
        plain = _cells(analysis, name, NO_DRAFTER)
        ratios = {users: cell.over(base[users]) for users, cell in plain.items() if users in base}
        drafted = [one for drafter in _drafters(analysis, name) for one in _drafted(analysis, name, drafter, plain)]
        of_reference = {users: median(values) for users, values in ratios.items() if values}
        figures.append(FormatFigures(name, quality, plain, of_reference, drafted))
    return figures


def _cells(analysis: Analysis, form: str, drafter: str) -> dict[int, CellResult]:
    wanted = setting_name(form, drafter)
    return {point.concurrency: cell for (setting, point), cell in analysis.cells.items() if setting == wanted}


def _drafters(analysis: Analysis, form: str) -> list[str]:
    prefix = setting_name(form, "")
    return [setting.removeprefix(prefix) for setting in analysis.settings if setting.startswith(prefix)]


def _drafted(analysis: Analysis, form: str, drafter: str, plain: Mapping[int, CellResult]) -> list[Drafted]:
    found = []
    for users, cell in sorted(_cells(analysis, form, drafter).items()):
        ratios = cell.over(plain[users]) if users in plain and drafter != NO_DRAFTER else []
        length = cell.mean_of("speculation", "mean_acceptance_length")
        found.append(Drafted(drafter, users, length, cell.tokens_per_s.value, median(ratios) if ratios else None))
    return found


def matrix_rows(figures: Sequence[FormatFigures], dollars_per_hour: float) -> list[dict[str, Any]]:
    users = sorted({count for figure in figures for count in figure.plain})
    rows = []
    for figure in figures:
        quality = figure.quality
        row: dict[str, Any] = {
            "format": figure.name,
            "MB": round(quality["bytes"] / 1e6, 1),
            "KL": round(quality["kl"], 5),
            "same top": f"{quality['same_top']:.1%}",
            "perplexity": round(quality["perplexity"], 3),
            "exact": None if quality.get("exact_match") is None else f"{quality['exact_match']:.0%}",
        }
        for count in users:
            speed, ratio = figure.speed(count), figure.of_reference.get(count)
            row[f"tok/s, {count}"] = None if speed is None else round(speed, 1)
            row[f"of ref., {count}"] = None if ratio is None else f"{ratio.value:.2f}x"
        row["first token ms"] = None if figure.ttft_s is None else round(1e3 * figure.ttft_s, 1)
        most = figure.speed(users[-1])
        row["$/M tokens"] = None if not most else round(dollars_per_million_tokens(dollars_per_hour, most), 3)
        rows.append(row)
    return rows


def drafter_rows(figures: Sequence[FormatFigures]) -> list[dict[str, Any]]:
    return [
        {
            "format": figure.name,
            "drafter": one.drafter,
            "users": one.users,
            "tokens/pass": None if one.tokens_per_pass is None else round(one.tokens_per_pass, 3),
            "tok/s": round(one.tokens_per_s, 1),
            "speedup": round(one.speedup.value, 3),
            "interval": f"{one.speedup.low:.2f}..{one.speedup.high:.2f}",
        }
        for figure in figures
        for one in figure.drafted
        if one.speedup is not None
    ]


def different_outputs(records: Sequence[Record]) -> list[str]:
    """Drafters that changed a format's text: there must be none."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    bad = []
    for record in records:
        cell = record["cell"]
        if record["status"] != "ok" or "format" not in cell:
            continue
        seen = found.setdefault((cell["format"], cell["concurrency"]), {})
        for request in record["requests"]:
            text = request.get("output_hash", "")
            if seen.setdefault(request["prompt_id"], text) != text:
                bad.append(f"{cell['setting']} with {cell['concurrency']} users: {request['prompt_id']}")
    return sorted(set(bad))
