"""What the rest of the engine asks of a request's grammar (`paceline/structured/` has the grammars themselves).

Everything is a function of the request's output and of the draft tokens after it: nothing depends on how the output
came about, so a preempted, resumed or re-drafted request meets the same masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.tree import DraftTree
from paceline.errors import RequestFailedError

if TYPE_CHECKING:
    from paceline.core.request import Request

Allowed = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Forced:
    """What must come next. The grammar leaves no other token at the first `num_certain` places; the rest spells text
    that must come, as the tokenizer would, where another spelling is possible too."""

    token_ids: list[int]
    num_certain: int


class Constraint(Protocol):
    def allowed(self, draft_ids: Sequence[int]) -> Allowed:
        """[vocab]: the tokens that may follow the output and then these draft tokens. What no output can reach has no
        answer and gets all of them. Raises `RequestFailedError` where the grammar cannot go on."""

    def settled(self, draft_ids: Sequence[int], token: int) -> int | None:
        """What comes where `token` is wanted, as far as can be said without a mask: the token itself, if it is allowed,
        or the only one that is. None: `allowed` has to say."""

    @property
    def is_quick_to_ask(self) -> bool:
        """Whether `settled` takes a small part of the time of `allowed`."""

    def prune(self, tree: DraftTree) -> DraftTree:
        """The tree without nodes that cannot come."""

    def prepare(self, tree: DraftTree) -> None:
        """Compute now what `allowed` will be asked for this tree; in any thread, but never two at a time."""

    def forced(self, max_tokens: int) -> Forced: ...

    def of_request(self, request: "Request") -> "Constraint":
        """The same grammar for another request, or for another state of the same."""

    def fail(self, error: RequestFailedError) -> None:
        """From now on no token of the request can be chosen."""

    def close(self) -> None:
        """The request ended: let go of memory."""
