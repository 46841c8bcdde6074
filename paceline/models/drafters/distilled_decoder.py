"""The distilled draft model as a decoder: what `draft_model` runs, on the CPU in one native call per pass.

Its head knows a draft vocabulary only. The logits come out in the target's places, with -inf where a token is not in
it, so that callers need not know of it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from paceline.core.forward import ForwardBatch, ForwardOutput, Target
from paceline.models.decoder import Decoder
from paceline.models.drafters.distilled import Distilled
from paceline.models.drafters.paged import Placement
from paceline.models.layout import EMBEDDING, FINAL_NORM, HEAD
from paceline.models.native import NativeDecoder


class DistilledDecoder:
    batch_invariant = False  # drafts need not be
    draws_tokens = False

    def __init__(self, network: Distilled, target: Target, place: Placement) -> None:
        self.config = replace(network.config.layer, vocab_size=target.config.vocab_size, tie_word_embeddings=False)
        self.device = place.device
        weights = {f"model.{name}": value.detach() for name, value in network.state_dict().items()}
        weights[HEAD] = weights.pop("model.lm_head.weight")
        weights[EMBEDDING] = target.vocabulary_rows(torch.arange(self.config.vocab_size))
        assert FINAL_NORM in weights
        self._decoder: Decoder | NativeDecoder
        if place.is_native:
            self._decoder = NativeDecoder(self.config, weights, quantization="int8", num_threads=place.threads)
        else:
            self._decoder = Decoder(self.config, weights, dtype=torch.float32, device=place.device)
        self.dtype = self._decoder.dtype
        self.num_threads = self._decoder.num_threads
        self._head_size = len(network.d2t)
        self._ids = network.d2t.to(place.device).long()  # [draft vocab]: the target's ids

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: Tensor,  # [layers, 2, slots, kv_heads, head_dim]
        *,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> ForwardOutput:
        output = self._decoder.forward(batch, kv_cache, hidden_layers=hidden_layers, layers=layers)
        rows = len(batch.logits_rows)
        # A native pass writes as many columns as its head has, in a buffer made for the whole vocabulary.
        narrow = output.logits.reshape(-1)[: rows * self._head_size].view(rows, self._head_size)
        return ForwardOutput(self._widen(narrow), output.hidden)

    def _widen(self, narrow: Tensor) -> Tensor:
        """[rows, draft vocab] -> [rows, vocab]"""
        shape = narrow.shape[0], self.config.vocab_size
        if self.device.type == "cpu":  # by numpy: PyTorch would start its threads for so little
            spread = np.full(shape, -np.inf, dtype=np.float32)
            spread[:, self._ids.numpy()] = narrow.numpy()
            return torch.from_numpy(spread)
        wide = torch.full(shape, -torch.inf, device=self.device)
        wide[:, self._ids] = narrow
        return wide
