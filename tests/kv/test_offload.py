"""KV kept outside of the pool: brought back exactly, bounded, and not used where it is damaged or foreign."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.core.request import Request
from paceline.engine.core import EngineCore
from paceline.errors import InvalidOptionError
from paceline.kv.block_stores import SUBFOLDER, FolderStore, MemoryStore
from paceline.kv.offload import DEFAULT_FOLDER_BYTES, OffloadOption, parse_offload
from tests.bench.toy_llm import toy_model
from tests.kv.test_exchange import PROMPT, asked
from tests.toy import run_all, toy_core, toy_request

MEMORY = OffloadOption(1 << 20)
GIB = 1 << 30


def keeping(option: OffloadOption, **options: Any) -> EngineCore:
    core = toy_core(**{"num_blocks": 16, **options})
    core.keep_blocks(option)
    return core


def fill(core: EngineCore) -> None:
    """Hand out every block of the pool, so that it remembers nothing of before."""
    assert core.offload is not None
    blocks = core.kv.pool.allocate(core.kv.pool.num_blocks)
    assert blocks is not None
    core.kv.pool.release(blocks)
    assert core.kv.pool.num_cached == 0


def answer(core: EngineCore, **options: object) -> tuple[list[int], object, int]:
    request = asked(f"r{core.clock.num_steps}", **options)
    run_all(core, [request])
    return request.output_token_ids, request.logprobs, request.num_cached_tokens


@pytest.fixture(params=["memory", "folder"])
def option(request: pytest.FixtureRequest, tmp_path: Path) -> OffloadOption:
    return MEMORY if request.param == "memory" else OffloadOption(1 << 20, tmp_path)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.3}], ids=["greedy", "seeded"])
def test_a_prompt_that_the_pool_forgot_is_brought_back_and_answered_alike(
    option: OffloadOption, options: dict[str, object]
) -> None:
    core = keeping(option)
    first = answer(core, **options)
    fill(core)
    again = answer(core, **options)
    assert again[:2] == first[:2] and (first[2], again[2]) == (0, 28)
    assert core.offload is not None and core.offload.num_brought_back >= 7
    fill(core)
    core.offload.flush()
    assert answer(core, **options) == again, "also once the copies have left memory"


def test_what_the_pool_still_has_is_not_read_from_elsewhere(option: OffloadOption) -> None:
    core = keeping(option)
    answer(core)
    answer(core)
    assert core.offload is not None and core.offload.num_brought_back == 0


def test_another_process_finds_what_was_left_in_a_folder(tmp_path: Path) -> None:
    first_core = keeping(OffloadOption(1 << 20, tmp_path))
    first = answer(first_core)
    assert first_core.offload is not None
    first_core.offload.close()
    again = answer(keeping(OffloadOption(1 << 20, tmp_path)))
    assert again[:2] == first[:2] and again[2] == 28


def test_another_model_finds_nothing_there_and_removes_nothing(tmp_path: Path) -> None:
    core = keeping(OffloadOption(1 << 20, tmp_path))
    answer(core)
    assert core.offload is not None
    core.offload.close()
    files = set((tmp_path / SUBFOLDER).iterdir())
    other = keeping(OffloadOption(1 << 20, tmp_path), sharpness=2.0)
    assert answer(other)[2] == 0
    assert files <= set((tmp_path / SUBFOLDER).iterdir())


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _foreign(path: Path) -> None:
    """Whole, but of another engine."""
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(data)


def _swap(path: Path) -> None:
    """Another block's file under this one's name."""
    other = next(file for file in path.parent.iterdir() if file != path)
    shutil.copy(other, path)


@pytest.mark.parametrize("damage", [_cut, _flip, _empty, _foreign, _swap])
def test_a_damaged_or_foreign_file_is_removed_and_computed_anew(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    core = keeping(OffloadOption(1 << 20, tmp_path))
    first = answer(core)
    assert core.offload is not None
    core.offload.flush()
    third = core.exchange.usable(PROMPT)[2]
    path = tmp_path / SUBFOLDER / f"{third.hash.hex()}.kv"
    damage(path)
    fill(core)
    again = answer(core)
    assert again[:2] == first[:2] and again[2] == 8, "the two blocks before it were used"
    assert core.offload.num_damaged == 1
    core.offload.flush()
    fill(core)
    assert answer(core)[2] == 28, "the block was kept again"


def test_a_folder_that_vanishes_is_a_miss(tmp_path: Path) -> None:
    core = keeping(OffloadOption(1 << 20, tmp_path / "kv"))
    first = answer(core)
    assert core.offload is not None
    core.offload.flush()
    shutil.rmtree(tmp_path / "kv")
    fill(core)
    assert answer(core)[:2] == first[:2]


def test_a_full_disk_loses_copies_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = keeping(OffloadOption(1 << 20, tmp_path))

    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    first = answer(core)
    assert core.offload is not None
    core.offload.flush()
    fill(core)
    assert answer(core)[:2] == first[:2]
    assert list((tmp_path / SUBFOLDER).iterdir()) == []


def test_memory_keeps_to_its_limit_and_forgets_the_least_recently_used() -> None:
    store = MemoryStore(30)
    for name in (b"a", b"b", b"c"):
        store.put(name, bytes(10))
    assert store.get(b"a") is not None and store.has(b"b")
    store.put(b"d", bytes(15))
    assert [store.has(name) for name in (b"a", b"b", b"c", b"d")] == [False, True, False, True]
    assert store.num_bytes == 25
    store.put(b"e", bytes(31))
    assert store.num_bytes == 0 or not store.has(b"e"), "what is larger than all of it is not kept"


def test_a_folder_keeps_to_its_limit_whoever_wrote_there(tmp_path: Path) -> None:
    import os

    store = FolderStore(tmp_path, 100)
    for i in range(10):
        store.put(bytes([i]) * 16, bytes(10))
        os.utime(tmp_path / SUBFOLDER / f"{(bytes([i]) * 16).hex()}.kv", (i, i))
    assert store.num_bytes == 100
    assert store.get(bytes(16)) is not None, "the oldest is now the newest"
    FolderStore(tmp_path, 100).put(b"x" * 16, bytes(10))  # another process
    assert store.has(bytes(16)) and store.has(b"x" * 16) and not store.has(b"\x01" * 16)
    assert sum(file.stat().st_size for file in (tmp_path / SUBFOLDER).iterdir()) <= 100
    store.clear()
    assert list((tmp_path / SUBFOLDER).iterdir()) == []


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("x" * 500)
    (tmp_path / "old.kv").write_text("x" * 500)
    store = FolderStore(tmp_path, 100)
    for i in range(30):
        store.put(bytes([i]) * 16, bytes(20))
    store.clear()
    assert {path.name for path in tmp_path.iterdir()} == {"letter.txt", "old.kv", SUBFOLDER}
    assert (tmp_path / SUBFOLDER).stat().st_mode & 0o077 == 0, "others may not read it"


def test_a_reset_forgets_what_was_kept_and_what_is_still_running(option: OffloadOption) -> None:
    core = keeping(option)
    answer(core)
    running = toy_request("running", [5, 6, 7, 8, 9, 10, 11, 12, 13], max_tokens=6, ignore_eos=True)
    core.add_request(running)
    core.step()
    core.kv.forget_all()
    while core.has_requests:
        core.step()
    fill(core)
    assert answer(core)[2] == 0
    late = toy_request("late", running.prompt_token_ids, max_tokens=2)
    run_all(core, [late])
    assert late.num_cached_tokens == 0


def test_a_preempted_request_is_brought_back() -> None:
    plain = toy_core(num_blocks=16)
    requests = [toy_request(f"r{i}", PROMPT[i : i + 12], max_tokens=20, ignore_eos=True) for i in range(4)]
    expected = run_all(plain, requests)
    core = keeping(MEMORY)
    assert (
        run_all(core, [toy_request(r.request_id, r.prompt_token_ids, max_tokens=20, ignore_eos=True) for r in requests])
        == expected
    )
    assert sum(request.num_preemptions for request in requests) > 0, "the pool was meant to be too small"
    assert core.offload is not None and core.offload.num_brought_back > 0


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_in_small_pools_and_small_stores_say_what_they_say_alone(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)

    def some(i: int) -> Request:
        prompt = PROMPT[: rng.randint(1, 30)] + [rng.randrange(23) for _ in range(rng.randint(0, 6))]
        options = {"temperature": rng.choice([0.0, 1.2]), "ignore_eos": True}
        return toy_request(f"r{i}", prompt, max_tokens=rng.randint(1, 14), seed=i, **options)

    requests = [some(i) for i in range(40)]
    alone = toy_core(num_blocks=64, prefix_caching=False)
    truth = {r.request_id: run_all(alone, [replace(r)])[0] for r in requests}
    probe = keeping(MEMORY).blocks.target_bytes
    core = keeping(OffloadOption(rng.randint(10, 24) * (probe + 100), tmp_path if seed else None))
    waiting, aborted = list(requests), set()
    while waiting or core.has_requests:
        if waiting and rng.random() < 0.3:
            core.add_request(waiting.pop())
        if rng.random() < 0.03 and core.scheduler.running:
            aborted.add(core.scheduler.running[-1].request_id)
            core.abort(core.scheduler.running[-1].request_id)
        core.step()
        core.check_integrity()
    for request in requests:
        expected = truth[request.request_id]
        assert request.output_token_ids == expected or request.request_id in aborted
    assert core.offload is not None and core.offload.num_brought_back > 0 and core.offload.num_damaged == 0
    assert core.kv.pool.num_free == core.kv.pool.num_blocks


def test_a_request_that_waits_for_blocks_piles_up_nothing() -> None:
    core = keeping(MEMORY)
    answer(core)
    held = core.kv.pool.allocate(core.kv.pool.num_blocks - 7) or []  # its prompt takes eight
    core.add_request(asked("waits"))
    for _ in range(50):
        assert core.step() == []
    assert core.kv._released == []
    core.kv.pool.release(held)
    while core.has_requests:
        core.step()


@pytest.mark.parametrize(
    ("given", "limit_bytes", "folder"),
    [
        (4096, 4096, None),
        ("4096", 4096, None),
        ("2GiB", 2 * GIB, None),
        ("2 gib", 2 * GIB, None),
        ("1.5G", 1_500_000_000, None),
        ("500MB", 500_000_000, None),
        ("512KiB", 512 << 10, None),
        ("/var/kv", DEFAULT_FOLDER_BYTES, "/var/kv"),
        ("/var/kv:20GiB", 20 * GIB, "/var/kv"),
        ("kv:old", DEFAULT_FOLDER_BYTES, "kv:old"),
        ("./2GiB", DEFAULT_FOLDER_BYTES, "2GiB"),
    ],
)
def test_the_option_is_a_size_or_a_folder(given: Any, limit_bytes: int, folder: str | None) -> None:
    assert parse_offload(given) == OffloadOption(limit_bytes, None if folder is None else Path(folder))


@pytest.mark.parametrize("given", [0, -1, "0", "0GiB", "", True, "/var/kv:0", 1.5])
def test_an_option_that_keeps_nothing_is_refused(given: Any) -> None:
    with pytest.raises(InvalidOptionError, match="kv_offload"):
        parse_offload(given)


def test_an_llm_says_what_it_keeps_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    small: dict[str, Any] = {"num_kv_blocks": 16, "block_size": 4, "max_num_seqs": 4}
    llm = LLM(toy_model(), {"method": "none"}, kv_offload=f"{tmp_path}:1MiB", **small)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm.generate(PROMPT, greedy)
    figures = llm.stats()["kv_offload"]
    assert figures["num_kept"] == 8 and figures["limit_bytes"] == 1 << 20
    assert "kv_offload" not in LLM(toy_model(), {"method": "none"}, **small).stats()
    with pytest.raises(InvalidOptionError, match="too little for one KV block"):
        LLM(toy_model(), {"method": "none"}, kv_offload=16, **small)
    with pytest.raises(InvalidOptionError, match="enable_prefix_caching"):
        LLM(toy_model(), {"method": "none"}, kv_offload=4096, enable_prefix_caching=False, **small)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidOptionError, match="cannot be kept"):
        LLM(toy_model(), {"method": "none"}, kv_offload=str(tmp_path / "file"), **small)
