"""Everything an engine needs of a model, from a name: config, decoder and tokenizer.

>>> model = load_model("smollm2-135m")
>>> model.decoder.forward(batch, kv_cache)
"""

import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.core.forward import Target
from paceline.core.kv_tensor import FLOAT8
from paceline.core.model_config import ModelConfig
from paceline.core.weights import ShapedWeights
from paceline.errors import InvalidOptionError
from paceline.models.decoder import Decoder
from paceline.models.gguf_file import GgufFile
from paceline.models.loading import folder_scheme, gguf_path, load_config, load_tokenizer, read_weights
from paceline.models.memory import check_memory, fits_widened
from paceline.models.padded_decoder import PaddedDecoder
from paceline.models.quantized.int8 import Int8Weights
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
KV_DTYPES = {
    "auto": None,
    "float16": torch.float16,
    "int16": torch.int16,
    "int8": torch.int8,
    "fp8": FLOAT8,
    "fp8_e4m3": FLOAT8,  # vLLM's other word for it
}
FLOAT8_CAPABILITY = (8, 9)  # the first that widens FP8 in one instruction
FLOAT8_HEAD_DIM = 32  # the smallest: the kernel multiplies the numbers of even and of odd place apart
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
    loaded_with: Mapping[str, Any] = field(default_factory=dict)  # what `load_model` was told


def load_model(
    model: str,
    *,
    dtype: str = "auto",  # float32 on a CPU (quantized: 16-bit keys and values), bfloat16 on CUDA
    device: str = "auto",
    quantization: str | None = "auto",  # "int8", "gguf", "checkpoint", None, or what `_quantization` picks
    batch_invariant: bool | None = None,  # None: where it costs next to nothing, see `_batch_invariant`
    num_threads: int | None = None,
    kernels: str = "auto",
    kv_cache_dtype: str = "auto",  # see `_kv_dtype`
    quiet: bool = False,
) -> LoadedModel:
    """Resolve, read and build a model. `num_threads` sets PyTorch's threads where PyTorch computes."""
    said: dict[str, Any] = {"dtype": dtype, "device": device, "quantization": quantization}
    said |= {"batch_invariant": batch_invariant, "num_threads": num_threads, "kernels": kernels}
    said |= {"kv_cache_dtype": kv_cache_dtype}
    target = _device(device)
    torch_dtype = _dtype(dtype, target)
    use_native = _use_native(kernels, target)
    if num_threads is not None and num_threads < 1:
        raise InvalidOptionError(f"num_threads must be at least 1, but is {num_threads}")
    path = resolve_model(model, progress=not quiet)
    config = load_config(path)
    use_native = use_native and _native_knows(config, kernels)
    invariant = not use_native and _batch_invariant(batch_invariant, target, config)
    is_plain = config.head_dim <= FUSED_HEAD_DIM and not config.special_parts
    use_fused = invariant and target.type == "cuda" and kernels == "auto" and is_plain
    if quantization == "auto" and use_fused and fits_widened(path, config, torch_dtype):
        quantization = None  # faster (docs/gpu.md), as long as there is room
    quantization = _quantization(quantization, path, dtype, use_native or use_fused)
    if dtype == "auto" and quantization and use_native:
        torch_dtype = torch.float16  # keys and values: finer than the weights, at half the bytes of float32
    kv_dtype = _kv_dtype(kv_cache_dtype, torch_dtype, use_native)
    if kv_dtype == FLOAT8 and target.type == "cuda":
        _check_float8(kv_cache_dtype, target, config, use_fused)
    if (kv_cache_dtype, dtype) == ("auto", "auto") and quantization and use_native and multiplies_int16(config):
        kv_dtype = torch.int16
    tokenizer = load_tokenizer(path)
    decoder: Target
    capture: Callable[[PassRoom], PaddedDecoder] | None = None
    if use_native:
        decoder = _native_decoder(path, config, torch_dtype, quantization, num_threads, kv_dtype)
    else:
        check_memory(path, config, torch_dtype, quantization, target.type)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        plain = torch_decoder(
            path, config, torch_dtype, target, quantization, batch_invariant=invariant, kv_dtype=kv_dtype
        )
        decoder, capture = _fused(plain) if use_fused else (plain, None)
    return LoadedModel(model, path, config, decoder, tokenizer, _execution(decoder, quantization), capture, said)


def _native_decoder(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    quantization: str | None,
    num_threads: int | None,
    kv_dtype: torch.dtype,
) -> Target:
    """The decoder on the native kernels, over packed weights of an earlier load where they were kept."""
    from paceline.models.native import NativeDecoder
    from paceline.models.packed_cache import packed_entry

    entry = packed_entry(path, dtype=dtype, quantization=quantization)
    packed = entry.read() if entry else None
    if not packed:
        check_memory(path, config, dtype, quantization, "cpu")
    weights = packed or read_weights(path, config, keep_quantized=quantization in ("gguf", "checkpoint"))
    decoder = NativeDecoder(
        config, weights, dtype=dtype, quantization=quantization, num_threads=num_threads, kv_dtype=kv_dtype
    )
    if isinstance(weights, ShapedWeights) and (notes := weights.notes()):
        logger.warning("%s", notes[0].upper() + notes[1:])
    if entry and not packed:
        entry.write(decoder.weights)
    return decoder


def torch_decoder(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None,
    *,
    batch_invariant: bool,
    kv_dtype: torch.dtype | None = None,
) -> Decoder:
    """Over plain weights, or with `quantization` over those that the fused kernels read."""
    weights = read_weights(path, config, keep_quantized=quantization in ("gguf", "checkpoint"), for_cuda=True)
    decoder = Decoder(
        config,
        Int8Weights(weights) if quantization == "int8" else weights,
        dtype=dtype,
        device=device,
        batch_invariant=batch_invariant,
        packs=quantization is not None,
        kv_dtype=kv_dtype,
    )
    if isinstance(weights, ShapedWeights) and (notes := weights.notes()):
        logger.warning("%s", notes[0].upper() + notes[1:])
    return decoder


