"""What drafting taught an engine, kept on disk for the next start: per model and machine, numbers only, no text.

A file of a few kilobytes in the cache folder. Whatever is wrong with it (damaged, another version, another machine, a
folder that cannot be written) is the same as not having it: the engine starts from plain decoding. What it says is
believed less firmly than what is measured now. `PACELINE_AUTO_MEMORY=off`, or the option `remember`, switches it off.
"""

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.models.aliases import cache_dir
from paceline.spec.engine_parts import EngineParts

logger = logging.getLogger("paceline")

VARIABLE = "PACELINE_AUTO_MEMORY"
VERSION = 2  # of the file; raise it when its numbers mean something else
MOST_BYTES = 1 << 16
FIRST_SAVE_S, MOST_BETWEEN_S = 4.0, 60.0  # of running before the first time, then twice as long each time, up to this
MOST_DRAFTERS = 32  # of one model, the last ones used


class Keeps(Protocol):
    """Something learned that is worth keeping."""

    def state(self) -> list[float]: ...

    def restore(self, state: Sequence[float]) -> None: ...


def states(parts: Mapping[str, Keeps]) -> dict[str, list[float]]:
    return {name: part.state() for name, part in parts.items()}


def restore(parts: Mapping[str, Keeps], known: Any) -> None:
    """None of them where anything of it is wrong."""
    if not isinstance(known, dict):
        return
    found = {name: numbers(known.get(name), len(state)) for name, state in states(parts).items()}
    for name, part in parts.items():
        state = found[name]
        if state is not None and None not in found.values():
            part.restore(state)


class Memory:
    """What one engine knew at its start, and tells the next."""

    def __init__(self, services: EngineParts | None) -> None:
        """None: nothing is kept."""
        self._path = None if services is None else state_path(services)
        self._due_s = FIRST_SAVE_S

    def load(self) -> dict[str, Any]:
        return load(self._path)

    def save_when_due(self, run_s: float, state: Callable[[], dict[str, Any]]) -> None:
        if self._path is not None and run_s >= self._due_s:
            self._due_s += min(MOST_BETWEEN_S, self._due_s)
            known, old = state(), load(self._path).get("drafters")
            if isinstance(old, dict):  # of other engines with this model: the last ones of them are kept
                others = {name: one for name, one in old.items() if name not in known["drafters"]}
                room = max(0, MOST_DRAFTERS - len(known["drafters"]))
                known["drafters"] = dict(list(others.items())[-room:] if room else []) | known["drafters"]
            if not save(self._path, known):
                self._path = None


def state_path(services: EngineParts) -> Path | None:
    """Where this model on this machine has its file; None where nothing is to be kept."""
    if services.decoder is None or os.environ.get(VARIABLE, "").lower() in ("off", "0", "false"):
        return None
    decoder = services.decoder
    # A few rows of the embedding tell two models of one architecture apart.
    weights = decoder.vocabulary_rows(torch.arange(4)).float().cpu().numpy().tobytes()
    device = torch.cuda.get_device_name(decoder.device) if decoder.device.type == "cuda" else platform.processor()
    machine = (platform.machine(), device, os.cpu_count(), decoder.num_threads)
    facts = repr((VERSION, decoder.config, decoder.dtype, machine)).encode() + weights
    return cache_dir() / "auto" / f"{hashlib.sha256(facts).hexdigest()[:16]}.json"


def load(path: Path | None) -> dict[str, Any]:
    """Empty where there is nothing to be believed."""
    if path is None:
        return {}
    try:
        if path.stat().st_size > MOST_BYTES:
            return {}
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict) or known.get("version") != VERSION:
        return {}
    return known


def save(path: Path, known: dict[str, Any]) -> bool:
    """The whole file or nothing of it. False where it cannot be written: then nobody should try again."""
    text = json.dumps({"version": VERSION, **known})
    if len(text) > MOST_BYTES:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError as error:
        logger.debug("what auto learned is not kept: %s", error)
        return False
    return True


def numbers(value: Any, count: int) -> list[float] | None:
    """So many finite numbers; None for anything else."""
    if not isinstance(value, list) or len(value) != count:
        return None
    if not all(isinstance(one, int | float) and math.isfinite(one) and abs(one) < 1e9 for one in value):
        return None
    return [float(one) for one in value]
