"""What was learned while a model ran on this machine, kept for its next start: a few kilobytes of JSON for each.

An entry is named by what was learned about: the model's files, how they are computed, the machine, and what the caller
adds. It is a prior and never more: one that is damaged, of another format or of something else counts as none, and
nothing here raises. By its digest, what is read is what was written under the same `FORMAT`. An entry appears whole or
not at all; of two processes that write the same one the last wins.

`PACELINE_LEARNED_CACHE` is the folder; `off` keeps and reads nothing.
"""

import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.core.forward import Target
from paceline.core.machine import cpu_info
from paceline.models.aliases import cache_dir
from paceline.models.packed_cache import weight_files
from paceline.ops.native.library import library_sha256

logger = logging.getLogger("paceline")

FOLDER_VARIABLE, OFF = "PACELINE_LEARNED_CACHE", "off"
FORMAT = 1  # changes with what an entry holds and with what its values mean
MOST_BYTES, MOST_ENTRIES = 1_000_000, 256  # a larger one is not ours; the oldest of more are deleted
NEW_SHARE = 0.1  # an entry is written again when so much of its time is new
LEAST_BUSY_S = 10.0  # and while requests run, only so often


@dataclass(slots=True)
class LearnedEntry:
    path: Path
    about: Mapping[str, str]
    _begin_s: float = field(default_factory=time.monotonic)
    _written_s: float | None = None
    _writer: threading.Thread | None = None

    def read(self) -> Any:
        """What was kept, or None."""
        try:
            if self.path.stat().st_size > MOST_BYTES:
                raise ValueError("too large")
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("about") != dict(self.about):
                raise ValueError("of another format, or about something else")
            if found["digest"] != _digest(found["learned"]):
                raise ValueError("changed since it was written")
            return found["learned"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, RecursionError) as error:
            self.ignore(error)
            return None

    def ignore(self, error: BaseException) -> None:
        logger.info("what an earlier run learned is not used: %s (%s)", self.path, error)

    def note(self, learned: Callable[[], Mapping[str, Any]], is_idle: bool) -> None:
        """Write it in a thread of its own, if enough is new. To be called often."""
        now_s = time.monotonic()
        since_s = now_s - (self._begin_s if self._written_s is None else self._written_s)
        is_due = is_idle or since_s >= LEAST_BUSY_S
        if not is_due or (self._written_s is not None and since_s < NEW_SHARE * (now_s - self._begin_s)):
            return
        if self._writer is not None and self._writer.is_alive():
            return
        self._written_s = now_s
        try:
            # Not a daemon: a program that ends now waits for the millisecond that this takes.
            self._writer = threading.Thread(target=self.write, args=(learned(),), name="paceline-learned")
            self._writer.start()
        except RuntimeError as error:  # the interpreter is shutting down
            logger.debug("what was learned is not kept (%s)", error)

    def write(self, learned: Mapping[str, Any]) -> None:
        folder, work = self.path.parent, None
        try:
            whole = {"format": FORMAT, "about": dict(self.about), "digest": _digest(learned), "learned": learned}
            text = json.dumps(whole, allow_nan=False)
            folder.mkdir(parents=True, exist_ok=True)
            if not self.path.exists():
                _make_room(folder)
            with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".", suffix=".tmp", delete=False) as file:
                work = Path(file.name)
                file.write(text)
            work.replace(self.path)
        except (OSError, ValueError, TypeError) as error:
            logger.info("what was learned could not be kept in %s (%s)", folder, error)
            if work is not None:
                work.unlink(missing_ok=True)

    def wait(self) -> None:
        """Until what is being written is there."""
        if self._writer is not None:
            self._writer.join()


def learned_entry(about: Mapping[str, str]) -> LearnedEntry | None:
    """Where this is kept, or None where nothing is."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given == OFF:
        return None
    folder = Path(given).expanduser() if given else cache_dir() / "learned"
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
    return LearnedEntry(folder / f"{name}.json", about)


def facts_of(path: Path, decoder: Target, execution: str) -> dict[str, str] | None:
    """What the cost of a pass and the acceptance of drafts depend on, of a model and this machine; None for a model
    that was not read from files. `execution`: how it computes, threads included."""
    state = file_state(path)
    if not state:
        return None
    on_cpu = decoder.device.type == "cpu"
    return {
        "model": path.name,
        "files": hashlib.sha256(state.encode()).hexdigest()[:32],
        "computed": f"{execution}, {decoder.dtype}",
        "kernels": library_sha256() if decoder.handle is not None else torch.__version__,
        "machine": cpu_info().get("model name", "") if on_cpu else torch.cuda.get_device_name(decoder.device),
        "threads": str(decoder.num_threads or torch.get_num_threads()),
    }


def file_state(path: Path) -> str:
    """Changes with the files of a model or a drafter; empty where there are none. No file is read."""
    try:
        files = [path] if path.is_file() else [file for file in weight_files(path) if file.is_file()]
        state = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except OSError:
        return ""
    return json.dumps(state) if state else ""


def _digest(learned: Any) -> str:
    return hashlib.sha256(json.dumps(learned, sort_keys=True).encode()).hexdigest()


def _make_room(folder: Path) -> None:
    """The oldest go, and what a killed process left behind."""
    entries = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    remains = [file for file in folder.glob(".*.tmp") if time.time() - file.stat().st_mtime > 3600.0]
    for file in (*entries[MOST_ENTRIES - 1 :], *remains):
        file.unlink(missing_ok=True)
