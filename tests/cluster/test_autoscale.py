"""How many workers the traffic needs: by rate and measured capacity, up at once and down after a while."""

import pytest

from paceline.cluster.autoscale import HEADROOM, WINDOW_S, Autoscaler, Limits, Seen, Traffic
from paceline.cluster.capacity import capacity
from paceline.errors import InvalidOptionError
from tests.cluster.specs import spec

SPEC = spec(max_num_seqs=8)
WIDE = {"prefill": Limits(0, 99), "decode": Limits(1, 99)}


def requests(count: int, prompt: int = 200, output: int | None = 50, remote: bool = False) -> list[Seen]:
    return [Seen(0.0, prompt, prompt, remote, output) for _ in range(count)]


def test_decode_workers_follow_the_rate_over_the_capacity() -> None:
    one = capacity(SPEC, 200, 50, 0.0) * HEADROOM
    for workers in (1, 2, 7):
        count = int(workers * one * 100)  # in 100 s
        assert Autoscaler(SPEC, WIDE).needed(requests(count), 100.0) == {"prefill": 0, "decode": workers}


def test_prompts_that_go_elsewhere_ask_for_prefill_workers_and_spare_decode_workers() -> None:
    here = Autoscaler(SPEC, WIDE).needed(requests(400), 100.0)
    there = Autoscaler(SPEC, WIDE).needed(requests(400, remote=True), 100.0)
    assert there["decode"] < here["decode"]
    # 4 prompts a second of 209 ms each
    assert there["prefill"] == 2 and here["prefill"] == 0


def test_the_limits_hold() -> None:
    limits = {"prefill": Limits(1, 1), "decode": Limits(2, 3)}
    assert Autoscaler(SPEC, limits).needed([], 60.0) == {"prefill": 1, "decode": 2}
    assert Autoscaler(SPEC, limits).needed(requests(5000), 60.0) == {"prefill": 1, "decode": 3}
    with pytest.raises(InvalidOptionError, match="at least 3 and at most 2"):
        Limits(3, 2)


def test_more_come_at_once_and_fewer_only_after_a_whole_window() -> None:
    class Given(Traffic):
        def __init__(self) -> None:
            self.now: list[Seen] = []

        def lately(self, now_s: float) -> tuple[list[Seen], float]:
            return self.now, 60.0

    traffic, scaler = Given(), Autoscaler(SPEC, WIDE)
    assert scaler.wanted(traffic, 0.0)["decode"] == 1
    traffic.now = requests(600)
    many = scaler.wanted(traffic, 5.0)["decode"]
    assert many > 1
    traffic.now = []
    assert scaler.wanted(traffic, 5.0 + WINDOW_S)["decode"] == many
    assert scaler.wanted(traffic, 6.0 + WINDOW_S)["decode"] == 1


def test_only_requests_of_the_last_window_count() -> None:
    traffic = Traffic()
    seen = traffic.note(100)
    assert traffic.lately(seen.at_s + WINDOW_S / 2)[0] == [seen]
    assert traffic.lately(seen.at_s + WINDOW_S + 1)[0] == []
