"""GPTQ: columns are rounded one after the other, and what each loses is made good in those that come after.

For a product x @ weight.T the error of a row w of the weight is (w - q) H (w - q) with H = sum of x x'. After column i
is rounded, the change of the later columns that makes up for most of it is a row of the Cholesky factor of H's inverse.
The columns with the largest H_ii come first, while most others can still make up for them. A group is a run of inputs,
with the scale that its weights had at first; or, with act-order, columns that are rounded after each other, with a
scale of what is left of them by then, which is nearer, but no block of our native kernels.

After Frantar et al. 2022, arXiv:2210.17323.
"""

import torch
from torch import Tensor

from paceline.errors import InvalidOptionError
from paceline.models.quantized.linear import QuantizedLinear
from paceline.models.quantized.rounding import grid, to_grid
from paceline.models.quantized.scheme import WHOLE_ROW

BLOCK = 128  # columns between two updates of the rest: it changes the time, and not the result
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
    out, inputs = weight.shape
    order = torch.argsort(gram.diagonal(), descending=True, stable=True)
    factor = _factor(gram[order][:, order], damping, name)
    size = inputs if group_size == WHOLE_ROW else group_size
    scales, zeros = grid(weight.view(out, -1, size), bits, symmetric=symmetric)  # [out, groups]
    groups = (torch.arange(inputs) if act_order else order) // size  # of each column, as they are rounded
    step = size if act_order and size < inputs else BLOCK
    rest, values = weight[:, order].clone(), torch.empty_like(weight)
    for begin in range(0, inputs, step):
        end = min(begin + step, inputs)
        if act_order and size < inputs:
            scales[:, begin // size], zeros[:, begin // size] = grid(rest[:, begin:end], bits, symmetric=symmetric)
        own = groups[begin:end]
        part, square = rest[:, begin:end], factor[begin:end, begin:end]
        values[:, begin:end], errors = _rounded_block(part, square, scales[:, own], zeros[:, own], bits)
        rest[:, end:] -= errors @ factor[begin:end, end:]
    back = torch.argsort(order)
    in_order = values[:, back].to(torch.uint8).contiguous()
    return QuantizedLinear(in_order, scales, zeros.int(), bits, groups[back] if act_order else None)


def _rounded_block(part: Tensor, factor: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """values and errors, for the later columns; all but the factor are [out, columns], part is what is left of them"""
    part, values, errors = part.clone(), torch.empty_like(part), torch.empty_like(part)
    for i in range(part.shape[1]):
        values[:, i] = to_grid(part[:, i], scales[:, i], zeros[:, i], bits)
        errors[:, i] = (part[:, i] - (values[:, i] - zeros[:, i]) * scales[:, i]) / factor[i, i]
        part[:, i + 1 :] -= errors[:, i : i + 1] * factor[i, i + 1 :]
    return values, errors


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
