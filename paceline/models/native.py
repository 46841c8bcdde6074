"""The decoder of `decoder.py` on the CPU, in one native call per pass.

Weights are packed into panels at load, and a pass of up to some dozens of rows reads each of them once, so that
verifying a draft costs hardly more than decoding one token. The bits of a row's logits do not depend on what shares
its pass (`docs/kernels.md` says why).

| weights given as            | kept and multiplied as                                                           |
|-----------------------------|----------------------------------------------------------------------------------|
| float32, bfloat16, float16  | `dtype`, or their own type where that loses nothing; products in float32         |
| the same, quantization=int8 | int8 with a scale per 32 weights; activations int8 per 32, sums exact in int32   |
| GGUF blocks                 | the file's own 4-, 5- and 8-bit values; activations as for int8                  |
| the same, quantization=int8 | int8, from the widened values                                                    |
| AWQ, GPTQ, ... folders      | their own 4- and 8-bit values where a block holds them exactly (models/quantized)|

>>> decoder = NativeDecoder(config, weights, dtype=torch.float32)
>>> decoder.forward(batch, kv_cache).logits
"""

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.core.kv_tensor import head_elements
from paceline.core.model_config import ModelConfig
from paceline.core.processors import threads_left
from paceline.core.weights import QuantizedTensor, Weights
from paceline.errors import InvalidOptionError, InvalidRequestError, UnsupportedModelError
from paceline.models.native_weights import NativeWeights
from paceline.models.packed_weights import PackedWeights
from paceline.models.rope import rope_frequencies
from paceline.ops.native import available, default_num_threads, unavailable_reason
from paceline.ops.native.layers import unpack_rows
from paceline.ops.native.library import FORMATS, KV_INTEGERS, STATUS, Batch, Config, library
from paceline.ops.random import id_constants

NATIVE_PARTS = frozenset({"layers without rotary embedding"})  # of `ModelConfig.special_parts`
QUANTIZATIONS = ("int8", "gguf", "checkpoint")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KV_INT16_STEP = 16  # dimensions of a head that one register holds
# Of a ForwardBatch, in the order in which the native `Batch` has them.
BATCH_INTS = (
    "token_ids",
    "positions",
    "slot_mapping",
    "context_lens",
    "parents",
    "req_ids",
    "block_tables",
    "cu_query",
    "logits_rows",
)


