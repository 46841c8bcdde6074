"""Before engines are compared: how long will it take, and whatever only the first engine of a process pays.

A throw-away engine of each setting answers a short prompt. So modules, threads, drafters' files and memory are there
before the first comparison, and none of the compared engines waits for them. That of plain decoding also decodes for
each number of users: its speed says how long the grid takes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.bench.run.grid import PLAIN, Cell, Grid, Setting
from paceline.bench.run.lane import Lane, run_lanes
from paceline.bench.workloads.workload import take
from paceline.errors import PacelineError
from paceline.llm import LLM

REHEARSED_TOKENS = 32  # of each answer


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the rehearsal took. Drafts are not counted in: with them it will be sooner."""

    start_s: dict[str, float]  # setting -> until it could be asked
    tokens_per_s: dict[int, float]  # users -> of plain decoding, with short answers

    def cell_s(self, cell: Cell, num_tokens: int) -> float:
        return self.start_s.get(cell.setting.name, 0.0) + num_tokens / self.tokens_per_s[cell.load.concurrency or 1]


def rehearse(grid: Grid, make_engine: Callable[[Setting], LLM]) -> Estimate:
    start_s: dict[str, float] = {}
    settings = {setting.name: setting for setting in [*grid.settings, *grid.cold_settings]}
    all_users = sorted({load.concurrency or 1 for load in grid.loads})
    speeds: dict[int, float] = {}
    for setting in sorted(settings.values(), key=lambda setting: setting.name == PLAIN):  # plain decoding last
        try:
            for _ in range(2):  # the first one may load files, the second one is timed
                begin_s = time.perf_counter()
                lane = Lane(make_engine(setting))
                start_s[setting.name] = time.perf_counter() - begin_s
        except PacelineError:
            continue  # it is recorded as failed where it is to be measured
        speeds = {users: _speed(grid, lane, users) for users in (all_users if setting.name == PLAIN else [1])}
    slowest = min(speeds.values(), default=1.0)
    return Estimate(start_s, {users: speeds.get(users, slowest) for users in all_users})


def _speed(grid: Grid, lane: Lane, users: int) -> float:
    """Tokens per second, prompts included."""
    short = replace(grid.sampling, temperature=grid.temperatures[0])
    short = replace(short, max_tokens=min(REHEARSED_TOKENS, short.max_tokens))
    prompts = take(grid.workloads[0], users)
    lane.llm.reset_prefix_cache()
    lane.offer(prompts, prompts, short, users)
    run_lanes([lane])
    return lane.num_emitted / (lane.spent_s - lane.began_s)
