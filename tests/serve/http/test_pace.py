"""A client that connects, polls or errs too often waits its turn; others do not."""

import time

import httpx
import pytest

from paceline.serve.http import pace as pace_module
from paceline.serve.http.pace import BURST_S, Pace
from tests.serve import fake
from tests.serve.conftest import running


class Clock:
    now_s = 1024.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_is_free_and_what_comes_after_it_is_spread_evenly() -> None:
    pace = Pace(8.0, Clock())
    delays = [pace.delay_s("a") for _ in range(int(8 * BURST_S) + 4)]
    assert delays[: int(8 * BURST_S) + 1] == [0.0] * (int(8 * BURST_S) + 1)
    assert delays[-3:] == pytest.approx([0.125, 0.25, 0.375])


def test_clients_have_turns_of_their_own_and_get_them_back_with_time() -> None:
    clock = Clock()
    pace = Pace(8.0, clock)
    while not pace.delay_s("a"):
        pass
    assert pace.delay_s("b") == 0.0
    clock.now_s += BURST_S + 1.0
    assert pace.delay_s("a") == 0.0


def test_clients_that_went_away_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_module, "MAX_REMEMBERED", 8)
    clock = Clock()
    pace = Pace(8.0, clock)
    for i in range(100):
        clock.now_s += 1.0
        pace.delay_s(str(i))
    assert len(pace._next_s) <= 9


def test_polls_and_errors_of_one_client_are_slowed_down_and_generation_is_not() -> None:
    with running(fake.FakeBackend(), max_rate_per_client=20.0) as server, server.client() as client:

        def seconds_of(count: int, method: str, path: str, body: dict[str, object] | None, status: int) -> float:
            begin_s = time.perf_counter()
            for _ in range(count):
                assert client.request(method, path, json=body).status_code == status
            return time.perf_counter() - begin_s

        seconds_of(int(20 * BURST_S) + 1, "GET", "/health", None, 200)  # the burst
        assert seconds_of(10, "GET", "/health", None, 200) > 0.4  # 20 a second
        assert seconds_of(10, "POST", "/v1/completions", {"model": "fake", "prompt": 7.5}, 400) > 0.4
        good = {"model": "fake", "prompt": "hi", "max_tokens": 1}
        assert seconds_of(10, "POST", "/v1/completions", good, 200) < 0.4
        assert seconds_of(5, "GET", "/metrics", None, 200) > 0.15


def test_connections_of_one_client_are_slowed_down() -> None:
    body = {"model": "fake", "prompt": "hi", "max_tokens": 1}
    with running(fake.FakeBackend(), max_rate_per_client=20.0) as server:
        begin_s = time.perf_counter()
        for _ in range(int(20 * BURST_S) + 10):
            assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        assert time.perf_counter() - begin_s > 0.35
