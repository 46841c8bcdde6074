"""`LLM.start_profile()`: PyTorch's profiler around what runs until `stop_profile()`, as a trace in a folder.

The native CPU kernels are one call each to PyTorch: inside them it sees nothing.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidOptionError


@dataclass(frozen=True, slots=True)
class ProfilerConfig:
    profiler: str | None = None  # "torch", or None: there is nothing to start
    torch_profiler_dir: str = ""
    delay_iterations: int = 0
    max_iterations: int = 0

    def __post_init__(self) -> None:
        if self.profiler not in (None, "torch"):
            raise InvalidOptionError(f"profiler must be 'torch', got {self.profiler!r}")
        if self.delay_iterations or self.max_iterations:
            raise InvalidOptionError(
                "delay_iterations and max_iterations are not supported: start and stop it yourself"
            )

    @staticmethod
    def parse(given: "Mapping[str, Any] | ProfilerConfig | None") -> "ProfilerConfig":
        if isinstance(given, ProfilerConfig):
            return given
        try:
            return ProfilerConfig(**(given or {}))
        except TypeError as error:
            raise InvalidOptionError(f"profiler_config: {error}") from error


class Profiler:
    def __init__(self, config: ProfilerConfig) -> None:
        self._config = config
        self._running: Any = None

    def start(self) -> None:
        if self._config.profiler is None:
            raise InvalidOptionError('there is no profiler: give profiler_config={"profiler": "torch", ...} to LLM')
        import torch.profiler

        self._running = torch.profiler.profile()
        self._running.start()

    def stop(self) -> None:
        if self._running is None:
            raise InvalidOptionError("no profile was started")
        self._running.stop()
        folder = Path(self._config.torch_profiler_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        self._running.export_chrome_trace(str(folder / f"paceline-{time.strftime('%Y%m%d-%H%M%S')}.json"))
        self._running = None
