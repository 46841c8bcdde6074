"""A matrix, or a decoder layer with its own input, in one native call: what drafter networks are run with on a CPU.

`src/layers.cpp` has the other side. Weights are packed when they are handed over, by default as int8 with a scale per
32 weights: a draft step then reads a quarter of the memory that float32 would take. As int4 (a scale and a least value
per 32 weights) it reads little more than an eighth, and drafts are wrong a little more often.
"""

import ctypes
import weakref
from collections.abc import Mapping
from ctypes import POINTER, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.kv_tensor import allocate_kv
from paceline.core.model_config import ModelConfig
from paceline.errors import InvalidOptionError
from paceline.ops.native.library import FORMATS, MATRICES, SOURCES, STATUS, VECTORS, Config, Signatures, load_with

IntArray = NDArray[np.int32]
NIBBLES = 4  # `U4M` of src/kernels.h: what Q4_1 blocks become

_SIGNATURES: Signatures = {
    "pl_matrix_new": (c_void_p, [c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_int32]),
    "pl_matrix_free": (None, [c_void_p]),
    "pl_matrix_multiply": (c_int32, [c_void_p, c_int32, c_void_p, c_int32, c_void_p]),
    "pl_layers_new": (c_void_p, [POINTER(Config)]),
    "pl_layers_free": (None, [c_void_p]),
    "pl_layer_forward": (c_int32, [c_void_p, c_void_p]),
    "pl_top_log_probs": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p]),
    "pl_model_unpack_rows": (c_int32, [c_void_p, c_int32, c_void_p, c_int32, c_void_p]),
}


class _LayerBatch(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("num_rows", "layer", "store_only")),
        ("num_slots", c_int64),
        *((name, c_void_p) for name in ("positions", "slots", "key_begins", "context_lens")),
        *((name, c_void_p) for name in ("tail_begins", "tail_lens", "key_slots", "tail_slots")),
        *((name, c_void_p) for name in ("input", "stream", "kv_cache")),
    ]


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Rows of a layer: where each one's key and value go, and which keys it looks at.

    Row i sees key_slots[key_begins[i] : + context_lens[i]], then tail_slots[tail_begins[i] : + tail_lens[i]]. Rows of
    one request share their context, so they have the same `key_begins`."""

    positions: IntArray  # [rows]
    slots: IntArray  # [rows]
    key_begins: IntArray  # [rows]
    context_lens: IntArray  # [rows]
    tail_begins: IntArray  # [rows]
    tail_lens: IntArray  # [rows]
    key_slots: IntArray
    tail_slots: IntArray


@cache
def _library() -> ctypes.CDLL | None:
    return load_with(_SIGNATURES)


def layers_available() -> bool:
    return _library() is not None


def _call() -> ctypes.CDLL:
    loaded = _library()
    if loaded is None:
        raise RuntimeError("the native kernels lack drafter layers: run `python -m paceline.ops.native.build`")
    return loaded


def _packable(weight: Tensor, storage: str) -> tuple[int, int, Tensor]:
    """A matrix as the native side takes it: what it is made from, how it is to be kept, and the bytes."""
    data = weight.detach().float().cpu().contiguous()
    if storage == "int4" and data.shape[1] % 32 == 0:  # GGUF's blocks, which know no shorter ones
        return SOURCES["Q4_1"], NIBBLES, nibble_blocks(data)
    return SOURCES["float32"], FORMATS["float32" if storage == "float32" else "int8"], data


def nibble_blocks(weight: Tensor) -> Tensor:
    """[out, in] -> bytes [out, in / 32, 20] in GGUF's Q4_1: per 32 weights a scale, a least value and 32 steps."""
    parts = weight.view(weight.shape[0], -1, 32)
    least = parts.amin(-1, keepdim=True).half()
    scale = ((parts.amax(-1, keepdim=True) - least.float()) / 15).half()
    steps = ((parts - least.float()) / scale.float().clamp(min=1e-12)).round().clamp(0, 15).to(torch.uint8)
    nibbles = steps[..., :16] | steps[..., 16:] << 4
    return torch.cat([scale.view(torch.uint8), least.view(torch.uint8), nibbles], dim=-1).contiguous()


class NativeLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None, *, num_threads: int, storage: str = "int8") -> None:
        """weight: [out, in]; storage: float32, int8 or int4"""
        self.out_features, self.in_features = weight.shape
        self.num_threads = num_threads
        source, wanted, data = _packable(weight, storage)
        wide_bias = None if bias is None else bias.detach().float().cpu().contiguous()
        self._function = _call().pl_matrix_multiply
        self.handle = _call().pl_matrix_new(
            source,
            wanted,
            self.out_features,
            self.in_features,
            data.data_ptr(),
            None if wide_bias is None else wide_bias.data_ptr(),
            num_threads,
        )
        if not self.handle:
            raise MemoryError(f"no memory for a native matrix of {self.out_features} x {self.in_features}")
        weakref.finalize(self, _call().pl_matrix_free, self.handle)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        x = x.contiguous()
        out = torch.empty(x.shape[0], self.out_features)
        self._function(self.handle, x.shape[0], x.data_ptr(), self.num_threads, out.data_ptr())
        return out


