"""What fails for one request ends that request; what fails in a drafter or an observer ends none."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.core.bad_words import BadWords
from paceline.core.outputs import VerifyResult
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.engine import verify_apart
from paceline.engine.core import EngineCore
from paceline.errors import InvalidOptionError, InvalidRequestError, NothingToSampleError, RequestFailedError
from paceline.spec.drafter_faults import MOST_FAILED_STEPS
from paceline.spec.proposer import Budget, Needs, Proposer, StepContext
from paceline.verifiers import walk
from tests.bench.toy_llm import toy_model
from tests.toy import EOS, VOCAB, ToyTokenizer, run_all, toy_core, toy_request

POISON = 7  # a token that the decoder below cannot decode, and that the victim always emits
NEIGHBOUR_TOKENS = [token for token in range(EOS) if token != POISON]
PROMPTS = [[1, 2, 3], [4, 5], [9, 8, 6, 5, 4, 3, 2, 1, 0, 11], [13]]


class Panic(BaseException):
    """What a library written in Rust raises when it panics: no `Exception`."""


class RaisingDecoder(ToyTokenizer):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if POISON in token_ids:
            raise Panic("poison")
        return super().decode(token_ids, skip_special_tokens)


def neighbours(**options: object) -> list[Request]:
    options = {"allowed_token_ids": NEIGHBOUR_TOKENS, "temperature": 1.0} | options
    return [toy_request(f"neighbour{i}", prompt, 12, i, **options) for i, prompt in enumerate(PROMPTS)]


TRUTH = [run_all(toy_core(), [request])[0] for request in neighbours()]


def run_beside(core: EngineCore, victim: Request) -> None:
    """The victim in the middle of neighbours, all in one batch; each neighbour has the output it has alone."""
    batch = neighbours()
    run_all(core, [*batch[:2], victim, *batch[2:]])
    assert [request.output_token_ids for request in batch] == TRUTH
    assert all(request.error is None for request in batch)


def raising(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    raise KeyError("no such state")


def raising_later(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    if len(token_ids) > 6:
        raise Panic("later")
    return logits


DRAFTERS: list[dict[str, object] | None] = [
    None,
    {"method": "ngram", "num_speculative_tokens": 3},
    {"method": "layer_skip", "draft_layers": [0], "tree_widths": [2, 2, 1]},  # writes KV past the last token
]


@pytest.mark.parametrize("speculative", DRAFTERS, ids=str)
@pytest.mark.parametrize("processor", [raising, raising_later])
def test_a_raising_processor_ends_its_own_request(processor: Any, speculative: dict[str, object] | None) -> None:
    victim = toy_request("victim", [1, 2, 3], logits_processors=[processor], ignore_eos=True)
    run_beside(toy_core(speculative), victim)
    assert victim.finish_reason == "error" and isinstance(victim.error, RequestFailedError)


@pytest.mark.parametrize("speculative", DRAFTERS, ids=str)
@pytest.mark.parametrize("prompt", [[1, 2], [1, POISON]], ids=str)
def test_a_raising_decoder_ends_its_own_request(prompt: list[int], speculative: dict[str, object] | None) -> None:
    core = toy_core(speculative)
    core._text_decoder = RaisingDecoder()
    victim = toy_request("victim", prompt, allowed_token_ids=[1, POISON], min_tokens=8)
    run_beside(core, victim)
    assert victim.finish_reason == "error" and isinstance(victim.error, RequestFailedError)
    assert len(victim.token_sources) == victim.num_output_tokens


def test_a_decoder_that_raises_at_the_end_ends_its_own_request() -> None:
    class RaisingAtTheEnd(ToyTokenizer):
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            if POISON in token_ids and len(token_ids) > 1:
                raise ValueError("poison")
            return "" if POISON in token_ids else super().decode(token_ids, skip_special_tokens)

    core = toy_core()
    core._text_decoder = RaisingAtTheEnd()
    victim = toy_request("victim", [1], 1, allowed_token_ids=[POISON])
    run_beside(core, victim)
    assert victim.finish_reason == "error"


@pytest.mark.faults
@pytest.mark.parametrize("option", ["logprobs", "prompt_logprobs"])
def test_raising_logprobs_end_their_own_request(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (walk, verify_apart):
        original = module.token_logprobs

        def token_logprobs(logits: Any, ids: Any, num_top: int, original: Any = original) -> Any:
            if num_top == 99:
                raise RuntimeError("no log-probabilities")
            return original(logits, ids, num_top)

        monkeypatch.setattr(module, "token_logprobs", token_logprobs)
    for chunk in (8, 64):
        victim = toy_request("victim", list(range(20)), **{option: 99})
        setattr(victim, option, [None] if option == "prompt_logprobs" else [])
        run_beside(toy_core(max_num_batched_tokens=chunk), victim)
        assert victim.finish_reason == "error" and isinstance(victim.error, RequestFailedError)


class PickyVerifier:
    """Raises for a whole batch when a condition holds for one of its requests."""

    name, lossless, takes_tokens = "picky", True, False

    def __init__(self, inner: Any, refuses: Callable[[Request, DraftTree], bool]) -> None:
        self.inner, self.refuses = inner, refuses

    def verify(self, requests: Any, drafts: Any, logits: torch.Tensor) -> list[VerifyResult]:
        if any(map(self.refuses, requests, drafts)):
            raise IndexError("one of this batch")
        results: list[VerifyResult] = self.inner.verify(requests, drafts, logits)
        return results


@pytest.mark.faults
def test_a_batch_that_cannot_be_verified_is_verified_one_by_one() -> None:
    core = toy_core(DRAFTERS[1])
    core.verifier = core.launcher.verifier = PickyVerifier(
        core.verifier, lambda request, draft: request.request_id == "victim"
    )
    victim = toy_request("victim", [1, 2, 3])
    run_beside(core, victim)
    assert victim.finish_reason == "error" and victim.output_token_ids == []


@pytest.mark.faults
def test_a_draft_that_cannot_be_verified_costs_the_draft_and_not_the_request() -> None:
    options: dict[str, object] = {"ignore_eos": True, "allowed_token_ids": [1, 2]}  # it repeats itself: drafts come
    (truth,) = run_all(toy_core(), [toy_request("plain", [1, 2] * 4, 12, **options)])
    core = toy_core(DRAFTERS[1])
    refused: list[DraftTree] = []

    def refuses(request: Request, draft: DraftTree) -> bool:
        if request.request_id == "victim" and draft:
            refused.append(draft)
        return request.request_id == "victim" and bool(draft)

    core.verifier = core.launcher.verifier = PickyVerifier(core.verifier, refuses)
    victim = toy_request("victim", [1, 2] * 4, 12, **options)
    run_beside(core, victim)
    assert refused and victim.error is None and victim.output_token_ids == truth


class BrokenDrafter(Proposer):
    def __init__(self, breaks: str, every: int = 1) -> None:
        self.breaks, self.every = breaks, every  # every time, or every second time, ...
        self.num_asked = 0

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        if self.breaks == "needs":
            raise Panic("needs")
        return Needs()

    def skips_next_step(self) -> bool:
        if self.breaks == "skips_next_step":
            raise ValueError("skips_next_step")
        return self.breaks == "skip_step"

    def skip_step(self) -> None:
        raise ValueError("skip_step")

    def observe(self, step: StepContext) -> None:
        if self.breaks == "observe":
            raise ValueError("observe")

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        self.num_asked += 1
        if self.num_asked % self.every:
            return [DraftTree()] * len(budgets)
        trees = {
            "token": DraftTree([VOCAB], [-1]),
            "parent": DraftTree([1], [4]),
            "size": DraftTree.chain([1] * 100),
            "members": DraftTree([1], [-1], members=[]),
            "names": DraftTree([1], [-1], members=["a+b"]),  # type: ignore[list-item]
            "probs": DraftTree([1], [-1], draft_probs=torch.zeros(3, VOCAB)),
        }
        if self.breaks == "propose":
            raise MemoryError("propose")
        if self.breaks == "count":
            return [DraftTree()]
        if self.breaks == "none":
            return None  # type: ignore[return-value]
        return [trees.get(self.breaks, DraftTree())] * len(budgets)


BREAKS = ["needs", "observe", "propose", "token", "parent", "size", "members", "names", "probs", "count", "none"]


@pytest.mark.faults
@pytest.mark.parametrize("breaks", [*BREAKS, "skips_next_step", "skip_step"])
def test_a_broken_drafter_ends_nothing_and_is_switched_off(breaks: str, caplog: pytest.LogCaptureFixture) -> None:
    core = toy_core({"method": "ngram"})
    drafter = BrokenDrafter(breaks)
    core.speculator._proposers["ngram"] = drafter
    with caplog.at_level(logging.ERROR, "paceline"):
        batch = neighbours()
        assert run_all(core, batch) == TRUTH
    messages = [record.getMessage() for record in caplog.records if record.exc_info]
    assert len(messages) == 1, "the traceback is logged once"
    assert sum("switched off" in record.getMessage() for record in caplog.records) == 1
    figures = core.speculator.stats()["ngram"]
    assert figures["num_failures"] >= MOST_FAILED_STEPS and figures["is_off"]
    asked = drafter.num_asked
    assert run_all(core, neighbours()) == TRUTH and drafter.num_asked == asked


@pytest.mark.faults
def test_a_drafter_that_fails_now_and_then_stays_on() -> None:
    core = toy_core({"method": "ngram"})
    core.speculator._proposers["ngram"] = BrokenDrafter("propose", every=2)
    for _ in range(4):
        assert run_all(core, neighbours()) == TRUTH
    figures = core.speculator.stats()["ngram"]
    assert figures["num_failures"] > MOST_FAILED_STEPS and not figures["is_off"]


@pytest.mark.faults
@pytest.mark.parametrize("method", ["merge", "auto"])
@pytest.mark.parametrize("breaks", ["observe", "propose", "none"])
def test_a_broken_member_costs_only_its_own_drafts(method: str, breaks: str) -> None:
    options: dict[str, object] = {"ignore_eos": True, "allowed_token_ids": [1, 2]}  # it repeats itself: drafts come
    prompt = [1, 2] * 6
    (truth,) = run_all(toy_core(), [toy_request("plain", prompt, 60, **options)])
    core = toy_core({"method": method, "members": ["ngram", "suffix"]})
    proposer: Any = core.speculator.proposers[method]
    merged = proposer.drafters if method == "auto" else proposer
    merged.members["ngram"] = BrokenDrafter(breaks)
    request = toy_request("a", prompt, 60, **options)
    assert run_all(core, [request]) == [truth]
    figures = core.speculator.stats()[method]
    assert "num_failures" not in figures and figures["by_member"]["ngram"]["num_failures"] > 0
    assert method == "auto" or "suffix" in request.token_sources  # auto may find that drafting does not pay here


def test_a_drafter_that_cannot_check_a_request_refuses_that_request() -> None:
    class Checking(BrokenDrafter):
        def check_params(self, params: SamplingParams) -> None:
            raise ZeroDivisionError if params.top_k == 3 else InvalidOptionError("top_k")

    core = toy_core({"method": "ngram"})
    core.speculator._proposers["ngram"] = Checking("")
    with pytest.raises(RequestFailedError, match="ZeroDivisionError"):
        core.speculator.check_request(SamplingParams(top_k=3))
    with pytest.raises(InvalidOptionError, match="top_k"):
        core.speculator.check_request(SamplingParams())


@pytest.mark.faults
def test_a_raising_observer_is_dropped_and_the_others_are_told() -> None:
    core = toy_core()
    told: list[int] = []

    def broken(step: StepContext) -> None:
        raise KeyError("records")

    core.observers += [broken, lambda step: told.append(len(step.passes))]
    assert run_all(core, neighbours()) == TRUTH
    assert len(core.observers) == 1 and len(told) == core.clock.num_steps


def test_a_bad_word_that_bans_the_last_token_ends_only_its_own_request() -> None:
    victim = toy_request("victim", [5], allowed_token_ids=[3, 4], ignore_eos=True)
    victim.bad_words = BadWords([(3, 3), (3, 4), (4, 3), (4, 4)])
    run_beside(toy_core(), victim)
    assert isinstance(victim.error, NothingToSampleError) and victim.num_output_tokens == 1


def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    core = toy_core()
    batch = neighbours()
    for request in batch:
        core.add_request(request)
    with pytest.raises(InvalidRequestError, match="'neighbour1' is in use"):
        core.add_request(toy_request("neighbour1", [1]))
    core.check_integrity()
    while core.has_requests:
        core.step()
        core.check_integrity()
    assert [request.output_token_ids for request in batch] == TRUTH


def test_a_model_that_raises_ends_the_call_and_the_next_one_is_served() -> None:
    model = toy_model()
    llm = LLM(model, {"method": "ngram", "node_budget": 4}, num_kv_blocks=16, block_size=16)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    (before,) = llm.generate([[1, 2, 3]], params)
    forward = model.decoder.forward

    def broken(*args: object, **options: object) -> object:
        raise RuntimeError("the kernel failed")

    model.decoder.forward = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="the kernel failed"):
        llm.generate([[1, 2, 3], [4]], params)
    llm.engine.core.check_integrity()
    assert not llm.engine.core.has_requests and llm.engine.core.kv.usage == 0.0
    model.decoder.forward = forward  # type: ignore[method-assign]
    assert llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids == before.outputs[0].token_ids
