"""Which setting at which load: on sweeps whose answers are known."""

from typing import Any

import pytest

from paceline.bench.analyse.cells import analyse
from paceline.bench.analyse.recommend import recommend, serve_options
from paceline.errors import InvalidOptionError
from tests.bench.analyse.test_report import record, sweep

Speedups = dict[int, list[float]]  # users -> the speedup on each workload


def measured(num_repeats: int = 3, noise: float = 0.0, **settings: Speedups) -> list[dict[str, Any]]:
    """Records of a sweep with these speedups; in repeat r, a setting is faster by r times the noise."""
    records = []
    for name, speedups in ({"plain": None} | settings).items():
        loads = next(iter(settings.values())) if speedups is None else speedups
        for users, factors in loads.items():
            for number, factor in enumerate(factors):
                for repeat in range(num_repeats):
                    speed = 100.0 * users * (1.0 if speedups is None else factor + repeat * noise)
                    found = record(name, users, speed, repeat)
                    found["cell"]["workload"] = f"workload {number}"
                    records.append(found)
    return records


def by_load(advice: dict[str, Any]) -> list[tuple[str, str]]:
    return [(entry["load"], entry["setting"]) for entry in advice["by_load"]]


def test_a_setting_that_wins_five_cells_and_loses_one_by_6_percent_is_recommended_and_the_loss_named() -> None:
    advice = recommend(analyse(measured(auto={1: [1.5, 1.3, 1.2], 8: [1.2, 1.1, 0.94]})))
    assert advice["speculative_config"] == {"method": "auto"}
    assert by_load(advice) == [("1 user and more", "auto")]
    assert advice["losses"] == ["workload 2, T=0, 8 users: 0.94x"]
    assert "it loses at workload 2, T=0, 8 users: 0.94x" in advice["reason"]
    assert advice["by_load"][0]["losses"] == advice["losses"]


def test_the_one_configuration_is_the_best_over_all_loads() -> None:
    advice = recommend(analyse(sweep()))
    assert advice["speculative_config"] == {"method": "suffix", "num_speculative_tokens": 8}
    assert advice["reason"].startswith("suffix:8 has the best mean speedup")
    assert by_load(advice) == [("1 user", "suffix:8"), ("8 users and more", "auto")]


def test_neighbouring_loads_with_the_same_choice_become_one_range() -> None:
    eagle3 = {1: [1.6], 2: [1.5], 4: [1.3], 8: [0.9], 16: [0.8]}
    auto = {1: [1.4], 2: [1.3], 4: [1.2], 8: [1.1], 16: [1.05]}
    advice = recommend(analyse(measured(eagle3=eagle3, auto=auto)))
    assert advice["summary"] == "1–4 users: eagle3; 8 users and more: auto"
    assert [entry["users"] for entry in advice["by_load"]] == [[1, 2, 4], [8, 16]]
    assert [round(entry["mean_speedup"], 2) for entry in advice["by_load"]] == [1.46, 1.07]


def test_a_load_is_judged_by_the_geometric_mean_over_its_cells() -> None:
    """The arithmetic mean would choose the setting that halves the speed of one workload: 1.3 against 1.25."""
    advice = recommend(analyse(measured(ngram={1: [2.1, 0.5]}, auto={1: [1.25, 1.25]})))
    assert by_load(advice) == [("1 user", "auto")]


def test_plain_decoding_is_recommended_at_the_loads_where_nothing_is_faster() -> None:
    advice = recommend(analyse([r for r in sweep() if r["cell"]["setting"] in ("plain", "ngram:4")]))
    assert by_load(advice) == [("1 user", "ngram:4"), ("8 users and more", "plain")]
    assert advice["by_load"][1]["speculative_config"] == {"method": "none"}
    slow = recommend(analyse(measured(ngram={1: [0.9], 8: [1.0]})))
    assert slow["speculative_config"] == {"method": "none"}
    assert "no setting was faster than plain decoding over all loads" in slow["reason"]


