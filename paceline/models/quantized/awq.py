"""AWQ, the GEMM layout: inputs down, outputs across, eight 4-bit outputs in an int32 in an order of their own."""

import torch
from torch import Tensor

from paceline.models.quantized.bits import packed, unpacked
from paceline.models.quantized.linear import QuantizedLinear
from paceline.models.quantized.parts import Parts
from paceline.models.quantized.scheme import Scheme

NAMES = ("qweight", "qzeros", "scales")
OUTPUT_OF_FIELD = (0, 2, 4, 6, 1, 3, 5, 7)  # field i of an int32 holds this one of its eight outputs


def unpack(parts: Parts, scheme: Scheme) -> QuantizedLinear:
    qweight, qzeros, scales = (parts.take(name) for name in NAMES)  # [in, out / 8], [groups, out / 8], [groups, out]
    parts.check_dtype("qweight", torch.int32)
    parts.check_dtype("qzeros", torch.int32)
    inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
    groups = parts.num_groups(scheme, inputs)
    parts.check_shape("qzeros", (groups, outputs // 8))
    parts.check_shape("scales", (groups, outputs))
    parts.check_finite("scales")
    order = torch.argsort(torch.tensor(OUTPUT_OF_FIELD))
    across = torch.arange(outputs).view(-1, 8)[:, order].flatten()
    values, zeros = (unpacked(packed, 4, dim=1)[:, across] for packed in (qweight, qzeros))
    return QuantizedLinear(values.T.contiguous(), scales.T.contiguous(), zeros.T.int().contiguous(), 4)


def shape(parts: Parts, scheme: Scheme) -> tuple[int, int]:
    inputs, packed = parts.take("qweight").shape
    return packed * 8, inputs


def pack(linear: QuantizedLinear) -> dict[str, Tensor]:
    """As `unpack` reads it."""
    across = torch.arange(linear.shape[0]).view(-1, 8)[:, list(OUTPUT_OF_FIELD)].flatten()
    return {
        "qweight": packed(linear.values.T[:, across], 4, dim=1),
        "qzeros": packed(linear.zeros.T[:, across], 4, dim=1),
        "scales": linear.scales.half().T.contiguous(),
    }
