"""benchmarks/hostile.py: times go to the right attack, misses are seen, and bodies are small enough to be read."""

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

MAX_BODY_BYTES = 4 << 20  # the server's default: a larger body would be refused unread


@pytest.fixture(scope="module")
def hostile() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("hostile")


@pytest.fixture
def findings(hostile: ModuleType, tmp_path: Path) -> Any:
    arguments = SimpleNamespace(
        num_kv_blocks=64, model="toy", log=str(tmp_path / "log"), streams=1, seconds=1, attack=None
    )
    return hostile.Trial(arguments).findings


def finished(findings: Any, quiet_gap_s: float, attack_gap_s: float) -> Any:
    """The result after a quiet slice and one attack, each with one gap and one right answer."""
    for name, gap_s in (("none", quiet_gap_s), ("deep JSON", attack_gap_s)):
        findings.slices.begin(name)
        findings.slices.add("gap", findings.slices._begins_s[-1], gap_s)
        findings.outcomes[name]["right"] += 1
    findings.memory += [(0.0, 100.0), (10.0, 100.0)]
    return findings.result(["none", "deep JSON"], 1.0, 0)


def test_a_gap_counts_for_the_attack_under_way_when_it_ended(hostile: ModuleType) -> None:
    slices = importlib.import_module("hostile_findings").Slices()
    slices._begins_s, slices._names = [10.0, 20.0], ["none", "deep JSON"]
    slices.add("gap", 19.9, 0.5)
    slices.add("gap", 20.1, 5.0)
    assert slices.of("gap") == {"none": [0.5], "deep JSON": [5.0]}


def test_a_run_in_which_no_friend_was_delayed_meets_every_target(hostile: ModuleType, findings: Any) -> None:
    assert hostile.report(finished(findings, 0.10, 0.14))


@pytest.mark.parametrize("harm", ["gap", "wrong", "lost", "health", "5xx", "death", "memory", "unmeasured"])
def test_each_kind_of_harm_alone_misses_a_target(hostile: ModuleType, findings: Any, harm: str) -> None:
    result = finished(findings, 0.10, 0.16 if harm == "gap" else 0.10)
    row = result["attacks"]["deep JSON"]
    row |= {"health": {"health_s": 0.2}, "5xx": {"num_5xx": 1}, "unmeasured": {"gaps": 0}}.get(harm, {})
    result |= {"wrong": {"wrong": 1}, "lost": {"lost": 1}, "memory": {"rss_growth": 0.2}}.get(harm, {})
    result["deaths"] += [{"attack": "deep JSON"}] if harm == "death" else []
    assert not hostile.report(result)


def test_what_friends_lost_is_counted_over_all_attacks(findings: Any) -> None:
    findings.outcomes["deep JSON"] = Counter({"lost: 429 overloaded": 2, "lost: cut": 1, "wrong": 1})
    result = finished(findings, 0.1, 0.1)
    assert (result["right"], result["wrong"], result["lost"]) == (2, 1, 3)


def test_every_body_is_small_enough_to_be_read_and_its_length_is_right(hostile: ModuleType) -> None:
    attacks = importlib.import_module("hostile_attacks")
    target = attacks.Target(1, "key")
    for name, attack in attacks.ATTACKS.items():
        bodies = list(attack.bodies())
        requests = attack.prepare(target)
        for _ in bodies:
            head, _, body = next(requests).partition(b"\r\n\r\n")
            assert head.endswith(b"Content-Length: %d" % len(body)), name
            assert len(body) <= MAX_BODY_BYTES, name
