"""From a sweep to advice: which setting at which load, and what `paceline serve --config` should be started with.

The rule, for one load (a number of users, or a rate of requests):

1. A setting's figure is the geometric mean of its speedups over all workloads and temperatures of the sweep at this
   load, each speedup the median over its repeats. A setting that is missing in one of these cells has no figure.
2. The setting with the best figure is chosen, where that is above 1; otherwise plain decoding.
3. Settings within `EQUAL` of the best count as equally good: a sweep does not tell them apart. Of these, the one that
   is best over all loads is chosen, so that noise does not cut a range of loads in two.
4. A cell is lost where the median is below `LOSS` times plain decoding and the whole interval is below 1. A lost cell
   does not exclude a setting (its size is in the mean already), but it is named.

Neighbouring loads with the same choice are joined into a range: "1–4 users: eagle3; 8 users and more: auto". One
configuration for all loads is chosen by the same rule over all cells of the sweep.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from paceline.bench.analyse.cells import PLAIN, Analysis, CellResult, Point
from paceline.bench.run.results import Record
from paceline.errors import InvalidOptionError

# Both are choices, by what a sweep can tell: on a shared machine the same setting measured twice differs by 1 to 3 %.
LOSS = 0.97  # nearer to 1, noise is called a loss; at 0.94 a loss that users can see goes unnamed
EQUAL = 0.99  # nearer to 1, ranges break up by chance; at 0.98 a real gain of 2 % is given away
SPECULATION_OFF = {"method": "none"}


@dataclass(frozen=True, slots=True)
class Figure:
    """What a setting achieved over some points."""

    setting: str
    speculative_config: dict[str, Any] | None  # None: a server's own, not known here
    mean_speedup: float  # geometric
    worst_speedup: float
    num_points: int
    losses: list[str]  # the lost cells, in words


@dataclass(frozen=True, slots=True)
class Range:
    """Neighbouring loads with one choice."""

    loads: list[str]  # as Point.load_name has them
    users: list[int]  # the same as numbers; empty where requests come by the clock
    text: str  # "1–4 users"
    chosen: Figure

    def to_dict(self) -> dict[str, Any]:
        return {"load": self.text, "loads": self.loads, "users": self.users} | asdict(self.chosen)


def recommend(analysis: Analysis, users: int | None = None) -> dict[str, Any]:
    """Ready for JSON: `by_load` has the ranges, `speculative_config` one configuration, `reason` why it is this one.

    The configuration is the best over all loads or, with `users`, the one for the nearest load that was measured."""
    judged = _figures(analysis, analysis.points)
    known = [figure.setting for figure in judged]
    ranges = _ranges(analysis, known)
    if users is None:
        chosen, where = _choose(analysis, analysis.points), "over all loads"
    else:
        chosen, where = _for_users(ranges, users)
    return {
        "setting": chosen.setting,
        "speculative_config": chosen.speculative_config,
        "reason": _reason(chosen, where),
        "summary": "; ".join(f"{found.text}: {found.chosen.setting}" for found in ranges),
        "losses": chosen.losses,
        "by_load": [found.to_dict() for found in ranges],
        "judged": [asdict(figure) for figure in judged],
        "incomplete": [setting for setting in analysis.settings if setting not in (PLAIN, *known)],
    }


def serve_options(records: Sequence[Record], advice: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options of `paceline serve` for what was measured: the advice, and the model where it was only one.

    None where a server won whose configuration is not known: without the key, the options would mean `auto`.
    """
    if advice["speculative_config"] is None:
        return None
    models = {record.get("backend", {}).get("model") for record in records} - {None}
    options: dict[str, Any] = {"model": models.pop()} if len(models) == 1 else {}
    return options | {"speculative_config": advice["speculative_config"]}


def _choose(analysis: Analysis, points: Sequence[Point], preferred: Sequence[str] = ()) -> Figure:
    """`preferred`: settings from best to worst, to choose between those that are equally good."""
    gains = [figure for figure in _figures(analysis, points) if figure.mean_speedup > 1.0]
    if not gains:
        return _plain(analysis, points)
    equal = [figure for figure in gains if figure.mean_speedup >= EQUAL * gains[0].mean_speedup]
    rank = {setting: place for place, setting in enumerate(preferred)}
    return min(equal, key=lambda figure: rank.get(figure.setting, len(rank)))


