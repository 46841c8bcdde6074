"""Our drafters inside vLLM: the class that its `custom_class` method loads, and asks after every pass.

    vllm serve MODEL \\
        --speculative-config '{"method": "custom_class", "model": "paceline.vllm_proposer.Proposer",
                               "num_speculative_tokens": 8}' \\
        --additional-config '{"paceline": {"method": "merge", "members": ["ngram", "suffix"]}}'

Without `additional_config` it drafts with `suffix`. vLLM verifies chains, so of each tree it gets the path that is
expected to have most tokens accepted. It shows a custom drafter tokens and nothing else: no logits, no hidden states
and no request ids (`BatchRows`). Written for vLLM 0.32, which calls this interface experimental. Nothing here imports
vLLM.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.draft_counts import DraftCounts
from paceline.core.request import Request, RequestStatus
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE
from paceline.errors import InvalidOptionError
from paceline.spec.config.rule_options import RULE_KEYS
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.engine_parts import EngineParts
from paceline.spec.proposer import RequestPass, StepContext
from paceline.spec.speculator import Speculator

KEY = "paceline"  # of vLLM's additional_config
MEMBERS = ("ngram", "suffix")  # methods that need only tokens
METHODS = (*MEMBERS, "merge")
VLLMS_OWN = ("num_speculative_tokens", "rejection_sample_method", *RULE_KEYS)
# Of the tree that a chain is chosen from, for each token of the chain. Replayed on 60 prompts of Spec-Bench, suffix, 4
# tokens: 1.643 tokens per pass at 1, 1.660 at 2, 1.662 at 4 and at 8.
NODES_PER_TOKEN = 4
PARAMS = SamplingParams()  # drafters of tokens read none of it


class Proposer:
    def __init__(self, vllm_config: Any) -> None:
        max_model_len = int(vllm_config.model_config.max_model_len)
        services = EngineParts(int(vllm_config.model_config.get_vocab_size()), max_model_len)
        self.speculator = Speculator(configuration(vllm_config), services)
        self._rows = BatchRows(max_model_len)

    def load_model(self, target: object) -> None:
        """vLLM on a CPU asks every drafter to load its model: these have none."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,  # where the target writes its KV: nothing that these drafters need
    ) -> list[list[int]]:
        """For each row of the batch the tokens to verify in the next pass."""
        requests, gone = self._rows.advance(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        passes = [_verified(request, sampled_token_ids[row]) for row, request in requests.items()]
        step = StepContext(list(requests.values()), passes, gone)
        self.speculator.observe(step)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for (row, request), tree in zip(requests.items(), self.speculator.propose(step), strict=True):
            request.draft = tree.likeliest_path()
            drafts[row] = request.draft.token_ids
        return drafts


def _verified(request: Request, new_token_ids: Sequence[int]) -> RequestPass:
    """What became of the request's draft: vLLM says only which tokens came out."""
    draft, request.draft = request.draft, EMPTY_TREE
    accepted = range(min(len(draft), len(new_token_ids) - 1))
    return RequestPass(
        request,
        rows=range(1 + len(draft)),
        start=request.num_tokens - len(new_token_ids) - 1,
        num_committed=1,
        draft=draft,
        accepted=accepted,
        new_token_ids=new_token_ids,
        logits_row=0,
        counts=DraftCounts.of_pass(draft, accepted, len(new_token_ids)),
    )


@dataclass(slots=True, eq=False)
class Followed:
    request: Request
    token_ids: NDArray[np.int32]  # as of the last step: those of the request, in a form that is compared quickly


class BatchRows:
    """Which request stands in which row of vLLM's batch, known by its tokens alone.

    Row by row vLLM gives all tokens so far and says which of them are new. Rows move when requests end. A row goes on
    with the request that had exactly the tokens before the new ones, wherever it stood in the last step. A row that
    goes on with none is a new request, and a request that no row goes on with is gone. One that was preempted comes
    back as a new one, its output so far a part of the prompt. Two requests with the same tokens may be taken for one
    another: a drafter that sees only tokens drafts the same for both.
    """

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._rows: dict[int, Followed] = {}
        self._num_requests = 0

    def advance(
        self,
        new_token_ids: Sequence[Sequence[int]],  # by row; none: the pass held a part of its prompt
        num_tokens: NDArray[np.int32],  # by row: tokens so far, new ones included
        token_ids: NDArray[np.int32],  # [rows, at least num_tokens]
    ) -> tuple[dict[int, Request], list[Request]]:
        """The requests by row, their new tokens added, and those that are gone."""
        before, self._rows = self._rows, {}
        for row, new in enumerate(new_token_ids):
            if not new:
                continue
            tokens = token_ids[row, : num_tokens[row]].copy()  # vLLM goes on writing into its own
            old = tokens[: len(tokens) - len(new)]
            followed = _take(before, row, old) or self._begin(old)
            followed.request.token_ids += new
            followed.token_ids = tokens
            self._rows[row] = followed
        gone = [followed.request for followed in before.values()]
        for request in gone:
            request.status = RequestStatus.FINISHED
        return {row: followed.request for row, followed in self._rows.items()}, gone

    def _begin(self, prompt: NDArray[np.int32]) -> Followed:
        self._num_requests += 1
        prompt_token_ids = prompt.tolist()
        room = self._max_model_len - len(prompt_token_ids)
        request = Request(str(self._num_requests), prompt_token_ids, PARAMS, max_tokens=room, seed=0)
        request.status = RequestStatus.RUNNING
        return Followed(request, prompt)


def _take(before: dict[int, Followed], row: int, token_ids: NDArray[np.int32]) -> Followed | None:
    for candidate in _this_row_first(before, row):
        known = before[candidate].token_ids
        if len(known) == len(token_ids) and np.array_equal(known, token_ids):
            return before.pop(candidate)
    return None


def _this_row_first(before: dict[int, Followed], row: int) -> Iterator[int]:
    if row in before:
        yield row
    yield from [other for other in before if other != row]


def configuration(vllm_config: Any) -> SpeculativeConfig:
    """From vLLM's `additional_config`, and the length of a draft from its own `speculative_config`."""
    additional = vllm_config.additional_config
    given = additional.get(KEY, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(given, Mapping):
        raise InvalidOptionError(f"additional_config[{KEY!r}] must be a dictionary such as {{'method': 'suffix'}}")
    for name in VLLMS_OWN:
        if name in given:
            raise InvalidOptionError(
                f"{name} is vLLM's to decide: leave it out of additional_config, and set it in speculative_config"
            )
    length = int(vllm_config.speculative_config.num_speculative_tokens)
    method = _checked(given.get("method", "suffix"), METHODS)
    defaults: dict[str, Any] = {"node_budget": NODES_PER_TOKEN * length}
    if method == "merge":
        defaults["members"] = MEMBERS
    config = SpeculativeConfig.parse(defaults | dict(given) | {"method": method, "num_speculative_tokens": length})
    assert config is not None
    for member in config.options.get("members", ()):
        _checked(member.method, MEMBERS)
    return config


def _checked(method: str, possible: Sequence[str]) -> str:
    if method not in possible:
        raise InvalidOptionError(
            f"{method!r} cannot draft inside vLLM, which shows a custom drafter only tokens: "
            f"use one of {', '.join(possible)}"
        )
    return method
