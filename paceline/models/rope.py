"""Rotary position embedding: the cos and sin tables of a model, with whatever scaling it was trained for.

Dimension pair i of a head turns by position * inv_freq[i]. Scaling stretches a model beyond the context it first saw:
`linear` slows every pair down, `llama3` only the slow ones (with a smooth step between), `yarn` does so by counting
rotations and also sharpens attention a little. The tables are made once, so the value for a position never depends
on which rows share a pass.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig, RopeScaling
from paceline.errors import ModelLoadError, UnsupportedModelError


def rope_tables(config: ModelConfig, num_positions: int | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin, each [positions, head_dim / 2] float32; dimension i turns together with i + head_dim / 2."""
    inv_freq, attention_scale = rope_frequencies(config)
    positions = torch.arange(num_positions or config.max_position, dtype=torch.float32)
    angles = positions[:, None] * inv_freq  # [positions, head_dim / 2]
    return angles.cos() * attention_scale, angles.sin() * attention_scale


def local_rope_tables(config: ModelConfig, num_positions: int | None = None) -> tuple[Tensor, Tensor]:
    """The tables of layers with a window, where they have a base of their own (else those of all layers)."""
    if config.local_rope_theta is not None:
        config = replace(config, rope_theta=config.local_rope_theta, rope_scaling=RopeScaling())
    return rope_tables(config, num_positions)


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Turning speed of each dimension pair ([head_dim / 2]), and the factor on cos and sin."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    match scaling.kind:
        case "default":
            return inv_freq, 1.0
        case "linear":
            return inv_freq / scaling.factor, 1.0
        case "llama3":
            return inv_freq / llama3_slowdown(inv_freq, scaling), 1.0
        case "yarn":
            return _yarn(inv_freq, config.rope_theta, scaling), _yarn_attention_scale(scaling)
        case "longrope":
            return inv_freq / _pair_factors(config), scaling.attention_factor or 1.0
        case kind:
            raise UnsupportedModelError(f"rotary scaling {kind!r} is not supported")


def _pair_factors(config: ModelConfig) -> Tensor:
    factors = config.rope_scaling.factors
    if len(factors) != config.head_dim // 2:
        raise ModelLoadError(
            f"rotary scaling has {len(factors)} factors for heads of {config.head_dim} dimensions; it needs "
            f"{config.head_dim // 2}"
        )
    return torch.tensor(factors, dtype=torch.float32)


def llama3_slowdown(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """By how much each pair is slowed: 1 for fast ones, `factor` for slow ones, in between a blend."""
    turns = scaling.original_max_position * inv_freq / (2 * math.pi)  # within the original context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    fast_share = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return 1.0 / ((1.0 - fast_share) / scaling.factor + fast_share)


def _yarn(inv_freq: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    head_dim = 2 * inv_freq.shape[0]

    def dimension_with(rotations: float) -> float:
        """The (fractional) pair that turns this often within the original context."""
        wavelength = scaling.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension_with(scaling.beta_fast), dimension_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    slow_share = ((torch.arange(head_dim // 2) - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq / scaling.factor * slow_share + inv_freq * (1.0 - slow_share)


def _yarn_attention_scale(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
