"""Tiny quantizers that write each format exactly as it lies on disk, and what the stored numbers mean.

Rounding to the nearest is all they do: the tests ask whether the stored numbers are understood, not whether they are
good. Every `Stored` has the tensors of one matrix and the float32 weights that they stand for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AWQ_FIELDS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs each 4 bits hold, lowest first


@dataclass(frozen=True)
class Stored:
    tensors: dict[str, Tensor]
    meant: Tensor  # [out, in] float32


def integers(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """values [out, in] unsigned, scales [out, groups] float16, zeros [out, groups]"""
    out, inputs = weight.shape
    parts, most = weight.view(out, inputs // group, group), 2**bits - 1
    if symmetric:
        scales = (parts.abs().amax(-1) / (most // 2)).half()
        zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.int32)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = ((high - low) / most).half()
        zeros = (-low / scales.float()).round().clamp(0, most).int()
    values = (parts / scales.float()[..., None]).round() + zeros[..., None]
    return values.clamp(0, most).view(out, inputs).int(), scales, zeros


def meaning(values: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    return (values.float() - zeros.float()[:, groups]) * scales.float()[:, groups]


def pack(values: Tensor, bits: int, dim: int) -> Tensor:
    """Neighbours along `dim` into int32, the first in the lowest bits."""
    per_int = 32 // bits
    fields = values.long().unflatten(dim, (-1, per_int)).movedim(dim + 1, -1)
    packed = sum(fields[..., i] << (bits * i) for i in range(per_int))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().contiguous()


def awq(weight: Tensor, group: int) -> Stored:
    values, scales, zeros = integers(weight, 4, group, symmetric=False)
    fields = torch.arange(weight.shape[0]).view(-1, 8)[:, list(AWQ_FIELDS)].flatten()
    tensors = {
        "qweight": pack(values.T[:, fields], 4, 1),
        "qzeros": pack(zeros.T[:, fields], 4, 1),
        "scales": scales.T.contiguous(),
    }
    return Stored(tensors, meaning(values, scales, zeros, torch.arange(weight.shape[1]) // group))


def gptq(weight: Tensor, group: int, bits: int, *, symmetric: bool, act_order: bool, v2: bool = False) -> Stored:
    inputs = weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1)) if act_order else torch.arange(inputs)
    values, scales, zeros = integers(weight[:, order], bits, group, symmetric)
    groups = torch.empty(inputs, dtype=torch.int32)
    groups[order] = (torch.arange(inputs) // group).int()
    values = values[:, torch.argsort(order)]
    if not v2:
        zeros = zeros.clamp(min=1)  # stored less one
    stored_zeros = zeros if v2 else zeros - 1
    tensors = {
        "qweight": pack(values.T, bits, 0),
        "qzeros": pack(stored_zeros.T, bits, 1),
        "scales": scales.T.contiguous(),
        "g_idx": groups,
    }
    return Stored(tensors, meaning(values, scales, zeros, groups.long()))


def packed(weight: Tensor, group: int, bits: int, *, symmetric: bool) -> Stored:
    """compressed-tensors' pack-quantized"""
    values, scales, zeros = integers(weight, bits, group, symmetric)
    tensors = {
        "weight_packed": pack(values, bits, 1),
        "weight_scale": scales.bfloat16() if symmetric else scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(zeros, bits, 0)
    groups = torch.arange(weight.shape[1]) // group
    return Stored(tensors, meaning(values, tensors["weight_scale"], zeros, groups))


def int8(weight: Tensor, *, per_channel: bool, half: bool = True) -> Stored:
    scale = (weight.abs().amax(1, keepdim=True) if per_channel else weight.abs().max().view(1)) / 127
    scale = scale.half().float() if half else scale
    values = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return Stored({"weight": values, "weight_scale": scale}, values.float() * scale)


def fp8(weight: Tensor, *, scales: str, inverse_name: bool = False, static: bool = False) -> Stored:
    """scales: tensor, channel or block (of 32 x 16)"""
    out, inputs = weight.shape
    if scales == "block":
        parts = torch.nn.functional.pad(weight, (0, -inputs % 16, 0, -out % 32))
        largest = parts.view(-(-out // 32), 32, -(-inputs // 16), 16).abs().amax(dim=(1, 3))
        scale = largest / 448
        spread = scale.repeat_interleave(32, 0)[:out].repeat_interleave(16, 1)[:, :inputs]
    else:
        scale = weight.abs().amax(1, keepdim=True) / 448 if scales == "channel" else weight.abs().max().view(1) / 448
        spread = scale.expand(out, 1) if scales == "channel" else scale
    values = (weight / spread).to(torch.float8_e4m3fn)
    tensors = {"weight": values, "weight_scale_inv" if inverse_name else "weight_scale": scale.clone()}
    if static:
        tensors["input_scale"] = torch.tensor([0.02])
    return Stored(tensors, values.float() * spread)


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _gptq_config(bits: int, symmetric: bool, act_order: bool, form: str = "gptq") -> dict[str, Any]:
    settings = {"bits": bits, "group_size": 32, "sym": symmetric, "desc_act": act_order, "checkpoint_format": form}
    return {"quant_method": "gptq"} | settings


def _ints(bits: int, symmetric: bool, strategy: str, group: int | None) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}


def _floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy} | more


Quantizer = Callable[[Tensor], Stored]
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
EXACT, AGAIN, HALVES = "exactly", "int8, quantized again", "float16, widened"

FORMATS: dict[str, tuple[dict[str, Any], Quantizer, str]] = {
    # name -> (quantization_config, quantizer, how the native kernels hold it)
    "awq": (AWQ_CONFIG, lambda w: awq(w, 32), EXACT),
    "awq-64": (AWQ_CONFIG | {"group_size": 64}, lambda w: awq(w, 64), EXACT),
    "gptq": (_gptq_config(4, True, False), lambda w: gptq(w, 32, 4, symmetric=True, act_order=False), EXACT),
    "gptq-asymmetric": (
        _gptq_config(4, False, False),
        lambda w: gptq(w, 32, 4, symmetric=False, act_order=False),
        EXACT,
    ),
    "gptq-v2": (
        _gptq_config(4, False, False, "gptq_v2"),
        lambda w: gptq(w, 32, 4, symmetric=False, act_order=False, v2=True),
        EXACT,
    ),
    "gptq-8": (_gptq_config(8, True, False), lambda w: gptq(w, 32, 8, symmetric=True, act_order=False), EXACT),
    "gptq-8-asymmetric": (
        _gptq_config(8, False, False),
        lambda w: gptq(w, 32, 8, symmetric=False, act_order=False),
        EXACT,
    ),
    "gptq-act-order": (_gptq_config(4, True, True), lambda w: gptq(w, 32, 4, symmetric=True, act_order=True), AGAIN),
    "gptq-8-act-order": (
        _gptq_config(8, False, True),
        lambda w: gptq(w, 32, 8, symmetric=False, act_order=True),
        AGAIN,
    ),
    "gptq-16": (
        _gptq_config(4, True, False) | {"group_size": 16},
        lambda w: gptq(w, 16, 4, symmetric=True, act_order=False),
        AGAIN,
    ),
    "w4a16": (
        _compressed("pack-quantized", _ints(4, True, "group", 32)),
        lambda w: packed(w, 32, 4, symmetric=True),
        EXACT,
    ),
    "w4a16-asymmetric": (
        _compressed("pack-quantized", _ints(4, False, "group", 32)),
        lambda w: packed(w, 32, 4, symmetric=False),
        EXACT,
    ),
    "w8a16": (
        _compressed("pack-quantized", _ints(8, True, "channel", None)),
        lambda w: packed(w, w.shape[1], 8, symmetric=True),
        EXACT,
    ),
    "w8a8": (
        _compressed("int-quantized", _ints(8, True, "channel", None), {"num_bits": 8, "dynamic": True}),
        lambda w: int8(w, per_channel=True),
        EXACT,
    ),
    "w8a8-float32-scales": (
        _compressed("int-quantized", _ints(8, True, "channel", None)),
        lambda w: int8(w, per_channel=True, half=False),
        AGAIN,
    ),
    "w8a8-tensor": (
        _compressed("int-quantized", _ints(8, True, "tensor", None)),
        lambda w: int8(w, per_channel=False),
        EXACT,
    ),
    "compressed-fp8": (
        _compressed("float-quantized", _floats("channel"), {"num_bits": 8, "dynamic": True}),
        lambda w: fp8(w, scales="channel"),
        HALVES,
    ),
    "compressed-fp8-static": (
        _compressed("float-quantized", _floats("tensor"), {"num_bits": 8, "dynamic": False}),
        lambda w: fp8(w, scales="tensor", static=True),
        HALVES,
    ),
    "compressed-fp8-block": (
        _compressed("float-quantized", _floats("block", block_structure=[32, 16])),
        lambda w: fp8(w, scales="block"),
        HALVES,
    ),
    "fp8": (FP8_CONFIG, lambda w: fp8(w, scales="tensor"), HALVES),
    "fp8-static": (
        FP8_CONFIG | {"activation_scheme": "static"},
        lambda w: fp8(w, scales="tensor", static=True),
        HALVES,
    ),
    "fp8-channel": (FP8_CONFIG, lambda w: fp8(w, scales="channel"), HALVES),
    "fp8-block": (
        FP8_CONFIG | {"weight_block_size": [32, 16]},
        lambda w: fp8(w, scales="block", inverse_name=True),
        HALVES,
    ),
}
