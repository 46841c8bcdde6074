"""Random matrices in the formats of ops/packed.py, for tests."""

import torch
from torch import Tensor

from paceline.ops.packed import GroupedValues, PackedWeight, pack

# kind, group (0: the whole row), inputs of a part
FORMATS = {
    "int4, group 32": ("int4", 32, 32),
    "int4, whole zeros": ("int4", 32, 32),
    "int4, group 16": ("int4", 16, 16),
    "int4, row": ("int4", 0, 16),
    "int8, group 16": ("int8", 16, 16),
    "int8, row": ("int8", 0, 32),
    "fp8, group 32": ("fp8", 32, 32),
    "fp8, row": ("fp8", 0, 16),
}


def random_values(
    kind: str, num_out: int, num_in: int, group: int, seed: int = 0, *, whole: bool = True
) -> GroupedValues:
    generator = torch.Generator().manual_seed(seed)
    count = num_in // (group or num_in)
    scales = (0.2 + torch.rand(num_out, count, generator=generator)).half().float()
    if kind == "fp8":
        values = torch.randn(num_out, num_in, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
        return GroupedValues(kind, values, scales, torch.zeros_like(scales))
    top = 16 if kind == "int4" else 256
    values = torch.randint(0, top, (num_out, num_in), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(top // 4, top // 2, scales.shape, generator=generator).float()
    return GroupedValues(kind, values, scales * 4 / top, zeros if whole else zeros + 0.125)


def values_in(form: str, num_out: int, num_in: int, seed: int = 0) -> GroupedValues:
    kind, group, _ = FORMATS[form]
    return random_values(kind, num_out, num_in, group, seed, whole="whole" in form)


def random_packed(
    form: str, num_out: int, num_in: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu"
) -> PackedWeight:
    grouped = values_in(form, num_out, num_in, seed)
    parts: list[Tensor] = [x.to(device) for x in (grouped.values, grouped.scales, grouped.zeros)]
    return pack(GroupedValues(grouped.kind, *parts), FORMATS[form][2], dtype)
