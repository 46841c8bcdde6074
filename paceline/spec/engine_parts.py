"""What a proposer may use when it is built: handed over once by the engine, so that `spec/` never imports it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.forward import Target
from paceline.core.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineParts:
    vocab_size: int
    max_model_len: int
    block_size: int = 16
    num_slots: int = 0  # of kv_cache; a drafter's own KV has as many, addressed by the same block tables
    first_slots: int = 0  # of these: what the first requests get, and so have memory from the start (kv_tensor.touch)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    decoder: Target | None = None
    kv_cache: Tensor | None = None  # the target's: [layers, 2, num_slots, kv_heads, head_dim]
    tokenizer: Tokenizer | None = None
    num_threads: int | None = None
    max_num_seqs: int | None = None  # requests that run at once, at most; None: any number
    facts: Mapping[str, str] | None = (
        None  # under which what is learned is kept (models/learned_cache.py); None: it is not
    )
