"""Which size of draft a GPU takes: by measured times and what drafts bring, and plain decoding where nothing pays."""

import itertools

import pytest

from paceline.spec.proposer import Budget
from paceline.spec.round_sizes import LEAST_ROUNDS, OPTIONS, RoundSizes, SizeOption
from paceline.spec.rounds import RoundSize

SMALL, LARGE = SizeOption(2, 2, 1.0), SizeOption(15, 6, 2.0)
ALONE, MANY = [1.0, 1.3, 1.4], [2.0, 3.3, 9.0]  # seconds of a plain pass, and of a round of each option


def sizes() -> RoundSizes:
    return RoundSizes({1: ALONE, 32: MANY}, (SMALL, LARGE))


def run(chosen: RoundSizes, num_requests: int, num_steps: int, level: float, seconds: dict[int, float]) -> list[int]:
    """So many steps in a world where drafts bring `level` times their usual gain: the nodes of each step."""
    taken = []
    for _ in range(num_steps):
        option = chosen.choose(num_requests)
        taken.append(0 if option is None else option.nodes)
        if option is None:
            chosen.rest(num_requests, seconds.get(0))
        else:
            tokens = round(num_requests * (1 + option.gain * level))
            chosen.learn(option, num_requests, tokens, seconds.get(option.nodes))
    return taken


def test_each_load_gets_the_size_with_the_most_tokens_per_second() -> None:
    chosen = sizes()
    assert chosen.choose(1) == LARGE  # 3 / 1.4 against 2 / 1.3 and 1 / 1.0
    assert chosen.choose(20) is None  # 1 / 2.0 against 1.6 / 3.3 and 2.1 / 9.0 for the slowest of 32
    assert chosen.choose(33) is None, "nothing was captured for so many"
    assert set(chosen.speeds(32)) == {"plain", "2 nodes", "15 nodes"}


def test_where_drafts_bring_nothing_they_cost_little() -> None:
    """They are given up soon and tried again ever more seldom."""
    taken = run(sizes(), 1, 20_000, 0.0, {})
    assert taken[0] == LARGE.nodes
    first = taken.index(0)
    assert first <= 2 * LEAST_ROUNDS
    drafted = [i for i, nodes in enumerate(taken) if nodes and i > first]
    lost_s = sum({0: 1.0, 2: 1.3, 15: 1.4}[nodes] - 1.0 for nodes in taken)  # each brings one token, as a plain step
    assert drafted and lost_s < 0.01 * len(taken)


def test_drafts_that_get_better_are_found_again() -> None:
    chosen = sizes()
    run(chosen, 1, 300, 0.0, {})
    assert chosen.choose(1) is None
    assert run(chosen, 1, 6000, 1.0, {})[-1] == LARGE.nodes


def test_better_drafts_than_usual_are_used_under_load() -> None:
    chosen = sizes()
    run(chosen, 1, 400, 1.5, {})
    option = chosen.choose(32)
    assert option == SMALL  # 1.8 / 3.3 against 1 / 2.0 and 2.7 / 9.0


def test_times_are_corrected_while_rounds_run() -> None:
    chosen = sizes()
    taken = run(chosen, 1, 400, 1.0, {2: 1.3, 15: 3.5})
    assert taken[0] == 15 and taken[-1] == 2


def test_under_load_the_host_is_what_a_round_waits_for() -> None:
    chosen = RoundSizes({1: [0.8e-3, 1.0e-3, 1.2e-3], 128: [2.4e-3, 3.2e-3, 7e-3]}, (SMALL, LARGE))
    assert chosen.choose(1) == LARGE
    assert chosen.choose(128) is None  # 2 tokens in 3.2 ms would be more than 1 in 2.4, but the host takes 8


def test_a_pause_says_nothing_about_the_time_of_a_size() -> None:
    chosen = sizes()
    run(chosen, 1, 100, 1.0, {15: 60.0})
    assert chosen.choose(1) == LARGE


def test_a_choice_stands_for_a_while() -> None:
    chosen = sizes()
    taken = run(chosen, 1, 6000, 0.2, {})
    changes = [i for i in range(1, len(taken)) if taken[i] != taken[i - 1]]
    assert changes and all(later - earlier >= LEAST_ROUNDS for earlier, later in itertools.pairwise(changes))


@pytest.mark.parametrize("method", OPTIONS)
def test_larger_options_bring_more(method: str) -> None:
    options = OPTIONS[method]
    gains = [option.gain for option in options]
    assert gains == sorted(gains)
    assert [option.nodes for option in options] == sorted(option.nodes for option in options)


def test_an_option_without_a_captured_size_is_not_taken() -> None:
    chosen = RoundSizes({4: [1.0, 1.3, None]}, (SMALL, LARGE))
    assert chosen.choose(3) == SMALL
    with pytest.raises(KeyError):
        chosen.speeds(3)["15 nodes"]


def test_plain_passes_are_corrected_too_but_not_by_those_with_prompts() -> None:
    chosen = sizes()
    assert chosen.choose(20) is None
    run(chosen, 20, 40, 1.0, {0: 2.6})
    assert chosen.speeds(20)["plain"] == pytest.approx(20 / 2.6, rel=0.05)
    run(chosen, 20, 40, 1.0, {0: 26.0})
    assert chosen.speeds(20)["plain"] == pytest.approx(20 / 2.6, rel=0.05), "these hold prompts"


def test_the_first_times_of_a_size_count_more_than_later_ones() -> None:
    chosen = sizes()
    run(chosen, 1, 8, 1.0, {15: 2.8})
    assert chosen.speeds(1)["15 nodes"] == pytest.approx(3.0 / 2.8, rel=0.1)


def test_what_has_not_run_is_slowed_down_as_much_as_what_has() -> None:
    """Otherwise each size would be tried in turn, because at the start all look faster than they are."""
    chosen = RoundSizes({1: [1.0, 1.3, 1.4]}, (SizeOption(2, 2, 1.0), SizeOption(15, 6, 1.35)))
    assert chosen.choose(1) == SizeOption(15, 6, 1.35)  # 2.35 / 1.4 against 2 / 1.3
    taken = run(chosen, 1, 400, 1.0, {0: 1.2, 2: 1.3 * 1.2, 15: 1.4 * 1.2})
    assert set(taken) == {15}


def test_a_group_keeps_its_size_until_few_of_its_requests_are_left() -> None:
    size = RoundSize(8, Budget(2, 2), 24)
    assert [size.count_for(alive) for alive in (8, 5, 3, 2, 1)] == [8, 8, 8, 2, 1]