def _figures(analysis: Analysis, points: Sequence[Point]) -> list[Figure]:
    """Of the settings that were measured beside plain decoding at each of these points, the fastest first."""
    judged = {point for point in points if (PLAIN, point) in analysis.cells}
    figures = []
    for setting in analysis.settings:
        cells = [cell for (name, point), cell in analysis.cells.items() if name == setting and point in judged]
        known = [cell for cell in cells if cell.speedup is not None]
        if setting != PLAIN and known and len(known) == len(judged):
            figures.append(_figure(setting, known))
    return sorted(figures, key=lambda figure: -figure.mean_speedup)


def _figure(setting: str, cells: Sequence[CellResult]) -> Figure:
    speedups = {cell.point: cell.speedup for cell in cells if cell.speedup is not None}
    values = [speedup.value for speedup in speedups.values()]
    losses = [
        f"{point.workload}, T={point.temperature:g}, {point.load_text}: {speedup.value:.2f}x"
        for point, speedup in sorted(speedups.items())
        if speedup.value < LOSS and speedup.high < 1.0
    ]
    config = cells[0].records[0]["cell"]["speculative_config"]
    return Figure(setting, config, math.exp(sum(map(math.log, values)) / len(values)), min(values), len(values), losses)


def _ranges(analysis: Analysis, preferred: Sequence[str]) -> list[Range]:
    """Closed loops first, then open ones; a range never has both."""
    ranges = []
    for is_open in (False, True):
        loads = [list(points) for (users, _), points in groupby(_by_load(analysis), _load) if (users == 0) == is_open]
        choices = [(_choose(analysis, points, preferred).setting, points) for points in loads]
        for setting, group in groupby(choices, itemgetter(0)):
            own = [points for _, points in group]
            is_last = len(loads) > 1 and own[-1] == loads[-1]
            figure = _figure_of(analysis, [point for points in own for point in points], setting)
            firsts = [points[0] for points in own]
            names = [point.load_name for point in firsts]
            users = [point.concurrency for point in firsts if point.concurrency]
            ranges.append(Range(names, users, _range_text(firsts[0], firsts[-1], is_last), figure))
    return ranges


def _load(point: Point) -> tuple[int, float]:
    return point.concurrency, point.rate_per_s


def _by_load(analysis: Analysis) -> list[Point]:
    return sorted(analysis.points, key=_load)


def _figure_of(analysis: Analysis, points: Sequence[Point], setting: str) -> Figure:
    return next((found for found in _figures(analysis, points) if found.setting == setting), _plain(analysis, points))


def _plain(analysis: Analysis, points: Sequence[Point]) -> Figure:
    return Figure(PLAIN, SPECULATION_OFF, 1.0, 1.0, sum((PLAIN, point) in analysis.cells for point in points), [])


def _range_text(first: Point, last: Point, is_last: bool) -> str:
    if is_last:
        return f"{first.load_text} and more"
    return first.load_text if first == last else f"{first.load_name.removesuffix('/s')}–{last.load_text}"


def _for_users(ranges: Sequence[Range], users: int) -> tuple[Figure, str]:
    measured = [(number, found) for found in ranges for number in found.users]
    if users < 1 or not measured:
        raise InvalidOptionError(
            f"a configuration for {users} users needs 1 user or more, and a sweep with --concurrency"
        )
    nearest, found = min(measured, key=lambda pair: (abs(math.log(pair[0] / users)), -pair[0]))
    where = f"at {found.text}"
    return found.chosen, where if nearest == users else f"{where} ({users} were not measured, {nearest} are nearest)"


def _reason(chosen: Figure, where: str) -> str:
    if not chosen.num_points:
        return f"plain decoding was not measured {where}, so nothing is known to be faster: leave speculation off"
    if chosen.setting == PLAIN:
        return f"no setting was faster than plain decoding {where}: leave speculation off"
    over = "1 cell" if chosen.num_points == 1 else f"{chosen.num_points} cells"
    reason = f"{chosen.setting} has the best mean speedup {where}, {chosen.mean_speedup:.2f}x over {over}; "
    reason += f"it loses at {', '.join(chosen.losses)}" if chosen.losses else "it loses nowhere"
    if chosen.speculative_config is None:
        reason += "; that server's own options are not known here: start it as it was"
    return reason
