"""The seam between the engine and the verification rules.

A verifier gets every request whose last token was in the pass, the draft that was verified with it, and the target's
logits: each request's root row first, then one row per node in node order. It answers with the accepted path and one
more token (recovered where a draft token was rejected, bonus where all were accepted).

    accepted token   a draft token that the rule let through
    recovered token  emitted where no child was accepted
    bonus token      emitted after an accepted leaf
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from paceline.core.outputs import VerifyResult
from paceline.core.request import Request
from paceline.core.tree import DraftTree


class Verifier(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def lossless(self) -> bool: ...

    @property
    def takes_tokens(self) -> bool: ...  # it needs no more than the target's own token at every row (`follow_tokens`)

    def verify(
        self,
        requests: Sequence[Request],
        drafts: Sequence[DraftTree],
        logits: Tensor,  # [sum(1 + nodes), vocab] float32
    ) -> list[VerifyResult]: ...
