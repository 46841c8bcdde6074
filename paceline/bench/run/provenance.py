"""Where a number comes from: commit, arguments, versions, machine. In every record."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from paceline.core.machine import cpu_info


def provenance(arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    import numpy
    import torch

    from paceline import __version__

    facts: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": {
            "paceline": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
        },
        "machine": {
            "cpu": cpu_info().get("model name", platform.processor()),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_average": [round(value, 2) for value in os.getloadavg()],
            "system": platform.platform(),
        },
    }
    if torch.cuda.is_available():
        facts["machine"]["gpu"] = torch.cuda.get_device_name()
    if arguments is not None:
        facts["arguments"] = arguments
    return facts


@cache
def commit() -> str | None:
    """The checkout's commit when this process first asked, with a + where tracked files were changed since; None
    outside a checkout. It is asked once: later commits are not the code that runs here."""
    return _asked_of_git("HEAD", ".")


@cache
def code() -> str | None:
    """The same for the package alone: commits that change nothing but documents and tests have the same code."""
    return _asked_of_git("HEAD:paceline", "paceline")


def _asked_of_git(name: str, changed: str) -> str | None:
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        found = _git(root, "rev-parse", "--short=12", name)
        return found + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no", "--", changed) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
