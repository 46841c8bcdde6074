"""Measurements on disk: one JSON line per run, written whole and synced before the next run begins.

A killed sweep loses at most the run it was in. Opening the file again reads what is there; a last line that was cut
off in the middle is dropped, a broken line anywhere else is an error.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.errors import InvalidOptionError

Record = dict[str, Any]


class RecordFile:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.records = self._read()

    def done(self) -> set[str]:
        """Keys of the runs that succeeded; a failed one is to be run again."""
        return {record["key"] for record in self.records if record["status"] == "ok"}

    def append(self, *records: Record) -> None:
        """Several belong together: they were measured in turns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))
            file.flush()
            os.fsync(file.fileno())
        self.records.extend(records)

    def _read(self) -> list[Record]:
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        tail = lines.pop()  # after the last newline: empty, or a line that was cut off
        records = [_decode(line, number, self.path) for number, line in enumerate(lines, 1) if line.strip()]
        if tail:
            with self.path.open("rb+") as file:
                file.truncate(sum(len(line) + 1 for line in lines))
        return records


def read_records(paths: Iterable[str | Path]) -> list[Record]:
    """The records of several files. Where a run is in them twice, the later one counts."""
    latest: dict[str, Record] = {}
    for path in paths:
        if not Path(path).exists():
            raise InvalidOptionError(f"no records at {path}: run `paceline bench sweep --out {path}` first")
        for record in RecordFile(path).records:
            latest[record["key"]] = record
    return list(latest.values())


def _decode(line: bytes, number: int, path: Path) -> Record:
    try:
        record: Record = json.loads(line)
        if not {"key", "status", "cell"} <= set(record):
            raise ValueError("no key, status or cell")
    except ValueError as error:
        raise InvalidOptionError(f"{path}, line {number} is not a benchmark record: {error}") from error
    return record
