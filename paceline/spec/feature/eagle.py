"""`eagle`: EAGLE-1's network in EAGLE-2's trees. One trained layer predicts the target's last hidden state.

It drafts as `eagle3` does: true pairs (h_t, x_{t+1}) enter the drafter's KV as soon as the target has computed h_t, the
newest one says what follows, and deeper nodes feed the drafter its own features; at each depth the likeliest paths are
extended, and of all nodes the likeliest by the product of their probabilities are kept. Only the network differs: the
feature is one hidden state, as the target's head sees it, and that head makes the scores.
"""

import torch
from torch import Tensor

from paceline.spec.feature.eagle3 import Eagle3Proposer


class EagleProposer(Eagle3Proposer):
    kind = "eagle"

    def _fuse(self, hidden: Tensor) -> Tensor:
        return hidden

    def _logits(self, features: Tensor) -> Tensor:
        return self._head(features)

    def _inputs(self, token_ids: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        stream = self._fc(torch.cat([self._target.vocabulary_rows(token_ids), feature], dim=1))
        normed: Tensor = self._network.midlayer.input_layernorm(stream)
        return normed, stream
