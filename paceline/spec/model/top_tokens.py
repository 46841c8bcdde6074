"""The likeliest tokens of each row, without sorting a vocabulary.

The k largest of a row lie in the k blocks with the largest maxima, so only those blocks are searched. Where their
probabilities are wanted too, the native kernels find both in one pass over a row.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.ops.native.layers import layers_available, top_log_probs

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

BLOCK = 128


def likeliest(logits: Tensor, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """Ids of the k largest logits of each row, largest first, and their probabilities: [rows][k] each"""
    k = min(k, logits.shape[1])
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and layers_available():
        ids, log_probs = top_log_probs(logits, k, num_threads=1)  # a row is too little for several
    else:
        log_probs, ids = torch.log_softmax(logits.float(), dim=1).topk(k, dim=1)
    return ids.tolist(), log_probs.exp().tolist()


def top_tokens(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest logits of each row, largest first.

    logits: [rows, vocab]; returns [rows, k] int64. Where values tie at the edge, either may be given."""
    rows, vocab = logits.shape
    num_blocks = vocab // BLOCK
    if num_blocks <= k:
        return torch.topk(logits, min(k, vocab), dim=1).indices
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(_by_numpy(logits.numpy(), k, num_blocks))
    head = logits[:, : num_blocks * BLOCK].view(rows, num_blocks, BLOCK)
    blocks = torch.topk(head.amax(dim=2), k, dim=1).indices  # [rows, k]
    candidates = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    tail = torch.arange(num_blocks * BLOCK, vocab, device=logits.device).expand(rows, -1)
    candidates = torch.cat([candidates, tail], dim=1)  # [rows, k * BLOCK + rest]
    best = torch.topk(logits.gather(1, candidates), k, dim=1).indices
    return candidates.gather(1, best)


def _by_numpy(logits: FloatArray, k: int, num_blocks: int) -> IntArray:
    """The same on a CPU: PyTorch would start its threads, which on a busy machine costs more than the search."""
    if k == 1:
        likeliest: IntArray = logits.argmax(axis=1)[:, None]
        return likeliest
    rows, vocab = logits.shape
    maxima = logits[:, : num_blocks * BLOCK].reshape(rows, num_blocks, BLOCK).max(axis=2)
    blocks = np.argpartition(maxima, num_blocks - k, axis=1)[:, num_blocks - k :]
    candidates = (blocks[:, :, None] * BLOCK + np.arange(BLOCK)).reshape(rows, -1)
    tail = np.broadcast_to(np.arange(num_blocks * BLOCK, vocab), (rows, vocab - num_blocks * BLOCK))
    candidates = np.concatenate([candidates, tail], axis=1)  # [rows, k * BLOCK + rest]
    values = np.take_along_axis(logits, candidates, axis=1)
    last = values.shape[1] - k
    best = np.argpartition(values, last, axis=1)[:, last:]
    order = np.argsort(-np.take_along_axis(values, best, axis=1), axis=1, kind="stable")
    return np.take_along_axis(candidates, np.take_along_axis(best, order, axis=1), axis=1)
