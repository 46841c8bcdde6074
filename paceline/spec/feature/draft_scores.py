"""From a drafter's logits over its own vocabulary to the likeliest tokens of each row.

    greedy    the likeliest by the logits.
    coupled   the likeliest after the target's own noise for that position was added: what the target will pick if the
              two agree. At temperature 0 the same as greedy.
    sampled   one token per row, drawn from q, and q itself, for rules that need it.

Noise belongs to a position, not to a path, so all nodes of a level share it. A request's options that edit logits are
applied as far as they are known without the target: a draft may ignore an option, the verifier never does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.request import Request
from paceline.errors import RequestFailedError
from paceline.ops.native import default_num_threads
from paceline.ops.native.layers import layers_available, top_log_probs
from paceline.ops.native.noise import keyed_gumbel, noise_available
from paceline.ops.random import Purpose, gumbel, id_constants, keyed_uniform, noise_key
from paceline.ops.sampling_drafts import draft_tokens
from paceline.ops.sampling_edits import NodeRow, edit_logits, needs_edit
from paceline.ops.sampling_truncate import shortlist
from paceline.ops.sampling_types import FloatRow

Floats = NDArray[np.float32]
LOWEST = -1e30  # stands for tokens that are out: still finite when another is subtracted


@dataclass(frozen=True, slots=True)
class Scored:
    """Per row, likeliest first; a log-probability below LOWEST / 2 means that there is no such token."""

    token_ids: NDArray[np.int64]  # [rows, k], the target's ids
    log_probs: Floats  # [rows, k]
    probs: list[Tensor] = field(default_factory=list)  # per row [vocab], where tokens were sampled


class DraftScores:
    def __init__(self, d2t: Tensor, vocab_size: int, sampling: str | None, num_threads: int | None = None) -> None:
        self.sampling = sampling or "coupled"
        self._ids: NDArray[np.int64] = d2t.cpu().numpy().astype(np.int64)  # [draft vocab]: the target's ids
        self.id_constants = id_constants(vocab_size, self._ids)  # [draft vocab]: what noise is made from
        self._vocab_size = vocab_size
        self._num_threads = num_threads or default_num_threads()

    def top(self, rows: Sequence[tuple[Request, int]], logits: Tensor, k: int) -> Scored:
        """`rows`: (request, depth) of each row of logits [rows, draft vocab]; depth 0 follows the last token."""
        if self.sampling == "sampled":
            return self._sample(rows, logits)
        edited = [i for i, (request, _) in enumerate(rows) if not self.is_plain(request)]
        if edited:
            values = host_copy(logits)
            noise: dict[tuple[str, int], Floats] = {}
            for i in edited:
                values[i] = self._scores(*rows[i], values[i], noise)
            logits = torch.from_numpy(values).to(logits.device)
        ids, log_probs = self._top(logits, k)
        return Scored(self._ids[ids], log_probs)

    def _top(self, logits: Tensor, k: int) -> tuple[NDArray[np.int32], Floats]:
        if logits.device.type == "cpu" and layers_available():
            ids, log_probs = top_log_probs(logits, k, self._num_threads)
        else:
            log_probs, ids = logits.float().log_softmax(-1).topk(min(k, logits.shape[1]))
        return ids.cpu().numpy(), log_probs.cpu().numpy()

    def is_plain(self, request: Request) -> bool:
        """Nothing reorders this request's tokens, here or deeper."""
        if self.sampling == "sampled":
            return False
        return (self.sampling == "greedy" or request.sampling_params.greedy) and not needs_edit(NodeRow(request, (), 0))

    def is_noise_only(self, request: Request) -> bool:
        """The target's noise is all that reorders this request's tokens."""
        params = request.sampling_params
        truncated = params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0
        is_coupled = self.sampling == "coupled" and not params.greedy
        return is_coupled and not truncated and not needs_edit(NodeRow(request, (), 0))

    @staticmethod
    def noise_key(request: Request, depth: int) -> int:
        """The name of what the target will add to its scores there."""
        return noise_key(request.seed, request.num_tokens + depth, Purpose.SAMPLE)

    def noise(self, request: Request, depth: int) -> Floats:
        """What the target will add to its scores there: [draft vocab]"""
        key = self.noise_key(request, depth)
        if noise_available():
            return keyed_gumbel(key, self.id_constants)
        noise: Floats = gumbel(keyed_uniform(key, self._vocab_size, self._ids)).astype(np.float32)
        return noise

    def _scores(self, request: Request, depth: int, values: FloatRow, noise: dict[tuple[str, int], Floats]) -> FloatRow:
        """The row's logits after its request's options and, where coupled, with the target's noise: [draft vocab]"""
        row = node_row(request, depth)
        if needs_edit(row):
            wide = np.full(self._vocab_size, -np.inf, dtype=np.float32)
            wide[self._ids] = values
            values = edit_logits(row, wide)[self._ids]
        params = request.sampling_params
        if params.greedy or self.sampling == "greedy":
            return np.maximum(values, np.float32(LOWEST))
        out = np.full(len(values), LOWEST, dtype=np.float32)
        try:
            ids, scores = shortlist(values, params)
        except RequestFailedError:  # nothing is left of the draft vocabulary
            return out
        key = (request.request_id, depth)
        if key not in noise:
            noise[key] = self.noise(request, depth)
        chosen = slice(None) if ids is None else ids
        out[chosen] = np.maximum(scores + noise[key][chosen], np.float32(LOWEST))
        return out

    def _sample(self, rows: Sequence[tuple[Request, int]], logits: Tensor) -> Scored:
        values = np.full((len(rows), self._vocab_size), -np.inf, dtype=np.float32)
        values[:, self._ids] = host_copy(logits)
        wide = torch.from_numpy(values)
        nodes = [NodeRow(request, node_row(request, depth).draft_ids, i) for i, (request, depth) in enumerate(rows)]
        drawn = draft_tokens(nodes, wide, "sampled", draws=[depth for _, depth in rows])
        token_ids = np.array([d.token_ids[:1] or [0] for d in drawn], dtype=np.int64)
        log_probs = np.array([[0.0 if d.token_ids else LOWEST] for d in drawn], dtype=np.float32)
        return Scored(token_ids, log_probs, [torch.empty(0) if d.probs is None else d.probs[0] for d in drawn])


def node_row(request: Request, depth: int) -> NodeRow:
    """A row `depth` draft tokens below the root. Which tokens hardly matters to a draft; how many does."""
    return NodeRow(request, (request.token_ids[-1],) * depth, 0)


def host_copy(logits: Tensor) -> Floats:
    """Float32 on the CPU, made by numpy: PyTorch would start threads, and the native ones keep their cores busy."""
    copy: Floats = np.array(logits.cpu().float().numpy())
    return copy
