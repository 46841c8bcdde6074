"""GPTQ: inputs packed down, outputs across; zeros stored less one (`gptq`) or as they are (`gptq_v2`).

With act-order (`desc_act`) `g_idx` names the group of each input, in any order.
"""

import torch
from torch import Tensor

from paceline.models.quantized.bits import packed, unpacked
from paceline.models.quantized.linear import QuantizedLinear
from paceline.models.quantized.parts import Parts
from paceline.models.quantized.scheme import Scheme

NAMES = ("qweight", "qzeros", "scales")
OPTIONAL_NAMES = ("g_idx",)


def unpack(parts: Parts, scheme: Scheme) -> QuantizedLinear:
    qweight, qzeros, scales = (parts.take(name) for name in NAMES)
    parts.check_dtype("qweight", torch.int32)
    parts.check_dtype("qzeros", torch.int32)
    per_int = 32 // scheme.bits
    inputs, outputs = qweight.shape[0] * per_int, qweight.shape[1]
    groups = parts.num_groups(scheme, inputs)
    parts.check_shape("qzeros", (groups, outputs // per_int))
    parts.check_shape("scales", (groups, outputs))
    parts.check_finite("scales")
    zeros = unpacked(qzeros, scheme.bits, dim=1).int() + (1 if scheme.layout == "gptq" else 0)
    values = unpacked(qweight, scheme.bits, dim=0)
    order = _group_order(parts, inputs, groups)
    return QuantizedLinear(
        values.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous(), scheme.bits, groups=order
    )


def shape(parts: Parts, scheme: Scheme) -> tuple[int, int]:
    packed, outputs = parts.take("qweight").shape
    return outputs, packed * (32 // scheme.bits)


def _group_order(parts: Parts, inputs: int, groups: int) -> torch.Tensor | None:
    """None where each group is a run of inputs, as without act-order."""
    given = parts.find("g_idx")
    if given is None:
        return None
    parts.check_shape("g_idx", (inputs,))
    if int(given.min()) < 0 or int(given.max()) >= groups:
        parts.fail("g_idx", f"names groups {int(given.min())} to {int(given.max())}, but there are {groups}")
    in_runs = torch.arange(inputs) // (inputs // groups)
    return None if torch.equal(given.long(), in_runs) else given.long()


def pack(linear: QuantizedLinear) -> dict[str, Tensor]:
    """As `unpack` reads the layout `gptq`: zeros must be 1 or more."""
    inputs = linear.shape[1]
    groups = torch.arange(inputs) // linear.group_size if linear.groups is None else linear.groups
    return {
        "qweight": packed(linear.values.T, linear.bits, dim=0),
        "qzeros": packed(linear.zeros.T - 1, linear.bits, dim=1),
        "scales": linear.scales.half().T.contiguous(),
        "g_idx": groups.int(),
    }
