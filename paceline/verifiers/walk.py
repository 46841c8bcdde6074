"""How a rule goes down a tree: one level at a time, all requests together.

A rule is a generator, a *walk*. It yields the nodes whose rows it has to look at (-1 is the root, the row of the last
committed token), is sent one answer per node (a token, or the target's distribution there), and returns its path. The
driver lets every request take its next step in one batch, so only rows on accepted paths are ever processed.

    def plain(tree):                        # no draft: look at the root, emit what was drawn there
        (token,) = yield (-1,)
        return Path([], token)
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from paceline.core.outputs import TokenLogprobs, VerifyResult
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.errors import RequestFailedError
from paceline.ops.sampling_edits import NodeRow
from paceline.ops.sampling_logprobs import token_logprobs

ROOT = -1
LOGPROB_ROWS = 64  # at once: as many copies of a row of logits are made

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Path:
    accepted: list[int]  # nodes, top node first
    last_token: int  # recovered or bonus token


Walk = Generator[Sequence[int], Sequence[Answer], Path]


def run_walks(
    walks: Sequence[Walk[Answer]],
    requests: Sequence[Request],
    drafts: Sequence[DraftTree],
    logits: Tensor,  # [sum(1 + nodes), vocab]
    answer: Callable[[Sequence[NodeRow], Tensor], Sequence[Answer | RequestFailedError]],
) -> list[VerifyResult]:
    """Drive every walk to its end. A request whose rows cannot be sampled ends alone, with the error."""
    root_rows = _root_rows(drafts)
    states = [_advance(walk, None) for walk in walks]
    while waiting := {i: state for i, state in enumerate(states) if not isinstance(state, Path | RequestFailedError)}:
        rows = [
            NodeRow(requests[i], _path_tokens(drafts[i], node), root_rows[i] + 1 + node)
            for i, nodes in waiting.items()
            for node in nodes
        ]
        answers = iter(answer(rows, logits))
        for i, nodes in waiting.items():
            states[i] = _advance(walks[i], [next(answers) for _ in nodes])
    outcomes = [state for state in states if isinstance(state, Path | RequestFailedError)]
    results = [_result(outcome, draft) for outcome, draft in zip(outcomes, drafts, strict=True)]
    _add_logprobs(results, requests, root_rows, logits)
    return results


def all_rows(requests: Sequence[Request], drafts: Sequence[DraftTree]) -> list[NodeRow]:
    """Every row of the pass, in its order."""
    return [
        NodeRow(request, _path_tokens(draft, node), first + 1 + node)
        for request, draft, first in zip(requests, drafts, _root_rows(drafts), strict=True)
        for node in range(ROOT, len(draft))
    ]


def _advance(
    walk: Walk[Answer], answers: Sequence[Answer | RequestFailedError] | None
) -> Sequence[int] | Path | RequestFailedError:
    """Send the answers (None to start); what comes back is the nodes wanted next, or the end of the walk."""
    usable: list[Answer] = []
    for one in answers or ():
        if isinstance(one, RequestFailedError):
            walk.close()
            return one
        usable.append(one)
    try:
        return next(walk) if answers is None else walk.send(usable)
    except StopIteration as stop:
        path: Path = stop.value
        return path
    except RequestFailedError as error:
        return error


def _root_rows(drafts: Sequence[DraftTree]) -> list[int]:
    rows, start = [], 0
    for draft in drafts:
        rows.append(start)
        start += 1 + len(draft)
    return rows


def _path_tokens(draft: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(draft.token_ids[i] for i in draft.ancestors(node))


def _result(outcome: Path | RequestFailedError, draft: DraftTree) -> VerifyResult:
    if isinstance(outcome, RequestFailedError):
        return VerifyResult([], [], error=outcome)
    token_ids = [draft.token_ids[node] for node in outcome.accepted] + [outcome.last_token]
    return VerifyResult(token_ids, outcome.accepted)


def _add_logprobs(
    results: Sequence[VerifyResult], requests: Sequence[Request], root_rows: Sequence[int], logits: Tensor
) -> None:
    """Log-probabilities where they were asked for: all requests that want as many top tokens together."""
    by_top: dict[int, list[int]] = {}
    for i, (request, result) in enumerate(zip(requests, results, strict=True)):
        if request.sampling_params.logprobs is not None and result.error is None:
            by_top.setdefault(request.sampling_params.logprobs, []).append(i)
    for num_top, members in by_top.items():
        rows = [root_rows[i] + 1 + node for i in members for node in (ROOT, *results[i].accepted)]
        tokens = [token for i in members for token in results[i].token_ids]
        begin_s = time.perf_counter()
        entries: list[TokenLogprobs] = []
        for begin in range(0, len(rows), LOGPROB_ROWS):
            end = begin + LOGPROB_ROWS
            entries += token_logprobs(logits[rows[begin:end]], tokens[begin:end], num_top)
        in_order = iter(entries)
        for i in members:
            results[i].logprobs = [next(in_order) for _ in results[i].token_ids]
            requests[i].sampling_s += (time.perf_counter() - begin_s) / len(members)
