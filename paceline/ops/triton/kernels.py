"""The batch-invariant kernels on CUDA (see the table in ops/kernels.py)."""

import torch.nn.functional as F
from torch import Tensor

from paceline.core.forward import ForwardBatch
from paceline.ops.triton.attention import paged_tree_attention
from paceline.ops.triton.linear import linear
from paceline.ops.triton.rms_norm import rms_norm


class TritonKernels:
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)  # elementwise on CUDA: each element by the same instructions
        return F.silu(gate) * up

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)

    def plan(self, batch: ForwardBatch) -> ForwardBatch:
        return batch  # the kernel finds its keys by itself: nothing for the host to read

    def attention(
        self, query: Tensor, kv_layer: Tensor, plan: ForwardBatch, window: int | None, scale: float
    ) -> Tensor:
        return paged_tree_attention(query, kv_layer, plan, window, scale)
