"""Plain twins of the fused kernels in ops/triton/: what each of them must compute, up to rounding.

A twin rounds where its kernel does: products, residual sums and SiLU stay in float32 until they are stored.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.ops.packed import Weight, plain
from paceline.ops.random import Purpose, keyed_uniform_rows, noise_key
from paceline.ops.reference import rope, write_kv


def norm_linear(x: Tensor, norm: Tensor, weight: Weight, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm, then the product, the row's scale applied to the finished sum. -> [rows, out] float32"""
    wide = x.float()
    gained = (wide * norm.float()).to(x.dtype).float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    made = F.linear(gained, plain(weight)) * scale
    return made if bias is None else made + bias.float()


def sums_of_squares(x: Tensor) -> Tensor:
    """[rows, groups] float32: of each 16 values of a row, halves added to halves, as the kernels do: to the bit."""
    squares = F.pad(x.float(), (0, -x.shape[1] % 16)).square().view(x.shape[0], -1, 16)
    while (half := squares.shape[-1] // 2) > 0:
        squares = squares[..., :half] + squares[..., half:]
    return squares[..., 0].contiguous()


def norm_qkv_rope(
    x: Tensor,  # [rows, hidden]
    norm: Tensor,
    weight: Weight,
    bias: Tensor | None,
    head_norms: Tensor | None,  # [2, dim]
    cos: Tensor,  # [positions, dim / 2]
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv_layer: Tensor,  # [2, slots, kv heads, dim]: written
    num_heads: int,
    eps: float,
) -> Tensor:  # the queries, [rows, heads, dim]
    num_kv, dim = kv_layer.shape[2:]
    made = norm_linear(x, norm, weight, bias, eps).to(x.dtype).view(x.shape[0], -1, dim)
    query, key, value = torch.split(made, [num_heads, num_kv, num_kv], dim=1)
    if head_norms is not None:
        query, key = _rms_norm(query, head_norms[0], eps), _rms_norm(key, head_norms[1], eps)
    angles = cos[positions.long()], sin[positions.long()]
    write_kv(rope(key, *angles), value, kv_layer, slots)
    return rope(query, *angles)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def linear_residual(x: Tensor, weight: Weight, bias: Tensor | None, hidden: Tensor) -> Tensor:
    made = F.linear(x.float(), plain(weight), None if bias is None else bias.float())
    return (hidden.float() + made).to(hidden.dtype)


def norm_gate_up_silu(x: Tensor, norm: Tensor, weight: Weight, bias: Tensor | None, eps: float) -> Tensor:
    gate, up = norm_linear(x, norm, weight, bias, eps).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def noisy_scores(
    logits: Tensor,  # [rows, vocab] float32
    temperatures: Tensor,  # [rows]; 0: greedy
    seeds: Tensor,  # [rows] int64
    positions: Tensor,  # [rows]: of the token that is drawn
) -> Tensor:  # [rows, vocab]: a row's token is the argmax
    keys = [noise_key(seed, at, Purpose.SAMPLE) for seed, at in zip(seeds.tolist(), positions.tolist(), strict=True)]
    uniform = keyed_uniform_rows(keys, logits.shape[-1], logits.device).double()
    noise = -torch.log(-torch.log1p(-uniform))
    warm = (temperatures > 0)[:, None]
    return torch.where(warm, logits / torch.where(warm, temperatures[:, None], 1.0) + noise.float(), logits)
