"""Everything an engine needs of a model, from a name: config, decoder and tokenizer.

>>> model = load_model("smollm2-135m")
>>> model.decoder.forward(batch, kv_cache)
"""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.forward import Target
from paceline.core.model_config import ModelConfig
from paceline.core.weights import QuantizedTensor
from paceline.errors import InvalidOptionError
from paceline.models.aliases import SOURCE_FILE
from paceline.models.config import model_config
from paceline.models.decoder import Decoder
from paceline.models.gguf_file import GgufFile
from paceline.models.hf import read_folder
from paceline.models.layout import check_weights
from paceline.models.padded_decoder import PaddedDecoder
from paceline.models.resolve import resolve_model
from paceline.models.static_inputs import PassRoom
from paceline.models.tokenizer import Tokenizer

logger = logging.getLogger("paceline")

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float": torch.float32,
}
DEVICES = ("auto", "cpu", "cuda")
KERNELS = ("auto", "native", "torch")
TRITON_CAPABILITY = (8, 0)  # the first with bfloat16 in its tensor cores, and what Triton still supports
FUSED_HEAD_DIM = 256  # the largest whose keys and values fit into shared memory beside each other
TRITON_HEAD_DIM = 16  # the smallest side of a product in tensor cores


@dataclass(frozen=True, slots=True)
class LoadedModel:
    name: str  # as the user called it
    path: Path  # folder or .gguf file
    config: ModelConfig
    decoder: Target
    tokenizer: Tokenizer
    execution: str  # how it computes, in one line for people
    capture: Callable[[PassRoom], PaddedDecoder] | None = None  # where an engine should run it as captured passes


def load_model(
    model: str,
    *,
    dtype: str = "auto",  # float32 on a CPU (quantized: float16 keys and values), bfloat16 on CUDA
    device: str = "auto",
    quantization: str | None = "auto",  # "int8", "gguf" (the file's own blocks), None, or what `_quantization` picks
    batch_invariant: bool | None = None,  # None: where it costs next to nothing, see `_batch_invariant`
    num_threads: int | None = None,
    kernels: str = "auto",
    quiet: bool = False,
) -> LoadedModel:
    """Resolve, read and build a model. `num_threads` sets PyTorch's threads where PyTorch computes."""
    target = _device(device)
    torch_dtype = _dtype(dtype, target)
    use_native = _use_native(kernels, target)
    if num_threads is not None and num_threads < 1:
        raise InvalidOptionError(f"num_threads must be at least 1, but is {num_threads}")
    path = resolve_model(model, progress=not quiet)
    quantization = _quantization(quantization, path, dtype, use_native)
    if dtype == "auto" and quantization:
        torch_dtype = torch.float16  # keys and values: finer than the weights, at half the bytes of float32
    config = load_config(path)
    tokenizer = load_tokenizer(path)
    weights = load_weights(path, config, keep_quantized=quantization == "gguf")
    decoder: Target
    capture: Callable[[PassRoom], PaddedDecoder] | None = None
    if use_native:
        from paceline.models.native import NativeDecoder

        decoder = NativeDecoder(config, weights, dtype=torch_dtype, quantization=quantization, num_threads=num_threads)
    else:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        invariant = _batch_invariant(batch_invariant, target, config)
        decoder = Decoder(config, weights, dtype=torch_dtype, device=target, batch_invariant=invariant)
        if invariant and target.type == "cuda" and kernels == "auto" and config.head_dim <= FUSED_HEAD_DIM:
            decoder, capture = _fused(decoder)
    return LoadedModel(model, path, config, decoder, tokenizer, _execution(decoder, quantization), capture)


def _fused(decoder: Decoder) -> tuple[Target, Callable[[PassRoom], PaddedDecoder]]:
    """The decoder on the fused kernels, and how an engine captures its passes."""
    from paceline.models.captured_passes import CapturedPasses  # triton exists only where CUDA does
    from paceline.models.fused_decoder import FusedDecoder

    fused = FusedDecoder(decoder)
    return fused, lambda room: PaddedDecoder(fused, CapturedPasses(fused), room)


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
    dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise InvalidOptionError(f"dtype must be auto, {', '.join(DTYPES)}, but is {dtype!r}")
    return DTYPES[dtype]


def _quantization(asked: str | None, path: Path, dtype: str, use_native: bool) -> str | None:
    """auto: compute on a GGUF file's own blocks, the fastest way that leaves its weights as they are.

    A model in plain floating point, and one for which a dtype was asked, is computed in floating point."""
    if asked == "auto":
        has_blocks = not path.is_dir() or (path / SOURCE_FILE).is_file()
        file = path / SOURCE_FILE if path.is_dir() else path
        return "gguf" if use_native and dtype == "auto" and has_blocks and GgufFile(file).is_quantized else None
    if asked is not None and not use_native:
        raise InvalidOptionError(f"quantization={asked!r} needs the native CPU kernels; leave it out to run on PyTorch")
    return asked


def _batch_invariant(asked: bool | None, device: torch.device, config: ModelConfig) -> bool:
    """Which of PyTorch's kernels and the batch-invariant ones compute; the native kernels are always invariant.

    On CUDA they are the default: the fused Triton kernels, in captured passes, and without them the plain Triton ones,
    which were faster than PyTorch's at batch 1 of an H200 and 3 % slower at batch 32. On a CPU the invariant ones go
    row by row, so they must be asked for."""
    if device.type != "cuda":
        return bool(asked)
    reason = _why_no_triton(device, config)
    if asked and reason:
        raise InvalidOptionError(f"batch_invariant=True needs the Triton kernels on CUDA, but {reason}")
    if asked is None and reason:
        logger.warning("Running on PyTorch's kernels, with which an answer may change with its batch: %s", reason)
    return not reason if asked is None else asked


def _why_no_triton(device: torch.device, config: ModelConfig) -> str | None:
    """None where the Triton kernels run. They take all of `DTYPES`."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.get_device_capability(device) < TRITON_CAPABILITY:
        return f"this GPU is older than compute capability {'.'.join(map(str, TRITON_CAPABILITY))}"
    if config.head_dim < TRITON_HEAD_DIM:
        return f"heads of {config.head_dim} numbers are smaller than the {TRITON_HEAD_DIM} that they multiply at once"
    return None


def _execution(decoder: Target, quantization: str | None) -> str:
    from paceline.models.native import NativeDecoder
    from paceline.ops import native

    weights = {"gguf": "the file's own blocks", "int8": "int8 weights"}.get(quantization or "", "")
    weights = weights or str(decoder.dtype).removeprefix("torch.")
    bits = "batch-invariant" if decoder.batch_invariant else "not batch-invariant: an answer may change with its batch"
    if isinstance(decoder, NativeDecoder):
        return f"native {native.instruction_set()} kernels, {weights}, {decoder.num_threads} threads, {bits}"
    kernels = "Triton" if decoder.batch_invariant and decoder.device.type == "cuda" else "PyTorch"
    kernels = "fused Triton kernels" if decoder.draws_tokens else kernels
    return f"{kernels} on {decoder.device}, {weights}, {bits}"


def _use_native(kernels: str, device: torch.device) -> bool:
    """Native kernels wherever they can run, unless others were asked for."""
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
    return False
