"""Options that change a node's logits before temperature: what a token may be, and what it has cost already.

A node is looked at as plain decoding would look at it had its draft ancestors been emitted: they count as output for
the penalties, for bad words and for min_tokens. The order is vLLM's:

    structured_outputs, allowed_token_ids, bad_words, min_tokens, logit_bias, logits_processors,
    repetition_penalty, frequency_penalty, presence_penalty
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.errors import RequestFailedError
from paceline.ops.sampling_types import FloatRow, IdRow, Mask

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One token to choose: whose, after which draft tokens, and where its logits are."""

    request: Request
    draft_ids: tuple[int, ...]  # tokens of the node's path, from the top node down to itself; () at the root
    logits_row: int

    @property
    def position(self) -> int:
        """The index in `token_ids` that the chosen token will have."""
        return self.request.num_tokens + len(self.draft_ids)


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Value = TypeVar("Value", bound=_Sized)

MAX_REMEMBERED, MAX_REMEMBERED_BYTES = 256, 32 << 20  # of what requests brought: that a request ended is not known here


class _OncePer(Generic[Key, Value]):
    """Computes something once for an object, told apart by identity; the last ones are remembered."""

    def __init__(self, compute: Callable[[Key], Value]) -> None:
        self._compute = compute
        # id -> (the object itself, so that its id cannot be reused; what was computed), least recently used first
        self._entries: OrderedDict[int, tuple[Key, Value]] = OrderedDict()
        self._num_bytes = 0

    def __call__(self, key: Key) -> Value:
        entry = self._entries.get(id(key))
        if entry is None:
            entry = self._entries[id(key)] = (key, self._compute(key))
            self._num_bytes += entry[1].nbytes
            while len(self._entries) > MAX_REMEMBERED or (
                self._num_bytes > MAX_REMEMBERED_BYTES and len(self._entries) > 1
            ):
                _, (_, oldest) = self._entries.popitem(last=False)
                self._num_bytes -= oldest.nbytes
        else:
            self._entries.move_to_end(id(key))
        return entry[1]

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, slots=True)
class _OptionIds:
    """A request's options as arrays. What is not allowed is marked over [0, last allowed id]: a mask is faster than a
    list of ids as soon as there are some hundreds of them."""

    not_allowed: Mask
    bias_ids: IdRow
    bias_values: FloatRow

    @property
    def nbytes(self) -> int:
        return self.not_allowed.nbytes + self.bias_ids.nbytes + self.bias_values.nbytes

    @staticmethod
    def of(params: SamplingParams) -> "_OptionIds":
        allowed = np.array(params.allowed_token_ids or (), dtype=np.int64)
        not_allowed = np.ones(int(allowed.max(initial=-1)) + 1, dtype=bool)
        not_allowed[allowed] = False
        return _OptionIds(
            not_allowed,
            np.array(list(params.logit_bias.keys()), dtype=np.int64),
            np.array(list(params.logit_bias.values()), dtype=np.float32),
        )


def _distinct(token_ids: Collection[int]) -> IdRow:
    return np.unique(np.fromiter(token_ids, np.int64, len(token_ids)))


_option_ids = _OncePer(_OptionIds.of)
_distinct_prompt_ids: _OncePer[Sequence[int], IdRow] = _OncePer(_distinct)
_stop_ids: _OncePer[frozenset[int], IdRow] = _OncePer(_distinct)


def needs_edit(row: NodeRow) -> bool:
    """Whether any option of this file touches the row."""
    return _edits_every_row(row.request) or _held_back(row)


def may_need_edit(request: Request) -> bool:
    """Whether any option of this file can touch any row of the request: `needs_edit`, but the same for all of them."""
    return _edits_every_row(request) or bool(request.sampling_params.min_tokens)


def only_grammar_edits(request: Request) -> bool:
    """Whether a grammar, and no other option of this file, touches its rows."""
    others = request.sampling_params.min_tokens or _edits_besides_grammar(request)
    return request.constraint is not None and not others


def _edits_every_row(request: Request) -> bool:
    return request.constraint is not None or _edits_besides_grammar(request)


def _edits_besides_grammar(request: Request) -> bool:
    params = request.sampling_params
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.logits_processors
        or request.bad_words
        or _has_penalties(params)
    )


def edit_logits(row: NodeRow, logits: FloatRow) -> FloatRow:
    """The row's logits with every option of this file applied; `logits` itself stays as it is."""
    request, params = row.request, row.request.sampling_params
    ids = _option_ids(params)
    grammar = None if request.constraint is None else request.constraint.allowed(row.draft_ids)
    logits = logits.copy() if grammar is None else np.where(grammar, logits, np.float32(-np.inf))
    if params.allowed_token_ids is not None:
        num_marked = len(ids.not_allowed)
        np.copyto(logits[:num_marked], -np.inf, where=ids.not_allowed)
        logits[num_marked:] = -np.inf
    output_ids = request.output_token_ids + list(row.draft_ids)
    for banned in request.bad_words.endings(output_ids):
        logits[banned] = -np.inf
    if _held_back(row) and not (grammar is not None and _only(request.stop_token_ids, grammar)):
        logits[_stop_ids(request.stop_token_ids)] = -np.inf
    logits[ids.bias_ids] += ids.bias_values
    if params.logits_processors:
        logits = _run_processors(params, [*request.prompt_token_ids, *output_ids], logits)
        if grammar is not None:  # a processor may have made new logits of its own
            logits = np.where(grammar, logits, np.float32(-np.inf))
    if _has_penalties(params):
        _penalize_(params, request.prompt_token_ids, output_ids, logits)
    return logits


def _held_back(row: NodeRow) -> bool:
    """min_tokens not reached yet: tokens that would end the output cannot be chosen."""
    return row.request.num_output_tokens + len(row.draft_ids) < row.request.sampling_params.min_tokens


def _only(stop_token_ids: frozenset[int], allowed: Mask) -> bool:
    """Whether the grammar has come to its end, which min_tokens cannot put off: there is nothing else to say."""
    return int(allowed.sum()) == int(allowed[_stop_ids(stop_token_ids)].sum())


def _run_processors(params: SamplingParams, token_ids: Sequence[int], logits: FloatRow) -> FloatRow:
    values: object = torch.from_numpy(logits)
    for processor in params.logits_processors:
        assert isinstance(values, Tensor)
        try:
            values = processor(token_ids, values)
        except Exception as error:
            raise RequestFailedError(f"logits processor {processor!r} raised {error!r}") from error
        if not isinstance(values, Tensor) or values.shape != logits.shape:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise RequestFailedError(
                f"logits processor {processor!r} must return a tensor of shape {logits.shape}, it returned {got}"
            )
    assert isinstance(values, Tensor)
    edited: FloatRow = values.detach().to("cpu", torch.float32).numpy()
    return edited


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _penalize_(params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int], logits: FloatRow) -> None:
    """Repetition looks at prompt and output and scales; frequency and presence look at the output and subtract."""
    # Only tokens that occurred are touched, so the cost follows the text and not the vocabulary.
    output, counts = np.unique(np.array(output_ids, dtype=np.int64), return_counts=True)
    if params.repetition_penalty != 1.0:
        seen = np.union1d(_distinct_prompt_ids(prompt_ids), output)
        values = logits[seen]
        scale = np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / scale, values * scale)
    cost = params.frequency_penalty * counts + params.presence_penalty
    logits[output] -= cost.astype(np.float32)