def test_settings_that_a_sweep_cannot_tell_apart_do_not_cut_a_range_in_two() -> None:
    ngram, auto = {1: [1.0], 4: [1.203], 8: [1.0]}, {1: [1.3], 4: [1.2], 8: [1.1]}
    advice = recommend(analyse(measured(ngram=ngram, auto=auto)))
    assert by_load(advice) == [("1 user and more", "auto")]
    ngram[4] = [1.25]
    advice = recommend(analyse(measured(ngram=ngram, auto=auto)))
    assert by_load(advice) == [("1 user", "auto"), ("4 users", "ngram"), ("8 users and more", "auto")]


def test_a_cell_counts_as_lost_only_where_its_whole_interval_is_below_plain() -> None:
    clear = recommend(analyse(measured(auto={1: [1.5, 0.90]}, noise=0.03)))  # 0.90, 0.93, 0.96
    assert clear["losses"] == ["workload 1, T=0, 1 user: 0.93x"]
    unclear = recommend(analyse(measured(auto={1: [1.5, 0.86]}, noise=0.08)))  # 0.86, 0.94, 1.02
    assert unclear["losses"] == []
    small = recommend(analyse(measured(auto={1: [1.5, 0.98]})))
    assert small["losses"] == []


def test_a_setting_that_failed_in_a_cell_is_not_compared_there_and_is_named() -> None:
    """Its mean over the cells that it answered is of other, perhaps easier, cells."""
    records = measured(auto={1: [1.2, 1.1], 8: [1.2, 1.1]}, ngram={1: [2.0], 8: [1.5, 1.5]})
    advice = recommend(analyse(records))
    assert by_load(advice) == [("1 user", "auto"), ("8 users and more", "ngram")]
    assert advice["speculative_config"] == {"method": "auto"} and advice["incomplete"] == ["ngram"]


def test_open_loops_have_ranges_of_their_own() -> None:
    records = measured(auto={1: [1.5]})
    for rate, factor in ((1.0, 1.2), (2.0, 1.1), (8.0, 0.8)):
        for name, speed in (("plain", 100.0), ("auto", 100.0 * factor)):
            found = record(name, 1, speed)
            found["cell"] |= {"concurrency": None, "rate_per_s": rate}
            records.append(found)
    assert recommend(analyse(records))["summary"] == (
        "1 user: auto; 1–2 requests/s: auto; 8 requests/s and more: plain"
    )


@pytest.mark.parametrize(("users", "setting"), [(1, "eagle3"), (2, "eagle3"), (6, "auto"), (8, "auto"), (100, "auto")])
def test_the_configuration_is_for_the_measured_load_nearest_to_the_users_named(users: int, setting: str) -> None:
    records = measured(eagle3={1: [1.6], 4: [1.5], 8: [0.9]}, auto={1: [1.2], 4: [1.2], 8: [1.1]})
    advice = recommend(analyse(records), users)
    assert advice["setting"] == setting
    assert serve_options(records, advice) == {"speculative_config": {"method": setting}}
    assert ("were not measured" in advice["reason"]) == (users not in (1, 4, 8))


def test_a_load_that_was_never_measured_cannot_be_named() -> None:
    with pytest.raises(InvalidOptionError, match="1 user or more"):
        recommend(analyse(sweep()), 0)
    rates = [r | {"cell": r["cell"] | {"concurrency": None, "rate_per_s": 1.0}} for r in sweep()]
    with pytest.raises(InvalidOptionError, match="a sweep with --concurrency"):
        recommend(analyse(rates), 4)


def test_without_a_plain_run_nothing_is_recommended() -> None:
    advice = recommend(analyse([r for r in sweep() if r["cell"]["setting"] == "auto"]))
    assert advice["speculative_config"] == {"method": "none"}
    assert "plain decoding was not measured" in advice["reason"]