class NativeLayers:
    """Decoder layers whose attention input, residual stream and key slots the caller chooses."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],  # "0.self_attn.q_proj.weight", ...
        inv_freq: Tensor,  # [head_dim / 2]
        rope_scale: float,
        num_slots: int,
        *,
        num_threads: int,
        storage: str = "int8",
    ) -> None:
        self._input_size = weights["0.self_attn.q_proj.weight"].shape[1]
        self._hidden_size, self._num_slots = config.hidden_size, num_slots
        self.kv_cache = allocate_kv(config, num_slots, torch.float32, torch.device("cpu"))
        frequencies = inv_freq.float().contiguous()
        native = Config(
            vocab_size=0,
            **{name: getattr(config, name) for name in ("hidden_size", "intermediate_size", "num_layers")},
            **{name: getattr(config, name) for name in ("num_heads", "num_kv_heads", "head_dim", "rms_norm_eps")},
            kv_format=FORMATS["float32"],
            num_threads=num_threads,
            rope_scale=rope_scale,
            inv_freq=frequencies.data_ptr(),
        )
        self._function = _call().pl_layer_forward
        self.handle = _call().pl_layers_new(ctypes.byref(native))
        if not self.handle:
            raise MemoryError("no memory for native layers")
        weakref.finalize(self, _call().pl_layers_free, self.handle)
        for layer in range(config.num_layers):
            self._load(layer, weights, storage)

    def store(self, layer: int, inputs: Tensor, rows: KeyRows) -> None:
        """Only the keys and values of the rows. inputs: [rows, input size]"""
        self._run(layer, inputs, None, rows)

    def forward(self, layer: int, inputs: Tensor, stream: Tensor, rows: KeyRows) -> Tensor:
        """The residual stream [rows, hidden] after the layer."""
        updated = stream.clone(memory_format=torch.contiguous_format)
        self._run(layer, inputs, updated, rows)
        return updated

    def _run(self, layer: int, inputs: Tensor, stream: Tensor | None, rows: KeyRows) -> None:
        inputs = inputs.contiguous()
        assert inputs.dtype == torch.float32 and inputs.shape == (len(rows.slots), self._input_size)
        arrays = {name: np.ascontiguousarray(getattr(rows, name)) for name in KeyRows.__slots__}
        batch = _LayerBatch(
            num_rows=len(rows.slots),
            layer=layer,
            store_only=stream is None,
            num_slots=self._num_slots,
            input=inputs.data_ptr(),
            stream=None if stream is None else stream.data_ptr(),
            kv_cache=self.kv_cache.data_ptr(),
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        status = self._function(self.handle, ctypes.byref(batch))
        if status:
            raise InvalidOptionError(f"a drafter's layer was not run: {STATUS[status]}")

    def _load(self, layer: int, weights: Mapping[str, Tensor], storage: str) -> None:
        for part, name in _LAYER_MATRICES.items():
            weight = weights[f"{layer}.{name}.weight"]
            source, wanted, data = _packable(weight, storage)
            bias = weights.get(f"{layer}.{name}.bias")
            bias = None if bias is None else bias.detach().float().cpu().contiguous()
            status = _call().pl_model_set_matrix(
                self.handle,
                MATRICES[part],
                layer,
                source,
                wanted,
                *weight.shape,
                data.data_ptr(),
                None if bias is None else bias.data_ptr(),
            )
            if status:
                raise InvalidOptionError(f"matrix {name} of a drafter's layer {layer}: {STATUS[status]}")
        for part, name in _LAYER_VECTORS.items():
            vector = weights.get(f"{layer}.{name}.weight")
            if vector is not None:
                data = vector.detach().float().cpu().contiguous()
                _call().pl_model_set_vector(self.handle, VECTORS[part], layer, data.numel(), data.data_ptr())


_LAYER_MATRICES = {
    **{part: f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")},
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_LAYER_VECTORS = {
    "post_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


def unpack_rows(model: int, head: bool, ids: Tensor, hidden_size: int) -> Tensor:
    """Rows of a native decoder's embedding, or of its head, as floats: [len(ids), hidden_size]"""
    wanted = ids.to(torch.int32).contiguous()
    out = torch.empty(len(wanted), hidden_size)
    status = _call().pl_model_unpack_rows(model, int(head), wanted.data_ptr(), len(wanted), out.data_ptr())
    if status:
        raise InvalidOptionError(f"these rows of the vocabulary do not exist: {STATUS[status]}")
    return out


def top_log_probs(logits: Tensor, k: int, num_threads: int) -> tuple[Tensor, Tensor]:
    """The k likeliest of each row, likeliest first: ids [rows, k] int32 and log-probabilities [rows, k]"""
    logits = logits.contiguous()
    rows, size = logits.shape
    k = min(k, size)
    ids, log_probs = torch.empty(rows, k, dtype=torch.int32), torch.empty(rows, k)
    _call().pl_top_log_probs(logits.data_ptr(), rows, size, k, num_threads, ids.data_ptr(), log_probs.data_ptr())
    return ids, log_probs
