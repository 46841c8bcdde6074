"""What the files of a fetched model were when they were made, so that a damaged one is never served.

`checksums.json` in the model's folder has size, time and SHA-256 of every file. Looking at size and time costs nothing;
a file that differs in either is hashed, and must still be what it was.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import ModelLoadError

CHECKSUMS_FILE = "checksums.json"


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path) -> None:
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS_FILE)
    _write(folder, {path.name: _state(path) | {"sha256": sha256_of(path)} for path in files})


def check_files(folder: Path, original: dict[str, str]) -> None:
    """Raise for a file that is missing or is not what it was. `original`: SHA-256 by name, where it is known anyway.

    A folder from before there were checksums gets them now, once what is known of it was checked."""
    known = _read(folder)
    if known is None:
        for name, expected in original.items():
            _check(folder, folder / name, expected)
        with suppress(OSError):  # a cache that we may only read stays as it is, and is checked every time
            write_checksums(folder)
        return
    changed = {name: entry for name, entry in known.items() if _state_or_none(folder / name) != _without_hash(entry)}
    for name, entry in changed.items():
        _check(folder, folder / name, entry["sha256"])
        known[name] = _state(folder / name) | {"sha256": entry["sha256"]}  # copied, or touched
    if changed:
        with suppress(OSError):
            _write(folder, known)


def _check(folder: Path, path: Path, expected: str) -> None:
    found = sha256_of(path) if path.is_file() else None
    if found != expected:
        state = "is missing" if found is None else f"has SHA-256 {found}, but was made with {expected}"
        raise ModelLoadError(
            f"{path} {state}: the model is damaged and is not loaded. Delete the folder {folder}, and it is fetched "
            "again."
        )


def _state(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"bytes": stat.st_size, "time_ns": stat.st_mtime_ns}


def _state_or_none(path: Path) -> dict[str, Any] | None:
    return _state(path) if path.is_file() else None


def _without_hash(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "sha256"}


def _read(folder: Path) -> dict[str, dict[str, Any]] | None:
    try:
        found = json.loads((folder / CHECKSUMS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(found, dict) and all(isinstance(entry, dict) and "sha256" in entry for entry in found.values())
    return found if whole else None


def _write(folder: Path, content: dict[str, dict[str, Any]]) -> None:
    """Whole or not at all: two processes may do this at once."""
    part = folder / f".{CHECKSUMS_FILE}.{os.getpid()}"
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(folder / CHECKSUMS_FILE)
