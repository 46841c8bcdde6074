"""Whether a model fits into memory, asked before it is loaded: running out later may take the whole machine along."""

import math
from pathlib import Path

import torch

from paceline.core.model_config import ModelConfig
from paceline.errors import ModelLoadError
from paceline.models.layout import expected_shapes

PACKED_BYTES = 1.35  # of the file's: blocks with their scales side by side; 1.17 measured for a Q4_K_M file
INT8_BYTES = 34 / 32  # a weight and its part of a scale
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")


def check_memory(path: Path, config: ModelConfig, dtype: torch.dtype, quantization: str | None, device: str) -> None:
    """Raise where the weights alone would not fit. Keys and values come later, and take what is left."""
    needed = weight_bytes(path, config, dtype, quantization)
    if quantization is not None and device == "cuda":
        needed += config.vocab_size * config.hidden_size * dtype.itemsize  # the embedding, which is not packed there
    available = available_bytes(device)
    if available is not None and needed > available:
        place = "GPU memory" if device == "cuda" else "memory"
        raise ModelLoadError(
            f"{path} takes about {needed / 1e9:.1f} GB of {place}, but {available / 1e9:.1f} GB are available. Close "
            "other programs, take a smaller or a quantized model, or a smaller dtype."
        )


WIDENED_SHARE = 0.5  # of the GPU's free memory that widened weights may take: keys and values need the rest


def fits_widened(path: Path, config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether quantized weights may be widened on the GPU."""
    available = available_bytes("cuda")
    return available is None or weight_bytes(path, config, dtype, None) <= WIDENED_SHARE * available


def weight_bytes(path: Path, config: ModelConfig, dtype: torch.dtype, quantization: str | None) -> int:
    """About what the weights take once they are loaded."""
    if quantization in ("gguf", "checkpoint"):
        return int(PACKED_BYTES * _stored_bytes(path))
    num_weights = sum(math.prod(shape) for shape in expected_shapes(config).values())
    return int(num_weights * (INT8_BYTES if quantization == "int8" else dtype.itemsize))


def _stored_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    sources = list(path.glob("*.gguf")) or [file for glob in WEIGHT_FILES for file in path.glob(glob)]
    return sum(file.stat().st_size for file in sources)


def available_bytes(device: str) -> int | None:
    """What can still be had without pushing others out; None where the system does not say."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return min((found for found in (_system_bytes(), _container_bytes()) if found is not None), default=None)


def _system_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _container_bytes(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit leaves, with file pages counted as free: the system drops them when asked."""
    try:
        limit, used = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(statistics.get("file", 0))
