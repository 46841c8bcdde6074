"""Requests that come together are waited for; one that comes alone is not."""

from paceline.llm.arrivals import GAP_S, MAX_WAIT_S, Arrivals


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def test_one_that_comes_alone_waits_for_nobody() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    assert arrivals.wait_s() == 0.0
    for _ in range(3):
        arrivals.note()
        assert arrivals.wait_s() == 0.0
        arrivals.begin_step()
        clock.now_s += 2 * GAP_S


def test_while_they_come_close_together_the_step_waits_for_one_more_but_not_long() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    waited_s = 0.0
    arrivals.note()
    while waited_s < 1.0:
        clock.now_s += GAP_S / 2
        arrivals.note()
        wait_s = arrivals.wait_s()
        assert wait_s <= GAP_S
        if wait_s == 0.0:
            break
        waited_s += GAP_S / 2
    assert 0.5 * MAX_WAIT_S < waited_s <= MAX_WAIT_S


def test_after_a_step_nobody_is_waited_for_until_the_next_one_comes() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    arrivals.note()
    arrivals.note()
    assert arrivals.wait_s() > 0.0
    arrivals.begin_step()
    assert arrivals.wait_s() == 0.0
    arrivals.note()
    assert arrivals.wait_s() > 0.0, "it came close behind the last one"