class NativeDecoder:
    device = torch.device("cpu")
    batch_invariant = True
    draws_tokens = True
    hidden_dtype = torch.float32

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights | PackedWeights,  # or as an earlier load packed them
        *,
        dtype: torch.dtype = torch.float32,  # of plain weights, and of the KV cache unless kv_dtype says otherwise
        quantization: str | None = None,
        num_threads: int | None = None,
        kv_dtype: torch.dtype | None = None,  # torch.int8, int16: with a scale for each head of a position
    ) -> None:
        if not available():
            raise UnsupportedModelError(unavailable_reason() or "")
        if missing := ", ".join(sorted(config.special_parts - NATIVE_PARTS)):
            raise UnsupportedModelError(f"the native kernels lack what this {config.family} model has: {missing}")
        if dtype not in DTYPES:
            raise InvalidOptionError(f"dtype {dtype} does not run on the native CPU path; use one of {DTYPES}")
        if quantization not in (None, *QUANTIZATIONS):
            raise InvalidOptionError(
                f"quantization {quantization!r} is unknown; use 'int8', or 'gguf' to compute on a GGUF file's own "
                "blocks, 'checkpoint' to compute on the values of a quantized folder, or None to take the weights as "
                "they are given"
            )
        if quantization == "gguf" and not _has_blocks(weights):
            raise InvalidOptionError("quantization 'gguf' computes on GGUF blocks, but these weights have none")
        self.config = config
        self.dtype = kv_dtype or dtype
        if self.dtype == torch.int16 and not has_int16_keys(config):
            raise InvalidOptionError(
                f"int16 keys and values need heads of a multiple of {KV_INT16_STEP} numbers, but this model's have "
                f"{config.head_dim}: leave kv_cache_dtype out"
            )
        self._head_elements = head_elements(config, self.dtype)
        self.quantization = quantization
        self.num_threads = num_threads or default_num_threads()
        self._threads_used = self.num_threads
        self._library = library()
        self._all_layers = _as_ints(range(config.num_layers))
        self._id_constants = torch.from_numpy(id_constants(config.vocab_size).view(np.int32))
        self._model = self._new_model()
        weakref.finalize(self, self._library.pl_model_free, self._model)
        self.weights = NativeWeights(self._model, config, dtype, quantization)
        if isinstance(weights, PackedWeights):
            self._packed = weights  # its memory is the model's
            self.weights.use(weights)
        else:
            self.weights.load(weights)

    @property
    def weight_bytes(self) -> int:
        """What a pass has to read: all packed weights, but for an embedding that is not also the head."""
        return int(self._library.pl_model_weight_bytes(self._model))

    @property
    def handle(self) -> int:
        """The model on the native side, for drafters that read its embedding. It lives as long as this decoder."""
        return self._model

    def set_num_threads(self, num_threads: int) -> None:
        """Changes the speed and not a bit of the result."""
        self.num_threads = num_threads
        self._use_threads(num_threads)

    def _use_threads(self, num_threads: int) -> None:
        if num_threads != self._threads_used:
            self._library.pl_model_set_threads(self._model, num_threads)
            self._threads_used = num_threads

    def vocabulary_rows(self, ids: Tensor, *, head: bool = False) -> Tensor:
        """Rows of the embedding, or of the head, in float32: [len(ids), hidden]"""
        return unpack_rows(self._model, head, ids, self.config.hidden_size)

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: Tensor,  # [layers, 2, slots, kv_heads, head_dim], in the model's dtype
        *,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> ForwardOutput:
        """One pass. `layers` runs only these; the stream passes the others unchanged."""
        config, rows = self.config, batch.num_rows
        self._check(kv_cache, hidden_layers, layers)
        num_logits = batch.logits_rows.shape[0]
        logits = torch.empty(num_logits, config.vocab_size)
        hidden = torch.empty(rows, len(hidden_layers), config.hidden_size) if hidden_layers else None
        draws = batch.draws
        assert draws is None or len(draws.temperatures) == num_logits, "one draw for each logits row"
        tokens = None if draws is None else (ctypes.c_int32 * num_logits)()
        drawn: tuple[int | None, ...] = (None,) * 4
        if draws is not None:
            # Not `array.ctypes.data`: right after a pass that takes 30 us, and `from_numpy` has just been used.
            parts = [torch.from_numpy(part) for part in (draws.temperatures, draws.seeds, draws.positions)]
            drawn = tuple([part.data_ptr() for part in (*parts, self._id_constants)])
        run = self._all_layers if layers is None else _as_ints(sorted(set(layers)))
        ints = [_as_int32(getattr(batch, name)) for name in BATCH_INTS]
        is_node = batch.is_node.contiguous()
        wanted_hidden = _as_ints(hidden_layers) if hidden_layers else _NO_INTS
        num_requests, max_blocks = batch.block_tables.shape
        native = Batch(
            rows,
            num_requests,
            max_blocks,
            batch.block_size,
            num_logits,
            len(hidden_layers),
            len(run),
            kv_cache.shape[2],
            *[tensor.data_ptr() for tensor in ints],
            is_node.data_ptr(),
            ctypes.addressof(wanted_hidden),
            ctypes.addressof(run),
            kv_cache.data_ptr(),
            logits.data_ptr(),
            None if hidden is None else hidden.data_ptr(),
            *drawn,
            None if tokens is None else ctypes.addressof(tokens),
        )
        self._use_threads(threads_left(self.num_threads))
        status = self._library.pl_forward(self._model, ctypes.byref(native))
        if status:
            raise InvalidRequestError(f"the pass was not run: {STATUS[status]}")
        return ForwardOutput(logits, hidden, None if tokens is None else [None if one == -1 else one for one in tokens])

    def _check(self, kv_cache: Tensor, hidden_layers: Sequence[int], layers: Sequence[int] | None) -> None:
        config = self.config
        expected = (config.num_layers, 2, kv_cache.shape[2], config.num_kv_heads, self._head_elements)
        if kv_cache.dtype != self.dtype or tuple(kv_cache.shape) != expected or not kv_cache.is_contiguous():
            raise InvalidOptionError(
                f"the KV cache must be contiguous {self.dtype} of shape {expected}; "
                f"given {kv_cache.dtype} of shape {tuple(kv_cache.shape)}"
            )
        bad = [i for i in layers or () if not 0 <= i < config.num_layers]
        if bad:
            raise InvalidOptionError(f"layers {bad} do not exist; this model has layers 0 to {config.num_layers - 1}")
        bad = [i for i in hidden_layers if not 0 <= i <= config.num_layers + 1]
        if bad:
            raise InvalidOptionError(f"hidden_layers {bad} do not exist; use 0 to {config.num_layers + 1}")

    def _new_model(self) -> int:
        config = self.config
        inv_freq, rope_scale = rope_frequencies(config)
        inv_freq = inv_freq.float().contiguous()
        windows = torch.tensor([config.window(i) or 0 for i in range(config.num_layers)], dtype=torch.int32)
        blind = config.no_rope_layers
        rotates = torch.tensor([i not in blind for i in range(config.num_layers)], dtype=torch.int32)
        native = Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            kv_format=(FORMATS if self.dtype.is_floating_point else KV_INTEGERS)[_name(self.dtype)],
            num_threads=self.num_threads,
            rms_norm_eps=config.rms_norm_eps,
            rope_scale=rope_scale,
            inv_freq=inv_freq.data_ptr(),
            windows=windows.data_ptr(),
            rotates=rotates.data_ptr(),
        )
        model = self._library.pl_model_new(ctypes.byref(native))
        if not model:
            raise MemoryError("no memory for the native decoder")
        return int(model)


def has_int16_keys(config: ModelConfig) -> bool:
    return config.head_dim % KV_INT16_STEP == 0


def _as_ints(numbers: Sequence[int]) -> "ctypes.Array[ctypes.c_int32]":
    return (ctypes.c_int32 * len(numbers))(*numbers)


_NO_INTS = _as_ints(())


def _as_int32(tensor: Tensor) -> Tensor:
    is_ready = tensor.dtype == torch.int32 and tensor.is_contiguous()  # as `pack` makes it
    return tensor if is_ready else tensor.to(torch.int32).contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _has_blocks(weights: Weights | PackedWeights) -> bool:
    if isinstance(weights, PackedWeights):
        return True  # packed from weights that had
    return any(isinstance(weight, QuantizedTensor) for weight in weights.values())
