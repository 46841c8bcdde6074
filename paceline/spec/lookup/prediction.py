"""`prediction` (OpenAI Predicted Outputs): the client says what it expects; that text is the draft.

    SamplingParams(speculative={"prediction": "def area(width, height): ..."})

While the output follows the prediction, the draft is simply what comes next in it. Where they part, the last tokens
written are looked up in the prediction, and the likeliest places to go on from become branches of one tree: after a
replaced word the text goes on behind it, after a deleted line further down, after an inserted one where it stopped.
A short replacement that was seen once (a renamed identifier) is made again wherever the same tokens come up.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.errors import InvalidOptionError, InvalidRequestError
from paceline.spec.engine_parts import EngineParts
from paceline.spec.lookup.followed_text import Alignment
from paceline.spec.proposer import Budget, Proposer, StepContext
from paceline.spec.trie import Trie

FIRST_DRAFT = 8  # tokens drafted from a place that has proved nothing yet; each token that held adds two
MAX_BRANCHES = 3


@dataclass(slots=True)
class Followed:
    alignment: Alignment
    num_read: int = 0  # output tokens that the alignment has seen


class PredictionProposer(Proposer):
    def __init__(self, services: EngineParts, largest: Budget) -> None:
        self._services = services
        self._followed: dict[str, Followed | None] = {}  # None: the request brought no prediction

    def check_params(self, params: SamplingParams) -> None:
        """Refuse a prediction that cannot be used, when the request arrives."""
        self._tokens(params)

    def can_draft(self, request: Request) -> bool:
        speculative = request.sampling_params.speculative
        return speculative is not None and speculative.get("prediction") is not None

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self._draft(r, b) for r, b in zip(step.requests, budgets, strict=True)]

    def observe(self, step: StepContext) -> None:
        for request in step.gone:
            self._followed.pop(request.request_id, None)

    def _draft(self, request: Request, budget: Budget) -> DraftTree:
        followed = self._follow(request)
        if followed is None or budget.num_nodes < 1:
            return EMPTY_TREE
        for token in request.token_ids[request.num_prompt_tokens + followed.num_read :]:
            followed.alignment.read(token)
        followed.num_read = request.num_output_tokens
        places = followed.alignment.places[:MAX_BRANCHES]
        trie = Trie()
        for i, place in enumerate(places):
            # The first place gets half of what is left as long as there is another one to try.
            room = budget.num_nodes - len(trie)
            share = room if i == len(places) - 1 else (room + 1) // 2
            length = min(budget.max_depth, share, FIRST_DRAFT + 2 * place.num_held)
            path = list(itertools.islice(followed.alignment.expected(place), length))
            trie.add_path(path, (place.num_held + 1) / (place.num_held + 2), budget.num_nodes)
        return trie.tree()

    def _follow(self, request: Request) -> Followed | None:
        if request.request_id not in self._followed:
            tokens = self._tokens(request.sampling_params)
            self._followed[request.request_id] = None if tokens is None else Followed(Alignment(tokens))
        return self._followed[request.request_id]

    def _tokens(self, params: SamplingParams) -> list[int] | None:
        """The request's prediction as token ids; None where it has none."""
        given = (params.speculative or {}).get("prediction")
        if given is None:
            return None
        if isinstance(given, str):
            if self._services.tokenizer is None:
                raise InvalidOptionError("this engine has no tokenizer: give the prediction as token ids")
            tokens = self._services.tokenizer.encode(given, add_special_tokens=False)
        elif isinstance(given, Sequence) and all(isinstance(token, int) for token in given):
            tokens = list(given)
        else:
            raise InvalidOptionError(f"prediction must be text or a list of token ids, got {type(given).__name__}")
        if not tokens:
            raise InvalidOptionError("prediction is empty: leave it out instead")
        if len(tokens) > self._services.max_model_len:
            raise InvalidRequestError(
                f"prediction has {len(tokens)} tokens, more than the context of {self._services.max_model_len}: "
                "send the part that the answer is expected to repeat"
            )
        unknown = next((token for token in tokens if not 0 <= token < self._services.vocab_size), None)
        if unknown is not None:
            raise InvalidOptionError(
                f"prediction holds token {unknown}, outside the vocabulary of {self._services.vocab_size}"
            )
        return tokens
