"""GPTQ: columns are rounded one after the other, and what each loses is made good in those that come after.

For a product x @ weight.T the error of a row w of the weight is (w - q) H (w - q) with H = sum of x x'. After column i
is rounded, the change of the later columns that makes up for most of it is a row of the Cholesky factor of H's inverse.
With act-order the columns with the largest H_ii come first, while most others can still make up for them.

After Frantar et al. 2022, arXiv:2210.17323.
"""

import torch
from torch import Tensor

from paceline.errors import InvalidOptionError
from paceline.models.quantized.linear import QuantizedLinear
from paceline.models.quantized.rounding import grid, to_grid
from paceline.models.quantized.scheme import WHOLE_ROW

BLOCK = 128  # columns between two updates of the rest, where one scale holds for the whole row; else a group
MOST_TRIES = 3  # each with ten times the damping


def solved(
    weight: Tensor,  # [out, in] float32
    gram: Tensor,  # [in, in]: inputs' @ inputs
    bits: int,
    group_size: int,
    *,
    symmetric: bool,
    act_order: bool,
    damping: float,  # of the mean of H's diagonal, added to it
    name: str = "a matrix",  # for errors
) -> QuantizedLinear:
    inputs = weight.shape[1]
    order = torch.argsort(gram.diagonal(), descending=True, stable=True) if act_order else torch.arange(inputs)
    factor = _factor(gram[order][:, order], damping, name)
    rest = weight[:, order].clone()
    size = inputs if group_size == WHOLE_ROW else group_size
    step = BLOCK if size == inputs else size
    values = torch.empty_like(rest)
    scales, zeros = [], []
    for begin in range(0, inputs, step):
        end = min(begin + step, inputs)
        if begin % size == 0:
            scale, zero = grid(rest[:, begin : begin + size], bits, symmetric=symmetric)
            scales.append(scale)
            zeros.append(zero)
        errors = _round_block(rest[:, begin:end], values[:, begin:end], factor[begin:end, begin:end], scale, zero, bits)
        rest[:, end:] -= errors @ factor[begin:end, end:]
    groups = None
    if act_order:
        groups = torch.empty(inputs, dtype=torch.long)
        groups[order] = torch.arange(inputs) // size
        values = values[:, torch.argsort(order)]
    return QuantizedLinear(
        values.to(torch.uint8).contiguous(), torch.stack(scales, 1), torch.stack(zeros, 1).int(), bits, groups
    )


def _round_block(part: Tensor, values: Tensor, factor: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Fill `values`; part: what is left of these columns, [out, columns]. Returns the errors for the later ones."""
    part, errors = part.clone(), torch.empty_like(part)
    for i in range(part.shape[1]):
        column = part[:, i]
        values[:, i] = to_grid(column, scale, zero, bits)
        errors[:, i] = (column - (values[:, i] - zero) * scale) / factor[i, i]
        part[:, i + 1 :] -= errors[:, i : i + 1] * factor[i, i + 1 :]
    return errors


def _factor(gram: Tensor, damping: float, name: str) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped H."""
    gram = gram.clone()
    diagonal = gram.diagonal()
    diagonal[diagonal == 0] = 1.0  # an input that was always 0: its weights do not matter
    mean = float(diagonal.mean())
    for attempt in range(MOST_TRIES):
        damped = gram + damping * 10**attempt * mean * torch.eye(len(gram))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if int(failed):
            continue
        upper: Tensor
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not int(failed) and bool(upper.isfinite().all()):
            return upper
    raise InvalidOptionError(
        f"GPTQ cannot solve for {name}: its inputs on the calibration text depend on each other too much. Give more "
        f"text (--calibration, --samples) or a larger --damping than {damping}"
    )
