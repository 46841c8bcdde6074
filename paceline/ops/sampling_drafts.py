"""Drawing draft tokens from a drafter's logits, in the ways that the rules can verify.

    greedy    the likeliest tokens. A fixed draft: any rule.
    sampled   drawn from q with noise of the drafter's own, and q is reported. rejection, multi_step, block.
    coupled   drawn with the very noise that the target will use at that position. sample_match: the target agrees with
              probability at least (1 - TV(p, q)) / (1 + TV(p, q)), and seeded output stays what it is.
    spechub   a pair around the likeliest token, and q. spechub.

The drafter's logits go through the request's own options first, so that q resembles the p it will be compared with; q
is what was really drawn from, whatever the options made of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from paceline.errors import InvalidOptionError, RequestFailedError
from paceline.ops.random import Purpose, keyed_coin, noise_key, pick
from paceline.ops.sampling import edited_logits, row_noisy_scores, row_probs, row_token
from paceline.ops.sampling_edits import NodeRow
from paceline.ops.sampling_types import FloatRow, Probs

MAX_WIDTH = 1024
DRAFT_MODES = ("greedy", "sampled", "coupled", "spechub")


@dataclass(frozen=True, slots=True)
class Drawn:
    """Siblings drawn after one node, in draw order."""

    token_ids: list[int]
    probs: Tensor | None = None  # [len(token_ids), vocab] float64: what each was drawn from, given the ones before


def draft_tokens(
    rows: Sequence[NodeRow],  # where in the draft each row stands; logits_row is its line of `logits`
    logits: Tensor,  # [any, vocab]: the drafter's
    mode: str = "greedy",
    width: int = 1,
    replacement: bool = False,
    draws: Sequence[int] | None = None,
) -> list[Drawn]:
    """`width` siblings for every row (fewer where q has fewer tokens and none may repeat).

    `draws` numbers the rows' draws within the request's step, so that none shares its noise: by default the depth,
    which is right for chains; in a tree give each row a number of its own, such as its node. A row that the request's
    options leave nothing of draws nothing."""
    if mode not in DRAFT_MODES:
        raise InvalidOptionError(f"draft mode must be one of {', '.join(DRAFT_MODES)}, got {mode!r}")
    if not 1 <= width <= MAX_WIDTH:
        raise InvalidOptionError(f"draft width must be between 1 and {MAX_WIDTH}, got {width}")
    numbers = draws if draws is not None else [len(row.draft_ids) for row in rows]
    drawn = []
    for row, number in zip(rows, numbers, strict=True):
        try:
            drawn.append(_draw(row, logits, mode, width, replacement, number))
        except RequestFailedError:
            drawn.append(Drawn([]))
    return drawn


def _draw(row: NodeRow, logits: Tensor, mode: str, width: int, replacement: bool, number: int) -> Drawn:
    if mode == "greedy":
        return Drawn(_best(edited_logits(row, logits), width))
    if mode == "coupled":
        return Drawn([row_token(row, logits)] if width == 1 else _best(row_noisy_scores(row, logits), width))
    q = row_probs(row, logits)
    key = partial(noise_key, row.request.seed, row.request.num_tokens, Purpose.DRAFT)
    first_index = number * MAX_WIDTH
    if mode == "sampled" and replacement:
        tokens = [pick(keyed_coin(key(first_index + i)), q) for i in range(width)]
        return Drawn(tokens, torch.from_numpy(q).expand(width, -1))
    if mode == "sampled":
        return _without_replacement(q, [key(first_index + i) for i in range(width)])
    return _pair(q, [key(first_index), key(first_index + 1)])


def _best(values: FloatRow | Probs, width: int) -> list[int]:
    """The tokens with the largest values, best first, the lowest id where they tie; fewer where fewer are allowed."""
    if width == 1:
        return [int(values.argmax())]
    if width < len(values):
        values = np.where(values >= np.partition(values, len(values) - width)[len(values) - width], values, -np.inf)
    ids = np.flatnonzero(values > -np.inf)
    order = np.argsort(-values[ids], kind="stable")[:width]
    return [int(i) for i in ids[order]]


def _without_replacement(q: Probs, keys: Sequence[int]) -> Drawn:
    tokens: list[int] = []
    probs: list[Probs] = []
    for key in keys[: int(np.count_nonzero(q))]:
        tokens.append(pick(keyed_coin(key), q))
        probs.append(q)
        q = q.copy()
        q[tokens[-1]] = 0.0
        q /= max(q.sum(), np.finfo(np.float64).tiny)  # nothing is left after the last token
    return Drawn(tokens, torch.from_numpy(np.stack(probs)))


def _pair(q: Probs, keys: Sequence[int]) -> Drawn:
    """First token i ~ q. If it is the hub, the second is drawn from the others; if not, the second is the hub."""
    tokens = _without_replacement(q, keys).token_ids
    hub = int(q.argmax())
    if tokens[0] != hub:
        tokens = [tokens[0], hub]
    return Drawn(tokens, torch.from_numpy(q).expand(len(tokens), -1))


def widen_draft_logits(
    logits: Tensor,  # [rows, draft vocab]
    d2t: Tensor,  # [draft vocab]: target id - draft id, the offsets that EAGLE-3 checkpoints carry
    vocab_size: int,
) -> Tensor:  # [rows, vocab]
    """A reduced draft vocabulary put in the target's places; what it does not have gets -inf."""
    target_ids = torch.arange(len(d2t), device=d2t.device) + d2t
    wide = torch.full((len(logits), vocab_size), -torch.inf, dtype=logits.dtype, device=logits.device)
    wide[:, target_ids.to(logits.device)] = logits
    return wide
