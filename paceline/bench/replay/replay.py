"""Judge any drafting method offline: play a recording as if the engine were running, without a model.

The target's answers are known, so verifying a tree is walking it along the recorded tokens. Requests join and leave as
they would in a closed loop of `concurrency` users; drafters see the same tokens, in the same order, in the same steps
as in a live run. A clock that adds the measured cost of each pass gives the expected speed as well.

One thing is not in a recording: what the target would say after a node that was never verified. Drafters that learn
from logits (token recycling) are shown, for a rejected node, the best guess that the recording holds (opinions.py).
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.bench.replay.opinions import Opinions
from paceline.bench.replay.recorded_drafter import DraftPrice, PricedDrafter, RecordedDrafter
from paceline.bench.replay.recording import Recorded, rejected_paths
from paceline.core.draft_counts import DraftCounts
from paceline.core.request import Request, RequestStatus
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import DraftTree
from paceline.errors import InvalidOptionError, PacelineError
from paceline.lab.pass_cost import FREE, PassCost
from paceline.spec.engine_parts import EngineParts
from paceline.spec.proposer import Proposer, RequestPass, StepContext
from paceline.spec.speculator import Speculator

REPLAYED_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of the curve that a method is told


@dataclass(slots=True)
class ReplayResult:
    counts: DraftCounts = field(default_factory=DraftCounts)
    num_passes: int = 0  # of the batch
    pass_s: float = 0.0  # by the given pass cost
    draft_s: float = 0.0  # really spent drafting
    plain_s: float = 0.0  # plain decoding of the same tokens, by the given pass cost

    @property
    def speedup(self) -> float:
        """Over plain decoding, drafting time included."""
        return self.plain_s / (self.pass_s + self.draft_s)


class Replay:
    """A closed loop of `concurrency` users over a recording, for one speculative configuration."""

    def __init__(
        self,
        recorded: Sequence[Recorded],
        speculative_config: Mapping[str, Any] | None,
        *,
        concurrency: int = 1,
        pass_cost: PassCost = FREE,
        on_draft: Callable[[DraftTree, Sequence[int]], None] = lambda tree, future: None,  # and what it could have held
        draft_prices: Mapping[str, DraftPrice] | None = None,  # of methods, instead of the time they take here
        counts_host_time: bool = True,  # False: what really runs here takes no time, so that every replay is the same
    ) -> None:
        if not recorded or concurrency < 1:
            raise InvalidOptionError(
                f"a replay needs a recording and 1 user or more, got {len(recorded)}, {concurrency}"
            )
        self.result = ReplayResult()
        self._recorded = {f"replay-{i}": one for i, one in enumerate(recorded)}
        self._waiting = iter(self._recorded.items())
        self._opinions = Opinions(self._recorded)
        self._concurrency = concurrency
        self._pass_cost = pass_cost
        self._on_draft = on_draft
        self._virtual_s = self._drafters_s = 0.0  # of passes and recorded drafters; of the latter alone
        self._host_clock = time.thread_time if counts_host_time else lambda: 0.0
        self._running: list[Request] = []
        longest = max(len(one.prompt_token_ids) + len(one.output_token_ids) for one in recorded)
        stand_ins = {method: self._stand_in(method, price) for method, price in (draft_prices or {}).items()}
        services = EngineParts(
            vocab_size=recorded[0].vocab_size,
            max_model_len=longest + 1,
            stand_ins=stand_ins,
            pass_cost={rows: pass_cost(rows) for rows in REPLAYED_ROWS},  # a live engine measures it before it starts
        )
        try:
            self.speculator = Speculator(speculative_config, services)
        except (PacelineError, AssertionError, AttributeError) as error:
            raise InvalidOptionError(f"{speculative_config} cannot be replayed without its model: {error}") from error
        self.speculator.use_clock(self._clock)

    def run(self) -> ReplayResult:
        for _ in self.steps():
            pass
        return self.result

    def steps(self) -> Iterator[int]:
        """Step by step; yields the tokens that each pass emitted."""
        self._admit()
        while self._running:
            yield self._step()

    def _clock(self) -> float:
        """This thread's own time for what really runs here, plus the passes that do not."""
        return self._host_clock() + self._virtual_s

    def _spend(self, seconds: float) -> None:
        """What a recorded drafter would have taken."""
        self._virtual_s += seconds
        self._drafters_s += seconds

    def _stand_in(self, method: str, price: DraftPrice) -> Callable[[Callable[[], Any]], Proposer]:
        """What the recording says it drafts or, where it says nothing, the method itself."""
        if any(method in one.drafted for one in self._recorded.values()):
            return lambda build: RecordedDrafter(method, self._recorded, price, self._spend)
        return lambda build: PricedDrafter(build(), price, self._spend)

    def _admit(self) -> list[Request]:
        free = self._concurrency - len(self._running)
        new = [_request(name, one) for name, one in itertools.islice(self._waiting, free)]
        self._running += new
        return new

    def _step(self) -> int:
        decoding = list(self._running)
        passes, gone, num_tokens, rows = [], [], 0, 0
        logits: list[list[int]] = []
        for request in decoding:
            verified = self._verify(request, rows, logits)
            rows += 1 + len(request.draft)
            num_tokens += len(verified.new_token_ids)
            passes.append(verified)
            if request.finished:
                self._running.remove(request)
                gone.append(request)
        seconds = self._pass_cost(rows)
        self._virtual_s += seconds
        self.result.pass_s += seconds
        self.result.num_passes += 1
        self.result.plain_s += self._pass_cost(len(decoding)) * num_tokens / len(decoding)
        self._admit()
        ready = [request for request in decoding if not request.finished]
        dense = self._dense(logits) if self.speculator.needs.logits else None
        step = StepContext(ready, passes, gone, dense, None)
        begin_s = self._host_clock() + self._drafters_s
        self.speculator.observe(step)
        for request, tree in zip(ready, self.speculator.propose(step), strict=True):
            request.draft = tree
        self.result.draft_s += self._host_clock() + self._drafters_s - begin_s
        return num_tokens

    def _verify(self, request: Request, first_row: int, logits: list[list[int]]) -> RequestPass:
        """Walk the draft along the recorded tokens; `logits` gets the likeliest tokens of each row on the path."""
        truth, tree = self._recorded[request.request_id], request.draft
        position = request.num_output_tokens
        future = truth.output_token_ids[position:]
        accepted = _walk(tree, future[:-1])
        self._on_draft(tree, future[:-1])
        new = future[: len(accepted) + 1]
        verified = RequestPass(request, range(first_row, first_row + 1 + len(tree)), request.num_tokens - 1, 1)
        verified.counts = DraftCounts.of_pass(tree, accepted, len(new))
        self.result.counts.add(verified.counts)
        verified.logits_row = len(logits)
        logits.append(truth.top_token_ids[position])
        self._show(verified, tree, accepted, position, logits)
        request.token_ids += new
        verified.new_token_ids = new
        if len(new) == len(future):
            request.status, request.finish_reason = RequestStatus.FINISHED, "length"
        return verified

    def _show(
        self, verified: RequestPass, tree: DraftTree, accepted: list[int], position: int, logits: list[list[int]]
    ) -> None:
        """What the drafters get to see of the tree: all of it, or where they read logits the nodes that have some."""
        if not self.speculator.needs.logits:
            verified.draft, verified.accepted = tree, accepted
            return
        name = verified.request.request_id
        truth = self._recorded[name]
        shown: list[int] = []
        for node, (at, path) in enumerate(rejected_paths(tree, accepted, position)):
            if tree.parents[node] >= 0 and tree.parents[node] not in shown:
                continue
            top = self._opinions.after(name, at, path) if path else truth.top_token_ids[at]
            if top is not None:
                shown.append(node)
                logits.append(top)
        verified.draft = tree.keep(shown)
        verified.accepted = [shown.index(node) for node in accepted]

    def _dense(self, top_token_ids: Sequence[Sequence[int]]) -> Tensor:  # [rows, vocab]
        vocab_size = next(iter(self._recorded.values())).vocab_size
        logits = torch.full((len(top_token_ids), vocab_size), -1e4)
        for row, tokens in enumerate(top_token_ids):
            logits[row, tokens] = -torch.arange(len(tokens), dtype=torch.float32)
        return logits


def _request(name: str, one: Recorded) -> Request:
    request = Request(
        name,
        list(one.prompt_token_ids),
        SamplingParams(temperature=one.temperature, max_tokens=len(one.output_token_ids)),
        max_tokens=len(one.output_token_ids),
        seed=0,
    )
    request.status = RequestStatus.RUNNING
    return request


def _walk(tree: DraftTree, future: Sequence[int]) -> list[int]:
    """Accepted nodes, top first."""
    children = tree.children()
    path: list[int] = []
    at = -1
    for token in future:
        child = children[at].get(token)
        if child is None:
            break
        path.append(child)
        at = child
    return path
