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

import torch
from torch import Tensor

from paceline.errors import InvalidOptionError, RequestFailedError
from paceline.ops.random import Purpose, keyed_coin, noise_key, pick
from paceline.ops.sampling import host_logits, noisy_scores, row_probs
from paceline.ops.sampling_edits import NodeRow

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
    numbers = draws if draws is not None else [len(row.draft_ids) for row in rows]
    host = logits.cpu()
    drawn = []
    for row, number in zip(rows, numbers, strict=True):
        try:
            drawn.append(_draw(row, host, mode, width, replacement, number))
        except RequestFailedError:
            drawn.append(Drawn([]))
    return drawn


def _draw(row: NodeRow, logits: Tensor, mode: str, width: int, replacement: bool, number: int) -> Drawn:
    params = row.request.sampling_params
    if mode == "greedy" or (mode == "coupled" and params.greedy):
        return Drawn(_best(torch.from_numpy(host_logits(row, logits)), width))
    if mode == "coupled":
        ids, scores = noisy_scores(row, host_logits(row, logits))
        return Drawn([int(ids[i]) for i in _best(torch.from_numpy(scores), width)])
    q = row_probs(row, logits)
    if mode == "spechub":
        return _pair(row, q, number)
    return _with_replacement(row, q, number, width) if replacement else _without_replacement(row, q, number, width)


def _best(values: Tensor, width: int) -> list[int]:  # [any] -> ids, best first, lowest id where they tie
    if width == 1:
        return [int(values.argmax())]
    order = values.sort(dim=-1, descending=True, stable=True)
    return [int(i) for i in order.indices[:width] if values[i] > -torch.inf]


def _with_replacement(row: NodeRow, q: Tensor, number: int, width: int) -> Drawn:
    tokens = [
        pick(keyed_coin(noise_key(row.request.seed, row.request.num_tokens, Purpose.DRAFT, number * 1024 + i)), q)
        for i in range(width)
    ]
    return Drawn(tokens, q.expand(width, -1))


def _without_replacement(row: NodeRow, q: Tensor, number: int, width: int) -> Drawn:
    tokens: list[int] = []
    probs: list[Tensor] = []
    left = q
    for i in range(min(width, int(q.count_nonzero()))):
        key = noise_key(row.request.seed, row.request.num_tokens, Purpose.DRAFT, number * 1024 + i)
        tokens.append(pick(keyed_coin(key), left))
        probs.append(left)
        left = left.clone()
        left[tokens[-1]] = 0.0
        left /= left.sum()
    return Drawn(tokens, torch.stack(probs))


def _pair(row: NodeRow, q: Tensor, number: int) -> Drawn:
    """First token i ~ q. If it is the hub, the second is drawn from the others; if not, the second is the hub."""
    first = _without_replacement(row, q, number, 2)
    hub = int(q.argmax())
    if len(first.token_ids) == 2 and first.token_ids[0] != hub:
        return Drawn([first.token_ids[0], hub], q.expand(2, -1))
    return Drawn(first.token_ids, q.expand(len(first.token_ids), -1))
