"""How far apart the same row may come out of two passes, on a backend whose rounding depends on the batch."""

import torch

from paceline.core.forward import Decoder

# How far below the best a token may be, in log-probability, where passes of different shapes round differently.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}

# The largest difference over a whole vocabulary is larger than that of two tokens near the top. A choice: twice as much
# would still be told from a wrong key or value, which moves logits by whole units in float32; half as much would call
# the rounding of a model of many layers broken.
OVER_A_VOCABULARY = 4.0


def allowed_gap(decoder: Decoder) -> float:
    """Between the emitted token and the best one: none where bits are promised."""
    return 0.0 if decoder.batch_invariant else TOLERANCE[decoder.dtype]


def is_rounding(decoder: Decoder, largest_difference: float) -> bool:
    """Whether logits that differ by so much may be called the same, on a backend that promises no bits."""
    return not decoder.batch_invariant and largest_difference <= OVER_A_VOCABULARY * TOLERANCE[decoder.dtype]
