"""Kinds of workers with round numbers."""

from typing import Any

from paceline.cluster.prefill_time import PrefillTime
from paceline.cluster.worker_spec import WorkerSpec
from paceline.lab.pass_cost import PassCost

# 10 ms for one row and 1 ms for each more
LINEAR = PassCost.of({1: 0.010, 1001: 1.010})


def spec(**changes: Any) -> WorkerSpec:
    options: dict[str, Any] = {"max_token_delay_s": None, "latency_s": 0.0, "bandwidth": 1e12}
    return WorkerSpec("toy", LINEAR, **(options | changes))


def time(**changes: Any) -> PrefillTime:
    return PrefillTime(spec(**changes))
