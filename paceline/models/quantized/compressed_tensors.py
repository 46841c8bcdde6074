"""compressed-tensors: integers packed into int32 (W4A16, W8A16), plain int8 (W8A8), or FP8 (fp8.py).

Integers are signed with a zero in the middle; packed, they are stored plus half their range, zero points too.
"""

import torch
from torch import Tensor

from paceline.models.quantized.bits import packed, unpacked
from paceline.models.quantized.linear import QuantizedLinear
from paceline.models.quantized.parts import Parts
from paceline.models.quantized.scheme import Scheme

PACKED_NAMES = ("weight_packed", "weight_scale", "weight_shape")
PACKED_OPTIONAL_NAMES = ("weight_zero_point", "weight_g_idx")
INT8_NAMES = ("weight", "weight_scale")
INT8_OPTIONAL_NAMES = ("weight_zero_point", "input_scale", "input_zero_point")


def unpack_packed(parts: Parts, scheme: Scheme) -> QuantizedLinear:
    packed, scales = parts.take("weight_packed"), parts.take("weight_scale")
    parts.check_dtype("weight_packed", torch.int32)
    outputs, inputs = packed_shape(parts, scheme)
    per_int = 32 // scheme.bits
    parts.check_shape("weight_packed", (outputs, -(-inputs // per_int)))
    groups = parts.num_groups(scheme, inputs)
    values = unpacked(packed, scheme.bits, dim=1)[:, :inputs]
    scales = _row_scales(parts, scales, outputs, groups)
    zeros = torch.full(scales.shape, 1 << (scheme.bits - 1), dtype=torch.int32)
    if not scheme.symmetric:
        stored = parts.take("weight_zero_point")
        parts.check_shape("weight_zero_point", (-(-outputs // per_int), groups))
        zeros = unpacked(stored, scheme.bits, dim=0)[:outputs].int()
    order = parts.find("weight_g_idx")
    if order is not None:
        parts.check_shape("weight_g_idx", (inputs,))
        in_runs = torch.arange(inputs) // (inputs // groups)
        if int(order.min()) < 0 or int(order.max()) >= groups:
            parts.fail("weight_g_idx", f"names a group that does not exist; there are {groups}")
        order = None if torch.equal(order.long(), in_runs) else order.long()
    return QuantizedLinear(values.contiguous(), scales, zeros, scheme.bits, groups=order)


def packed_shape(parts: Parts, scheme: Scheme) -> tuple[int, int]:
    outputs, inputs = (int(size) for size in parts.take("weight_shape"))
    return outputs, inputs


def unpack_int8(parts: Parts, scheme: Scheme) -> QuantizedLinear:
    weight, scales = parts.take("weight"), parts.take("weight_scale")
    parts.check_dtype("weight", torch.int8)
    outputs, inputs = weight.shape
    scales = _row_scales(parts, scales, outputs, parts.num_groups(scheme, inputs))
    zeros = torch.full(scales.shape, 128, dtype=torch.int32)
    if not scheme.symmetric:
        stored = parts.take("weight_zero_point")
        if stored.numel() not in (1, scales.numel()):
            parts.fail(
                "weight_zero_point", f"has shape {tuple(stored.shape)}, but the scales are {tuple(scales.shape)}"
            )
        zeros = zeros + stored.int().reshape(-1, scales.shape[1] if stored.numel() > 1 else 1)
    return QuantizedLinear(weight.view(torch.uint8) ^ 128, scales, zeros, 8)


def int8_shape(parts: Parts, scheme: Scheme) -> tuple[int, int]:
    outputs, inputs = parts.take("weight").shape
    return outputs, inputs


def _row_scales(parts: Parts, scales: Tensor, outputs: int, groups: int) -> Tensor:
    """[outputs, groups], from one per tensor, per output or per group."""
    parts.check_finite("weight_scale")
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(outputs, groups).contiguous()
    if tuple(scales.shape) == (outputs,) and groups == 1:
        return scales.reshape(outputs, 1)
    parts.check_shape("weight_scale", (outputs, groups))
    return scales


def pack_packed(linear: QuantizedLinear, *, symmetric: bool) -> dict[str, Tensor]:
    """As `unpack_packed` reads it."""
    tensors = {
        "weight_packed": packed(linear.values, linear.bits, dim=1),
        "weight_scale": linear.scales.half().contiguous(),
        "weight_shape": torch.tensor(linear.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed(linear.zeros, linear.bits, dim=0)
    return tensors


def pack_int8(linear: QuantizedLinear) -> dict[str, Tensor]:
    """As `unpack_int8` reads symmetric weights."""
    return {"weight": (linear.values ^ 128).view(torch.int8), "weight_scale": linear.scales.half().contiguous()}
