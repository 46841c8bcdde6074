"""The likeliest tokens of each row, without sorting a vocabulary.

The k largest of a row lie in the k blocks with the largest maxima, so only those blocks are searched.
"""

import torch
from torch import Tensor

BLOCK = 128


def top_tokens(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest logits of each row, largest first.

    logits: [rows, vocab]; returns [rows, k] int64. Where values tie at the edge, either may be given."""
    rows, vocab = logits.shape
    if k == 1 and logits.device.type == "cpu" and logits.dtype == torch.float32:
        # By numpy: PyTorch would wake its threads, which on a busy machine costs more than the search.
        return torch.from_numpy(logits.numpy().argmax(axis=1))[:, None]
    num_blocks = vocab // BLOCK
    if num_blocks <= k:
        return torch.topk(logits, min(k, vocab), dim=1).indices
    head = logits[:, : num_blocks * BLOCK].view(rows, num_blocks, BLOCK)
    blocks = torch.topk(head.amax(dim=2), k, dim=1).indices  # [rows, k]
    candidates = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    tail = torch.arange(num_blocks * BLOCK, vocab, device=logits.device).expand(rows, -1)
    candidates = torch.cat([candidates, tail], dim=1)  # [rows, k * BLOCK + rest]
    best = torch.topk(logits.gather(1, candidates), k, dim=1).indices
    return candidates.gather(1, best)
