"""R1, sample-match: the default rule, exact for every tree whoever drafted it.

At a node the target draws its own token y (the argmax at temperature 0). If a child carries y, go there; if not, y is
emitted and the walk ends. The draft never enters the draw, so the output is the target's by construction, and because
the noise is keyed by (seed, position) it is token for token what plain decoding with that seed gives.
"""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.core.outputs import VerifyResult
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.errors import RequestFailedError
from paceline.ops.sampling import NodeRow, choose_tokens
from paceline.ops.sampling_truncate import nothing_to_sample
from paceline.verifiers.walk import ROOT, Path, Walk, all_rows, run_walks

AnswerRows = Callable[[Sequence[NodeRow], Tensor], Sequence[int | RequestFailedError]]


def sample_match_walk(tree: DraftTree) -> Walk[int]:
    children = tree.children()  # [ROOT] is the root's
    accepted: list[int] = []
    node = ROOT
    while True:
        (token,) = yield (node,)
        child = children[node].get(token)
        if child is None:
            return Path(accepted, token)
        accepted.append(child)
        node = child


class SampleMatch:
    name = "sample_match"
    lossless = True
    takes_tokens = True

    def verify(self, requests: Sequence[Request], drafts: Sequence[DraftTree], logits: Tensor) -> list[VerifyResult]:
        walks = [sample_match_walk(draft) for draft in drafts]
        answer: AnswerRows = choose_tokens
        if logits.device.type != "cpu":
            answer = _looked_up(choose_tokens(all_rows(requests, drafts), logits))
        return run_walks(walks, requests, drafts, logits, answer)


def follow_tokens(draft: DraftTree, tokens: Sequence[int | None]) -> VerifyResult:
    """The same rule where the pass drew every row's token by itself: `tokens` are the root's and the nodes'."""
    emitted: list[int] = []
    accepted: list[int] = []
    children = draft.children() if draft else None
    node: int | None = ROOT
    while node is not None:
        token = tokens[1 + node]
        if token is None:
            return VerifyResult([], [], error=nothing_to_sample(math.nan))
        emitted.append(token)
        node = children[node].get(token) if children else None
        if node is not None:
            accepted.append(node)
    return VerifyResult(emitted, accepted)


def _looked_up(tokens: Sequence[int | RequestFailedError]) -> AnswerRows:
    """A device chooses for every row of the pass at once: one wait for it, instead of one for every level."""
    return lambda rows, logits: [tokens[row.logits_row] for row in rows]
