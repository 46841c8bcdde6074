"""The operations a decoder is made of, behind one interface, and the table of who provides them.

| kernels   | where      | batch invariant | how                                                    |
|-----------|------------|-----------------|--------------------------------------------------------|
| fast      | cpu, cuda  | no              | PyTorch's own kernels, keys gathered and masked        |
| invariant | cpu        | yes             | row by row (ops/reference.py), linears in fixed tiles  |
| triton    | cuda       | yes             | one fixed program per row or tile (ops/triton/)        |

Batch invariant: the bits of a row do not depend on which rows share the pass.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.forward import ForwardBatch
from paceline.ops import attention, reference
from paceline.ops.linear import invariant_linear


class Kernels(Protocol):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def plan(self, batch: ForwardBatch) -> Any:
        """Whatever attention needs to know about the pass, made once for all layers."""

    def attention(self, query: Tensor, kv_layer: Tensor, plan: Any, window: int | None, scale: float) -> Tensor: ...


class FastKernels:
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def plan(self, batch: ForwardBatch) -> list[attention.AttentionGroup]:
        return attention.plan_attention(batch)

    def attention(
        self,
        query: Tensor,
        kv_layer: Tensor,
        plan: list[attention.AttentionGroup],
        window: int | None,
        scale: float,
    ) -> Tensor:
        return attention.attend(query, kv_layer, plan, window, scale)


class InvariantCpuKernels:
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return reference.silu_mul(gate_up)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return invariant_linear(x, weight, bias)

    def plan(self, batch: ForwardBatch) -> list[list[int]]:
        return reference.row_slots(batch)

    def attention(
        self, query: Tensor, kv_layer: Tensor, plan: list[list[int]], window: int | None, scale: float
    ) -> Tensor:
        return reference.paged_tree_attention(query, kv_layer, plan, window, scale)


def kernels_for(device: torch.device, batch_invariant: bool) -> Kernels:
    if not batch_invariant:
        return FastKernels()
    if device.type == "cuda":
        from paceline.ops.triton.kernels import TritonKernels  # triton exists only where CUDA does

        return TritonKernels()
    return InvariantCpuKernels()
