"""AWQ: before rounding, inputs that are large get larger weights, and what makes those inputs is divided by as much.

Nothing changes but where rounding falls: a weight that meets large activations is rounded with a finer step. The scale
of input channel i is |x_i| ** ratio, with the one ratio of `STEPS` that leaves the smallest error of the product on
calibration text. Then each group's range is shrunk where that helps on the same text (not of q and k: their errors are
raised to the power of e by attention).

| product   | its inputs come from          | which is divided by the scales                            |
|-----------|-------------------------------|-----------------------------------------------------------|
| q, k, v   | the norm before them          | the norm's weight                                         |
| o         | v, mixed over tokens          | v's rows; heads that share a v share its scales           |
| gate, up  | the norm before them          | the norm's weight                                         |
| down      | act(gate) * up                | up's rows                                                 |

After Lin et al. 2023, arXiv:2306.00978.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.models.quantized.layer_pass import INPUTS, mlp_norm
from paceline.models.quantized.linear import QuantizedLinear
from paceline.models.quantized.rounding import grid, rounded, to_grid

BITS = 4
STEPS = 20  # ratios tried, 0 to 0.95: half as many miss the best by up to 0.05, twice as many gain little
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)  # below half of the range nothing was ever better in the paper
NOT_SHRUNK = ("self_attn.q_proj", "self_attn.k_proj")
LEAST_SCALE = 1e-4
SEARCH_OUTPUTS = 512  # by which a ratio is judged: the time of a search grows with them, its choice hardly changes


def scaled(
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],  # some rows of what each of `INPUTS` multiplies
    config: ModelConfig,
    group_size: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The layer with its scales folded in, which is the same function before rounding; and its inputs then."""
    changed, smaller = dict(weights), {}
    for source in ("o", "down", "qkv", "gate_up"):  # o and down change the rows of v and up, which come after
        names = [f"{name}.weight" for name in INPUTS[source]]
        stacked = torch.cat([changed[name] for name in names])
        magnitude = inputs[source].abs().mean(0)
        if source == "o":
            magnitude = _shared(magnitude, config)
        scales = best_scales(stacked, inputs[source], magnitude, group_size)
        for name in names:
            changed[name] = changed[name] * scales
        _divide_source(changed, source, scales, config)
        smaller[source] = inputs[source] / scales
    return changed, smaller


def best_scales(weight: Tensor, inputs: Tensor, magnitude: Tensor, group_size: int) -> Tensor:
    """[in], by which to multiply the weight's columns."""
    weight = weight[:: max(1, len(weight) // SEARCH_OUTPUTS)]  # spread over all matrices that are scaled together
    exact = inputs @ weight.T
    best, found = float("inf"), torch.ones_like(magnitude)
    for step in range(STEPS):
        scales = magnitude.pow(step / STEPS).clamp(min=LEAST_SCALE)
        scales = scales / (scales.max() * scales.min()).sqrt()  # so that the weights' range stays about where it was
        made = rounded(weight * scales, BITS, group_size, symmetric=False).dequantized()
        error = float(((inputs / scales) @ made.T - exact).square().sum())
        if error < best:
            best, found = error, scales
    return found


def shrunk(weight: Tensor, inputs: Tensor, group_size: int) -> QuantizedLinear:
    """Rounded, with each group's range shrunk to where the error of its part of the product is smallest."""
    out = weight.shape[0]
    parts = weight.view(out, -1, group_size)
    columns = inputs.view(len(inputs), -1, group_size).transpose(0, 1)  # [groups, rows, size]
    gram = columns.transpose(1, 2) @ columns  # [groups, size, size]
    best = torch.full(parts.shape[:2], float("inf"))
    kept = torch.ones_like(best)
    for share in SHRINKS:
        scales, zeros = grid(parts, BITS, symmetric=False, shrink=torch.full_like(best, share))
        scales, zeros = scales[..., None], zeros[..., None]
        error = (to_grid(parts, scales, zeros, BITS) - zeros) * scales - parts  # [out, groups, size]
        by_group = error.transpose(0, 1)  # [groups, out, size]
        loss = ((by_group @ gram) * by_group).sum(-1).T  # [out, groups]
        kept = torch.where(loss < best, share, kept)
        best = torch.minimum(loss, best)
    return rounded(weight, BITS, group_size, symmetric=False, shrink=kept)


def quantized(
    weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], group_size: int
) -> dict[str, QuantizedLinear]:
    """The matrices of a layer whose scales are folded in, with its inputs as they are then."""
    made = {}
    for source, names in INPUTS.items():
        for name in names:
            weight = weights[f"{name}.weight"]
            if name in NOT_SHRUNK:
                made[name] = rounded(weight, BITS, group_size, symmetric=False)
            else:
                made[name] = shrunk(weight, inputs[source], group_size)
    return made


def _shared(magnitude: Tensor, config: ModelConfig) -> Tensor:
    """[q_size]: the mean over the query heads that share a value head, for each of them"""
    per_head = magnitude.view(config.num_kv_heads, -1, config.head_dim)
    return per_head.mean(1, keepdim=True).expand_as(per_head).reshape(-1)


def _divide_source(weights: dict[str, Tensor], source: str, scales: Tensor, config: ModelConfig) -> None:
    norms = {"qkv": "input_layernorm.weight", "gate_up": mlp_norm(config)}
    if source in norms:
        weights[norms[source]] = weights[norms[source]] / scales
        return
    name, rows = "mlp.up_proj", scales
    if source == "o":
        name, rows = "self_attn.v_proj", scales.view(config.num_kv_heads, -1, config.head_dim)[:, 0].flatten()
    weights[f"{name}.weight"] = weights[f"{name}.weight"] / rows[:, None]
    if f"{name}.bias" in weights:
        weights[f"{name}.bias"] = weights[f"{name}.bias"] / rows
