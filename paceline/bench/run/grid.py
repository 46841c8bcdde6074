"""What a sweep goes through: settings x workloads x temperatures x loads, each several times.

A setting is `plain`, `auto`, a method with its sizes (`ngram:4` for K = 4, `suffix:8x32` for K = 8 and 32 nodes), a
JSON object as in speculative_config, or `name=http://host:port` for a server.

>>> parse_setting("ngram:4").config
{'method': 'ngram', 'num_speculative_tokens': 4}
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.run.backend import Sampling
from paceline.bench.run.load import Load
from paceline.bench.workloads.workload import load_workload
from paceline.errors import InvalidOptionError
from paceline.spec.config.speculative_config import SpeculativeConfig

_SIZED = re.compile(r"^(?P<method>[a-z_0-9]+)(?::(?P<k>\d+)(?:x(?P<nodes>\d+))?)?$")
PLAIN = "plain"
WARM, COLD = "warm", "cold"  # an engine that has been running, or a fresh one from its first request on
USERS_OF_A_RATE = 8  # where requests come by the clock, there are as many of them as for so many users


def enough_for(num_users: int) -> int:
    """Requests that keep every user busy."""
    return max(4, 2 * num_users)


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    config: dict[str, Any] | None = None  # speculative_config, for our engine
    url: str | None = None  # or a server that has its own
    form: str | None = None  # the weights it runs on, where a grid has several

    @property
    def method(self) -> str:
        return self.name if self.config is None else str(self.config["method"])

    @property
    def num_speculative_tokens(self) -> int | None:
        return None if self.config is None else self.config.get("num_speculative_tokens")


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid, measured once as repeat number `repeat`."""

    setting: Setting
    workload: str
    temperature: float
    load: Load
    repeat: int
    start: str = WARM

    def describe(self) -> dict[str, Any]:
        form = {} if self.setting.form is None else {"format": self.setting.form}
        start = {} if self.start == WARM else {"start": self.start}  # as it was before there were cold runs
        own = {
            "setting": self.setting.name,
            "speculative_config": self.setting.config,
            "url": self.setting.url,
            "workload": self.workload,
            "temperature": self.temperature,
            "concurrency": self.load.concurrency,
            "rate_per_s": self.load.rate_per_s,
            "repeat": self.repeat,
        }
        return form | start | own

    @property
    def title(self) -> str:
        where = f"{self.workload} T={self.temperature:g} c={self.load.name}"
        return f"{self.setting.name} {where}{'' if self.start == WARM else ' cold'} #{self.repeat + 1}"


@dataclass(frozen=True, slots=True)
class Grid:
    settings: Sequence[Setting]
    workloads: Sequence[str]
    temperatures: Sequence[float]
    loads: Sequence[Load]
    num_repeats: int = 3
    sampling: Sampling = field(default_factory=Sampling)
    num_requests: int | None = None  # per run; None: as `requests_for` says
    model: str = ""
    requests_for: Callable[[int], int] = enough_for
    cold_settings: Sequence[Setting] = ()  # those that are measured on fresh engines as well

    def check(self) -> None:
        """Raise for anything that could only fail later, before the first run."""
        parts = {
            "a setting": [*self.settings, *self.cold_settings],
            "a workload": self.workloads,
            "a temperature": self.temperatures,
            "a load": self.loads,
        }
        for what, values in parts.items():
            if not values:
                raise InvalidOptionError(f"the grid is empty: it needs at least {what}")
        for settings in (self.settings, self.cold_settings):
            names = [setting.name for setting in settings]
            if len(set(names)) < len(names):
                raise InvalidOptionError(f"a setting is in the grid twice: {', '.join(names)}")
        if self.num_repeats < 1 or (self.num_requests is not None and self.num_requests < 1):
            raise InvalidOptionError(
                f"repeats and requests must be 1 or more, got {self.num_repeats} and {self.num_requests}"
            )
        urls = [setting.url is not None for setting in [*self.settings, *self.cold_settings]]
        if any(urls) and not all(urls):
            raise InvalidOptionError(
                "a sweep measures our engine or servers, not both: run it twice and report on both"
            )
        for workload in self.workloads:
            load_workload(workload)
        for temperature in self.temperatures:
            if not 0 <= temperature <= 100:
                raise InvalidOptionError(f"temperature must be between 0 and 100, got {temperature}")

    def requests_of(self, load: Load) -> int:
        return self.num_requests or self.requests_for(load.concurrency or USERS_OF_A_RATE)

    def cells(self) -> Iterator[Cell]:
        """All settings of one point after each other, while the machine is as fast for all; the order rotates."""
        for repeat in range(self.num_repeats):
            points = itertools.product(self.workloads, self.temperatures, self.loads)
            for number, (workload, temperature, load) in enumerate(points):
                for start, settings in ((COLD, self.cold_settings), (WARM, self.settings)):
                    shift = (repeat + number) % max(1, len(settings))
                    for setting in [*settings[shift:], *settings[:shift]]:
                        yield Cell(setting, workload, temperature, load, repeat, start)

    def key(self, cell: Cell) -> str:
        """What makes two measurements the same one: the cell, the model and how it is sampled."""
        sampling = [self.sampling.max_tokens, self.sampling.seed, self.sampling.ignore_eos]
        facts = [cell.describe(), self.model, sampling, self.requests_of(cell.load)]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]

    def __len__(self) -> int:
        points = len(self.workloads) * len(self.temperatures) * len(self.loads)
        return (len(self.settings) + len(self.cold_settings)) * points * self.num_repeats


def parse_setting(text: str) -> Setting:
    if text == PLAIN:
        return Setting(PLAIN, {"method": "none"})  # explicit: an engine without a configuration speculates
    name, separator, url = text.partition("=")
    if separator and url.startswith(("http://", "https://")):
        return Setting(name, url=url)
    if text.lstrip().startswith("{"):
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidOptionError(f"the setting {text!r} is not JSON: {error}") from error
        SpeculativeConfig.parse(config)  # raises with an explanation
        return Setting(text, config)
    sized = _SIZED.match(text)
    if sized is None:
        raise InvalidOptionError(
            f"cannot read the setting {text!r}: give plain, auto, METHOD, METHOD:K, METHOD:KxNODES, a JSON object, or "
            f"NAME=http://host:port"
        )
    config = {"method": sized["method"]}
    if sized["k"] is not None:
        config["num_speculative_tokens"] = int(sized["k"])
    if sized["nodes"] is not None:
        config["node_budget"] = int(sized["nodes"])
    SpeculativeConfig.parse(config)
    return Setting(text, config)