def _fused(decoder: Decoder) -> tuple[Target, Callable[[PassRoom], PaddedDecoder]]:
    """The decoder on the fused kernels, and how an engine captures its passes."""
    from paceline.models.captured_passes import CapturedPasses  # triton exists only where CUDA does
    from paceline.models.fused_decoder import FusedDecoder

    fused = FusedDecoder(decoder)
    return fused, lambda room: PaddedDecoder(fused, CapturedPasses(fused), room)


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


def _kv_dtype(asked: str, dtype: torch.dtype, use_native: bool) -> torch.dtype:
    """The dtype, unless another one was asked for. Integers have a float32 scale for each head of a position, FP8 has
    none: it is of the fused kernels on CUDA and of their plain twin, PyTorch's kernels on a CPU."""
    if asked not in KV_DTYPES:
        raise InvalidOptionError(f"kv_cache_dtype must be one of {', '.join(KV_DTYPES)}, but is {asked!r}")
    if KV_DTYPES[asked] == FLOAT8:
        if use_native:
            raise InvalidOptionError(
                f"kv_cache_dtype {asked!r} is what the fused kernels on CUDA have; the native CPU kernels run here: "
                "use 'int8', which takes as little memory, or kernels='torch'"
            )
        return FLOAT8
    if asked != "auto" and not use_native:
        raise InvalidOptionError(
            f"kv_cache_dtype {asked!r} is what the native CPU kernels have, and they do not run here: leave it out"
        )
    return KV_DTYPES[asked] or dtype


def _check_float8(asked: str, device: torch.device, config: ModelConfig, use_fused: bool) -> None:
    """Raise where the fused kernels cannot keep keys and values in FP8."""
    reason = None
    if not use_fused:
        reason = "this model or these options run on other kernels"
    elif torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        reason = f"this GPU is older than compute capability {'.'.join(map(str, FLOAT8_CAPABILITY))}"
    elif config.head_dim < FLOAT8_HEAD_DIM:
        reason = f"heads of {config.head_dim} numbers are smaller than {FLOAT8_HEAD_DIM}"
    if reason:
        raise InvalidOptionError(
            f"kv_cache_dtype {asked!r} needs the fused kernels and a GPU that reads FP8, but {reason}: leave it out"
        )


def multiplies_int16(config: ModelConfig) -> bool:
    """Whether attention in int16 is faster than in float32 here. It has been measured with this set's kernels alone."""
    from paceline.models.native import has_int16_keys
    from paceline.ops import native

    return native.instruction_set() == "avx512-vnni" and has_int16_keys(config)


def _quantization(asked: str | None, path: Path, dtype: str, has_kernels: bool) -> str | None:
    """auto: compute on the file's own blocks or values, on a CPU the fastest way that leaves its weights as they are.

    A model in plain floating point, and one for which a dtype was asked, is computed in floating point."""
    if asked == "auto":
        if not has_kernels or dtype != "auto":
            return None
        file = gguf_path(path)
        if file is not None:
            return "gguf" if GgufFile(file).is_quantized else None
        return "checkpoint" if folder_scheme(path) else None
    if asked is not None and not has_kernels:
        raise InvalidOptionError(
            f"quantization={asked!r} needs the native CPU kernels, or on CUDA the fused ones; leave it out to run on "
            "PyTorch"
        )
    if asked == "checkpoint" and (gguf_path(path) or not folder_scheme(path)):
        raise InvalidOptionError(
            "quantization='checkpoint' computes on the values of a quantized folder, but config.json has no "
            "quantization_config"
        )
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

    weights = {
        "gguf": "the file's own blocks",
        "checkpoint": "the folder's own quantized values",
        "int8": "int8 weights",
    }.get(quantization or "", "")
    if isinstance(decoder, NativeDecoder) and not decoder.dtype.is_floating_point:
        name = str(decoder.dtype).removeprefix("torch.")
        weights = f"{weights or 'plain weights'}, {name} keys and values"
    if decoder.dtype == FLOAT8:
        weights = f"{weights or str(decoder.hidden_dtype).removeprefix('torch.')}, fp8 keys and values"
    weights = weights or str(decoder.dtype).removeprefix("torch.")
    bits = "batch-invariant" if decoder.batch_invariant else "not batch-invariant: an answer may change with its batch"
    if isinstance(decoder, NativeDecoder):
        return f"native {native.instruction_set()} kernels, {weights}, {decoder.num_threads} threads, {bits}"
    kernels = "Triton" if decoder.batch_invariant and decoder.device.type == "cuda" else "PyTorch"
    kernels = "fused Triton kernels" if decoder.draws_tokens else kernels
    return f"{kernels} on {decoder.device}, {weights}, {bits}"


def _native_knows(config: ModelConfig, kernels: str) -> bool:
    """Whether the native kernels have all parts of this model; PyTorch has."""
    from paceline.models.native import NATIVE_PARTS

    missing = ", ".join(sorted(config.special_parts - NATIVE_PARTS))
    if missing and kernels == "native":
        raise InvalidOptionError(
            f"kernels='native' was asked for, but the native kernels lack what this {config.family} model has: "
            f"{missing}"
        )
    if missing:
        logger.warning(
            "Running on PyTorch, which is slower: the native kernels lack what this %s model has: %s",
            config.family,
            missing,
        )
    return not missing


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
