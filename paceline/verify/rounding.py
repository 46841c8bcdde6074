"""How far apart the same row may come out of two passes, on a backend whose rounding depends on the batch."""

import torch

from paceline.core.forward import Decoder

# How far below the best a token may be, in log-probability, where passes of different shapes round differently.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}

# The largest difference over a whole vocabulary is larger than that of two tokens near the top. A choice: SmolLM2-135M
# on PyTorch's CPU kernels came to 1.4e-4 in float32 and 0.84 in bfloat16, so half as much would be near to calling
# rounding broken in bfloat16; twice as much would let more pass that teacher forcing would then have to find.
OVER_A_VOCABULARY = 4.0

# A GPU adds the noise of a draw in float32, the host in float64: scores of about 20 round by 2e-6.
NOISE_ON_A_DEVICE = 1e-4


def allowed_gap(decoder: Decoder) -> float:
    """Between the emitted token and the best one: none where bits are promised."""
    return 0.0 if decoder.batch_invariant else TOLERANCE[decoder.dtype]


def allowed_noisy_gap(decoder: Decoder) -> float:
    """The same for scores with noise, which we compute on the host."""
    return max(allowed_gap(decoder), 0.0 if decoder.device.type == "cpu" else NOISE_ON_A_DEVICE)


def is_rounding(decoder: Decoder, largest_difference: float) -> bool:
    """Whether logits that differ by so much may be called the same, on a backend that promises no bits."""
    return not decoder.batch_invariant and largest_difference <= OVER_A_VOCABULARY * TOLERANCE[decoder.dtype]
