"""Kernels recorded as a CUDA graph: one launch for all of them."""

from collections.abc import Callable

import torch


def record(launch_kernels: Callable[[], None]) -> "torch.cuda.CUDAGraph":
    """Run once, so that every kernel is compiled, then record. What they read must be padding, or may run again."""
    launch_kernels()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_kernels()
    return graph
