"""Options that change a node's logits before temperature: what a token may be, and what it has cost already.

A node is looked at as plain decoding would look at it had its draft ancestors been emitted: they count as output for
the penalties, for bad words and for min_tokens. The order is vLLM's:

    allowed_token_ids, bad_words, min_tokens, logit_bias, logits_processors,
    repetition_penalty, frequency_penalty, presence_penalty
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.errors import RequestFailedError


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


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A request's ids as tensors. It holds the options themselves, so that their id() cannot be reused."""

    params: SamplingParams
    allowed: Tensor | None
    bias_ids: Tensor
    bias_values: Tensor


_compiled: OrderedDict[tuple[int, torch.device], _Compiled] = OrderedDict()  # least recently used first
_MAX_COMPILED = 1024


def _compile(params: SamplingParams, device: torch.device) -> _Compiled:
    key = (id(params), device)
    entry = _compiled.get(key)
    if entry is None:
        allowed = params.allowed_token_ids
        entry = _compiled[key] = _Compiled(
            params,
            None if allowed is None else torch.tensor(list(allowed), device=device),
            torch.tensor(list(params.logit_bias.keys()), dtype=torch.int64, device=device),
            torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device),
        )
        if len(_compiled) > _MAX_COMPILED:
            _compiled.popitem(last=False)
    else:
        _compiled.move_to_end(key)
    return entry


def needs_edit(row: NodeRow) -> bool:
    """Whether any option of this file touches the row."""
    params = row.request.sampling_params
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.logits_processors
        or row.request.bad_words_token_ids
        or _held_back(row)
        or _has_penalties(params)
    )


def edit_logits(row: NodeRow, logits: Tensor) -> Tensor:  # [vocab] float32 -> [vocab] float32
    """The row's logits with every option of this file applied; `logits` itself stays as it is."""
    request, params = row.request, row.request.sampling_params
    compiled = _compile(params, logits.device)
    if compiled.allowed is None:
        logits = logits.clone()
    else:
        kept = torch.full_like(logits, -torch.inf)
        kept[compiled.allowed] = logits[compiled.allowed]
        logits = kept
    output_ids = request.output_token_ids + list(row.draft_ids)
    banned = _bad_word_endings(request.bad_words_token_ids, output_ids)
    if _held_back(row):
        banned += request.stop_token_ids
    if banned:
        logits[banned] = -torch.inf
    if params.logit_bias:
        logits[compiled.bias_ids] += compiled.bias_values
    if params.logits_processors:
        logits = _run_processors(params, [*request.prompt_token_ids, *output_ids], logits)
    if _has_penalties(params):
        _penalize_(params, request.prompt_token_ids, output_ids, logits)
    return logits


def _held_back(row: NodeRow) -> bool:
    """min_tokens not reached yet: tokens that would end the output cannot be chosen."""
    return row.request.num_output_tokens + len(row.draft_ids) < row.request.sampling_params.min_tokens


def _bad_word_endings(bad_words: Sequence[Sequence[int]], output_ids: Sequence[int]) -> list[int]:
    """The last token of every bad word whose other tokens are what the output ends with."""
    banned = []
    for *start, last in bad_words:
        if len(start) <= len(output_ids) and list(output_ids[len(output_ids) - len(start) :]) == start:
            banned.append(last)
    return banned


def _run_processors(params: SamplingParams, token_ids: Sequence[int], logits: Tensor) -> Tensor:
    shape = logits.shape
    for processor in params.logits_processors:
        try:
            logits = processor(token_ids, logits)
        except Exception as error:
            raise RequestFailedError(f"logits processor {processor!r} raised {error!r}") from error
        if not isinstance(logits, Tensor) or logits.shape != shape:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise RequestFailedError(
                f"logits processor {processor!r} must return a tensor of shape {tuple(shape)}, it returned {got}"
            )
    return logits.to(torch.float32)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _penalize_(params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Tensor) -> None:
    """Repetition looks at prompt and output and scales; frequency and presence look at the output and subtract."""
    # Only tokens that occurred are touched, so the cost follows the text and not the vocabulary.
    output, counts = np.unique(np.array(output_ids, dtype=np.int64), return_counts=True)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.union1d(np.array(prompt_ids, dtype=np.int64), output)).to(logits.device)
        values = logits[seen]
        scale = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / scale, values * scale)
    ids = torch.from_numpy(output).to(logits.device)
    cost = params.frequency_penalty * counts + params.presence_penalty
    logits[ids] -= torch.from_numpy(cost.astype(np.float32)).to(logits.device)
