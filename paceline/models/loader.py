"""Everything an engine needs of a model, from a name: config, decoder and tokenizer.

>>> model = load_model("smollm2-135m")
>>> model.decoder.forward(batch, kv_cache)
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.core.model_config import ModelConfig
from paceline.core.weights import QuantizedTensor
from paceline.errors import InvalidOptionError
from paceline.models.aliases import SOURCE_FILE
from paceline.models.config import model_config
from paceline.models.decoder import Decoder
from paceline.models.gguf_file import GgufFile
from paceline.models.hf import read_folder
from paceline.models.layout import check_weights
from paceline.models.resolve import resolve_model
from paceline.models.tokenizer import Tokenizer

logger = logging.getLogger("paceline")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")
KERNELS = ("auto", "native", "torch")


class TargetDecoder(Protocol):
    """What `Decoder` and `NativeDecoder` have in common."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: Tensor,
        *,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> ForwardOutput: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    name: str  # as the user called it
    path: Path  # folder or .gguf file
    config: ModelConfig
    decoder: TargetDecoder
    tokenizer: Tokenizer


def load_model(
    model: str,
    *,
    dtype: str = "auto",  # float32 on a CPU, bfloat16 on CUDA
    device: str = "auto",
    quantization: str | None = None,  # native kernels only: "int8", or "gguf" for the file's own blocks
    batch_invariant: bool | None = None,  # None: where it costs nothing, that is in the native kernels
    num_threads: int | None = None,
    kernels: str = "auto",
    quiet: bool = False,
) -> LoadedModel:
    """Resolve, read and build a model. `num_threads` sets PyTorch's threads where PyTorch computes."""
    target = _device(device)
    torch_dtype = _dtype(dtype, target)
    use_native = _use_native(kernels, target, quantization)
    if num_threads is not None and num_threads < 1:
        raise InvalidOptionError(f"num_threads must be at least 1, but is {num_threads}")
    path = resolve_model(model, progress=not quiet)
    config = load_config(path)
    tokenizer = load_tokenizer(path)
    weights = load_weights(path, config, keep_quantized=quantization == "gguf")
    decoder: TargetDecoder
    if use_native:
        from paceline.models.native import NativeDecoder

        decoder = NativeDecoder(config, weights, dtype=torch_dtype, quantization=quantization, num_threads=num_threads)
    else:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        decoder = Decoder(config, weights, dtype=torch_dtype, device=target, batch_invariant=bool(batch_invariant))
    return LoadedModel(model, path, config, decoder, tokenizer)


def load_config(path: Path) -> ModelConfig:
    return model_config(path) if path.is_dir() else GgufFile(path).config()


def load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_folder(path) if path.is_dir() else Tokenizer.from_gguf(path)


def load_weights(
    path: Path, config: ModelConfig, *, keep_quantized: bool = False
) -> dict[str, Tensor | QuantizedTensor]:
    """The model's tensors, checked against its config. `keep_quantized` leaves GGUF blocks as they are stored."""
    if path.is_dir() and not (keep_quantized and (path / SOURCE_FILE).is_file()):
        return check_weights(read_folder(path), config, str(path))
    file = path / SOURCE_FILE if path.is_dir() else path
    return check_weights(GgufFile(file).weights(keep_quantized=keep_quantized), config, str(file))


def _device(device: str) -> torch.device:
    if device not in DEVICES:
        raise InvalidOptionError(f"device must be one of {', '.join(DEVICES)}, but is {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidOptionError(
            "device 'cuda' was asked for, but PyTorch sees no CUDA device: install a CUDA build of PyTorch and check "
            "the driver, or use device='cpu'"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise InvalidOptionError(f"dtype must be auto, {', '.join(DTYPES)}, but is {dtype!r}")
    return DTYPES[dtype]


def _use_native(kernels: str, device: torch.device, quantization: str | None) -> bool:
    """Native kernels wherever they can do what was asked; refuse what nobody can."""
    from paceline.ops import native

    if kernels not in KERNELS:
        raise InvalidOptionError(f"kernels must be one of {', '.join(KERNELS)}, but is {kernels!r}")
    if kernels == "native" and device.type != "cpu":
        raise InvalidOptionError(f"the native kernels run on a CPU, not on {device.type}: leave kernels='native' out")
    if kernels != "torch" and device.type == "cpu":
        if native.available():
            return True
        if kernels == "native":
            raise InvalidOptionError(f"kernels='native' was asked for, but: {native.unavailable_reason()}")
        logger.warning(
            "Running on PyTorch, which is slower, without the native kernels: %s", native.unavailable_reason()
        )
    if quantization is not None:
        raise InvalidOptionError(
            f"quantization={quantization!r} needs the native CPU kernels; leave it out to run on PyTorch"
        )
    return False
