"""Requests to workers: who is chosen, that two never get one place, and that a route is always found, and soon."""

import threading
import time as clock
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.choosers import CHOOSERS, make_chooser
from paceline.cluster.router import NoWorkerError, Router
from paceline.errors import InvalidOptionError
from tests.cluster.specs import time

BLOCK = 16


def router(name: str, num_workers: int = 3) -> Router:
    made = Router(make_chooser(name, time()), BLOCK, seed=0)
    for i in range(num_workers):
        made.add(f"w{i}")
    return made


def test_round_robin_takes_turns_also_when_one_leaves() -> None:
    made = router("round_robin")
    assert [made.route([], 10).worker_id for _ in range(4)] == ["w0", "w1", "w2", "w0"]
    made.remove("w1")
    assert [made.route([], 10).worker_id for _ in range(3)] == ["w2", "w0", "w2"]


def test_power_of_two_keeps_workers_even() -> None:
    made = router("power_of_two", 4)
    counts = Counter(made.route([], 10).worker_id for _ in range(400))
    assert max(counts.values()) - min(counts.values()) < 20


@pytest.mark.parametrize("name", ["dynamo", "kv_aware"])
def test_a_cached_prefix_attracts(name: str) -> None:
    made = router(name)
    made.stored("w1", range(100))
    reservation = made.route(range(100), 1601)
    assert reservation.worker_id == "w1" and reservation.num_cached_blocks == 100


@pytest.mark.parametrize("name", ["dynamo", "kv_aware"])
def test_a_busy_worker_repels_though_it_has_the_prefix(name: str) -> None:
    made = router(name)
    made.stored("w1", range(4))
    for _ in range(30):  # prompts of others, all reserved there
        made._reserve(1, 0, 1600)
    assert made.route(range(4), 65).worker_id != "w1"


@pytest.mark.parametrize("name", CHOOSERS)
def test_one_living_worker_gets_everything(name: str) -> None:
    made = router(name)
    made.remove("w0")
    made.remove("w2")
    assert {made.route(range(3), 50, avoid=["w1"]).worker_id for _ in range(10)} == {"w1"}


def test_a_worker_to_avoid_is_used_only_when_there_is_no_other() -> None:
    made = router("kv_aware")
    made.stored("w1", range(50))
    assert all(made.route(range(50), 801, avoid=["w1"]).worker_id != "w1" for _ in range(10))


def test_without_workers_the_error_says_what_to_do() -> None:
    with pytest.raises(NoWorkerError, match="paceline cluster up"):
        Router(make_chooser("round_robin"), BLOCK).route([], 10)


def test_choosing_reserves_so_that_requests_together_spread() -> None:
    made = router("kv_aware")
    places: list[str] = []

    def ask() -> None:
        places.append(made.route([], 500).worker_id)

    threads = [threading.Thread(target=ask) for _ in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(places) == {"w0": 3, "w1": 3, "w2": 3}


def test_a_reservation_is_given_back_once() -> None:
    made = router("kv_aware", 1)
    reservation = made.route([], 100)
    assert made.load("w0").queued_tokens == 100
    reservation.compute_elsewhere(4)
    assert made.load("w0").queued_tokens == 4
    reservation.first_token()
    reservation.first_token()
    assert made.load("w0").queued_tokens == 0 and made.load("w0").num_running == 1
    reservation.close()
    reservation.close()
    assert made.load("w0").num_running == 0
    made.check_integrity()


def test_a_reservation_on_a_worker_that_left_does_not_touch_its_successor() -> None:
    made = router("kv_aware", 1)
    old = made.route([], 100)
    made.remove("w0")
    made.add("w0")
    new = made.route([], 50)
    old.first_token()
    old.close()
    assert made.load("w0").queued_tokens == 50
    new.close()
    made.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CHOOSERS)), st.lists(st.integers(0, 9), max_size=60), st.integers(0, 2**31))
def test_whatever_comes_and_goes_a_route_is_found_and_the_account_is_right(
    name: str, acts: list[int], seed: int
) -> None:
    made, opened, joined = router(name, 1), [], 1
    for act in acts:
        if act < 5:
            opened.append(made.route([seed % 7, act], 1 + act * 20))
            assert opened[-1].worker_id in made.worker_ids
        elif act < 7 and opened:
            opened[act % len(opened)].first_token()
        elif act < 8 and opened:
            opened.pop(0).close()
        elif act == 8:
            made.add(f"w{joined}")
            made.stored(f"w{joined}", [seed % 7])
            joined += 1
        elif len(made.worker_ids) > 1:
            made.remove(made.worker_ids[0])
        made.check_integrity()
    for reservation in opened:
        reservation.close()
    assert all(made.load(w).queued_tokens == made.load(w).num_running == 0 for w in made.worker_ids)


def test_an_unknown_router_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidOptionError, match="choose one of round_robin, random, power_of_two, dynamo, kv_aware"):
        make_chooser("kv-aware")


def test_a_route_among_100k_blocks_takes_under_a_millisecond() -> None:
    """p99 by processor time, so that neighbours on the machine do not count."""
    made = router("kv_aware", 3)
    for worker in range(3):
        made.stored(f"w{worker}", range(worker * 20_000, worker * 20_000 + 60_000))
    times = []
    for i in range(500):
        prompt = range(i * 100, i * 100 + 512)  # 8192 tokens
        started = clock.thread_time()
        made.route(prompt, 8193).close()
        times.append(clock.thread_time() - started)
    assert sorted(times)[494] < 1e-3
