"""A verifier made of a rule: hand each request's walk its dice, answer it with the target's distributions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.core.outputs import VerifyResult
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.ops.sampling import target_probs
from paceline.ops.sampling_types import Probs
from paceline.verifiers.dice import Dice, KeyedDice
from paceline.verifiers.walk import Walk, run_walks


@dataclass(frozen=True, slots=True)
class RuleVerifier:
    name: str
    rule: Callable[[DraftTree, Dice], Walk[Probs]]
    lossless: bool = True
    takes_tokens: bool = False  # it compares distributions

    def verify(self, requests: Sequence[Request], drafts: Sequence[DraftTree], logits: Tensor) -> list[VerifyResult]:
        walks = [self.rule(draft, KeyedDice(request)) for request, draft in zip(requests, drafts, strict=True)]
        return run_walks(walks, requests, drafts, logits, target_probs)
