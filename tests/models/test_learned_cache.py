"""What was learned is there for the next start, or it counts as nothing; and it never makes an engine fail."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.models import learned_cache
from paceline.models.learned_cache import FOLDER_VARIABLE, LearnedEntry, facts_of, file_state, learned_entry
from paceline.models.loader import LoadedModel
from tests.bench.toy_llm import toy_model

ABOUT = {"model": "a", "machine": "b"}


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LearnedEntry:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "learned"))
    found = learned_entry(ABOUT)
    assert found is not None
    return found


def test_what_one_start_wrote_the_next_one_reads(entry: LearnedEntry, tmp_path: Path) -> None:
    assert entry.read() is None
    entry.write({"x": [1, 2.5]})
    again = learned_entry(dict(reversed(ABOUT.items())))
    assert again is not None and again.read() == {"x": [1, 2.5]}
    assert [file.parent for file in (tmp_path / "learned").iterdir()] == [tmp_path / "learned"]


def test_another_model_machine_or_drafter_has_an_entry_of_its_own(entry: LearnedEntry) -> None:
    entry.write({"x": 1})
    other = learned_entry({**ABOUT, "machine": "c"})
    assert other is not None and other.path != entry.path and other.read() is None


def test_off_keeps_nothing_and_without_a_word_it_is_in_the_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "off")
    assert learned_entry(ABOUT) is None
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    found = learned_entry(ABOUT)
    assert found is not None and found.path.parent == tmp_path / "learned"


WHOLE: dict[str, Any] = {
    "format": learned_cache.FORMAT,
    "about": ABOUT,
    "digest": learned_cache._digest({}),
    "learned": {},
}
BROKEN = {
    "empty": "",
    "half": json.dumps(WHOLE)[:-9],
    "no text": b"\xff\xfe\x00",
    "changed": json.dumps(WHOLE | {"learned": {"x": 1}}),
    "a list": "[]",
    "deep": "[" * 100_000,
    "too large": json.dumps(WHOLE | {"learned": "x" * learned_cache.MOST_BYTES}),
    "newer": json.dumps(WHOLE | {"format": learned_cache.FORMAT + 1}),
    "foreign": json.dumps(WHOLE | {"about": {**ABOUT, "machine": "c"}}),
    "nothing learned": json.dumps({key: WHOLE[key] for key in ("format", "about", "digest")}),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_entry_that_is_damaged_newer_or_foreign_counts_as_none_and_is_replaced(
    kind: str, entry: LearnedEntry, caplog: pytest.LogCaptureFixture
) -> None:
    entry.path.parent.mkdir(parents=True)
    entry.path.write_text(json.dumps(WHOLE))
    assert entry.read() == {}
    text = BROKEN[kind]
    entry.path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with caplog.at_level(logging.INFO, logger="paceline"):
        assert entry.read() is None
    (record,) = caplog.records
    assert record.levelno == logging.INFO and str(entry.path) in record.getMessage()
    entry.write({"x": 1})
    assert entry.read() == {"x": 1}


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file" / "learned"))
    entry = learned_entry(ABOUT)
    assert entry is not None
    with caplog.at_level(logging.INFO, logger="paceline"):
        entry.write({"x": 1})
        entry.write({"x": float("inf")})
        entry.write({"x": object()})
        assert entry.read() is None
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_of_two_writers_one_wins_and_no_reader_sees_a_part(entry: LearnedEntry) -> None:
    values = ["a" * 50_000, "b" * 50_000]
    writers = [
        threading.Thread(target=lambda value=value: [entry.write({"x": value}) for _ in range(50)]) for value in values
    ]
    entry.write({"x": values[0]})
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found = entry.read()
        assert found is not None and found["x"] in values
    assert [file.name for file in entry.path.parent.iterdir()] == [entry.path.name]


def test_it_is_written_when_enough_is_new_and_never_by_a_second_writer(
    entry: LearnedEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = entry._begin_s
    monkeypatch.setattr(learned_cache.time, "monotonic", lambda: now_s)
    written: list[float] = []

    def learned() -> dict[str, float]:
        written.append(now_s)
        return {"at": now_s}

    def times(seconds: float, step_s: float, is_idle: bool) -> int:
        nonlocal now_s
        before = len(written)
        for _ in range(round(seconds / step_s)):
            now_s += step_s
            entry.note(learned, is_idle)
            entry.wait()
        return len(written) - before

    assert times(9.0, 0.1, is_idle=False) == 0  # busy
    assert times(0.1, 0.1, is_idle=True) == 1
    assert entry.read() == {"at": now_s}
    assert times(5.0, 0.5, is_idle=True) == 3  # each when a tenth is new
    assert times(100.0, 1.0, is_idle=False) == 9  # at most every ten seconds
    assert times(3600.0, 1.0, is_idle=True) <= 40


def test_the_oldest_entries_go(entry: LearnedEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_cache, "MOST_ENTRIES", 3)
    for number in range(5):
        one = learned_entry({"model": str(number)})
        assert one is not None
        one.write({})
        one.write({})
    assert len(list(entry.path.parent.iterdir())) == 3
    assert one.read() == {}


def test_facts_change_with_the_models_files(smollm2_float32: LoadedModel, tmp_path: Path) -> None:
    decoder = smollm2_float32.decoder
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_text("x")
    first = facts_of(tmp_path, decoder, "so")
    (tmp_path / "a.safetensors").write_text("xy")
    second, third = facts_of(tmp_path, decoder, "so"), facts_of(tmp_path, decoder, "otherwise")
    assert first is not None and second is not None and third is not None
    assert {key for key in first if first[key] != second[key]} == {"files"}
    assert {key for key in first if second[key] != third[key]} == {"computed"}
    assert facts_of(toy_model().path, decoder, "so") is None  # made in memory
    assert file_state(tmp_path / "nothing") == ""
