"""An engine that costs nothing: bytes are tokens, the output is a function of (prompt, seed, position).

So every stream's right text is known without a model, a mixed-up stream cannot go unnoticed, and failures come on
demand. It keeps the contract of `ServedEngine` that the server relies on: deltas, an abort when the iterator closes.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from paceline.core.draft_counts import DraftCounts
from paceline.core.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from paceline.core.sampling_params import SamplingParams
from paceline.core.step_record import Load, PassRecord, StepObserver, StepRecord
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.errors import EngineDeadError, InvalidOptionError, RequestFailedError

EOS = 256
ALPHABET = "abcdefghijklmnopqrstuvwxyz ABCDEF.,0123456789"

SAY = re.compile("SAY«(.*?)»", re.DOTALL)  # in a prompt: the text that it shall be answered with


class ByteTokenizer:
    chat_template: str | None = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"

    def vocabulary(self) -> dict[str, int]:
        return {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(t for t in token_ids if t < EOS).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def info(self) -> dict[str, Any]:
        names = ("chat_template", "bos_token", "eos_token", "pad_token", "unk_token")
        return {"tokenizer_class": "bytes", "vocab_size": 257, **dict.fromkeys(names)}

    def chat_token_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Any = None,
        **options: Any,
    ) -> list[int]:
        assert tools is None, "the template takes no tools"
        text = "".join(f"<{m['role']}>{m['content']}\n" for m in messages)
        return self.encode(text + ("<assistant>" if add_generation_prompt else ""))


def expected_text(prompt: Sequence[int], seed: int | None, sample: int, length: int) -> str:
    digest = hashlib.sha256(repr((list(prompt), seed, sample)).encode()).digest()
    return "".join(ALPHABET[(digest[i % 32] + i * 7) % len(ALPHABET)] for i in range(length))


class FakeBackend:
    """`DRAFT` tokens a step where speculation is on, one where it is off."""

    DRAFT = 2
    vocab_size = 257
    methods = ("ngram", "prediction")
    cache_config: Mapping[str, str] = {"block_size": "16"}

    def __init__(self, step_s: float = 0.0, max_num_seqs: int = 8, max_model_len: int = 4096) -> None:
        self.step_s = step_s
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.tokenizer = ByteTokenizer()
        self.default_sampling: dict[str, Any] = {}
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.params: list[SamplingParams] = []  # of every request, as the server asked
        self.salts: list[str] = []  # likewise
        self.prompts: list[str] = []  # likewise
        self.dead = False
        self._observers: list[StepObserver] = []

    def method_of(self, params: SamplingParams) -> str:
        return _method(params)

    def cluster(self) -> None:
        return None

    def load(self) -> Load:
        return Load(len(self.running), 0, len(self.running) / 100)

    def speculation_stats(self) -> dict[str, Any]:
        counts = {
            "num_draft_tokens": 4,
            "num_accepted_tokens": 3,
            "num_wasted_tokens": 1,
            "accepted_per_position": [2, 1],
        }
        method = {
            "num_steps": 5,
            "num_emitted_tokens": 8,
            "num_drafts": 2,
            "draft_s": 0.25,
            "mean_acceptance_length": 1.6,
        }
        member = {"asked": True, "state": "cheap", "num_asked": 9, "seconds": 0.002}
        member |= {
            "gain_tokens": 0.9,
            "price_tokens": 0.2,
            "decided": "on: gain > price",
            "reason": "a: on, 0.90 > 0.20",
        }
        decisions = {
            "reasons": {"pays": 3, "too_expensive": 1},
            "drafted_nodes": 9,
            "offered_nodes": 4,
            "members": {"a": member},
            "own_s": 0.001,
            "last_decision": "2 nodes for 1 request",
        }
        return {"ngram": counts | method | {"by_member": {"a": counts}, "decisions": decisions}}

    def watch(self, observer: StepObserver) -> None:
        self._observers.append(observer)

    def when_dead(self, callback: Callable[[Exception], None]) -> None:
        self._on_death = callback

    def die(self) -> None:
        self.dead = True
        self._on_death(EngineDeadError("the model gave nonsense"))

    def shutdown(self) -> None:
        self.dead = True

    def check_integrity(self) -> None:
        assert not self.running

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str, cache_salt: str
    ) -> AsyncIterator[RequestOutput]:
        prompt_text = self.tokenizer.decode(token_ids)
        method = _method(params)
        if self.dead:
            raise EngineDeadError("the engine was shut down")
        self.params.append(params)
        self.salts.append(cache_salt)
        self.prompts.append(prompt_text)
        self.running.add(request_id)
        finished = False
        try:
            assert params.max_tokens is not None
            texts = [expected_text(token_ids, params.seed, i, params.max_tokens) for i in range(params.n)]
            limit, end = params.max_tokens, "length"
            if said := SAY.findall(prompt_text):
                texts = [said[-1][:limit]] * params.n
                limit, end = len(texts[0]), "length" if len(said[-1]) > limit else "stop"
            num_steps, done = 0, 0
            told = [CompletionOutput(i, "", []) for i in range(params.n)]  # the states so far
            sources: list[str] = []
            while done < limit and not finished:
                await asyncio.sleep(self.step_s)
                if "FAIL" in prompt_text and done >= 3:
                    raise RequestFailedError("the logits were not finite: nothing could be sampled")
                if "CRASH" in prompt_text and done >= 3:
                    raise ZeroDivisionError("secret detail")
                before, num_steps = done, num_steps + 1
                done = min(limit, done + (self.DRAFT + 1 if method != "none" else 1))
                self._report(request_id, params, texts, before, done, method, cache_salt)
                sources += [*["draft"] * (done - before - 1), "recovered"] if method != "none" else ["target"]
                full = end if done == limit else None
                outputs = [_completion(i, text[:done], params, full, sources) for i, text in enumerate(texts)]
                finished = all(output.finish_reason for output in outputs)
                metrics = _metrics(token_ids, outputs, num_steps, method) if finished else None
                prompt_logprobs = None
                if params.prompt_logprobs is not None:
                    prompt_logprobs = [None, *(TokenLogprobs(t, -1.0, 1, {t: -1.0}) for t in token_ids[1:])]
                deltas = [_delta(a, b) for a, b in zip(told, outputs, strict=True) if a.finish_reason is None]
                told = outputs
                yield RequestOutput(request_id, None, list(token_ids), deltas, finished, metrics, prompt_logprobs)
        finally:
            self.running.discard(request_id)
            if not finished:
                self.aborted.append(request_id)

    def _report(
        self, request_id: str, params: SamplingParams, texts: list[str], before: int, done: int, method: str, salt: str
    ) -> None:
        for i, text in enumerate(texts):
            new = list(text[before:done].encode())
            draft = EMPTY_TREE if method == "none" else DraftTree.chain([*new[: self.DRAFT], 0]).by(method)
            accepted = [] if method == "none" else list(range(len(new) - 1))
            name = request_id if params.n == 1 else f"{request_id}-{i}"
            record = PassRecord(name, method, 1 + len(draft), 0, draft, accepted, new, salt)
            record.counts.count(draft, accepted, len(new))
            for observer in self._observers:
                observer(StepRecord([record], 0.001))


def _method(params: SamplingParams) -> str:
    given = params.speculative or {}
    unknown = set(given) - {"off", "method", "num_speculative_tokens", "node_budget", "prediction"}
    if unknown:
        raise InvalidOptionError(f"unknown key {sorted(unknown)[0]!r} in SamplingParams.speculative")
    if given.get("off"):
        return "none"
    return "prediction" if "prediction" in given else "ngram"


def _completion(
    index: int, text: str, params: SamplingParams, full: str | None, sources: Sequence[str]
) -> CompletionOutput:
    stops = [(text.find(stop), stop) for stop in params.stop_strings if stop in text]
    token_ids = list(text.encode())
    logprobs = None
    finish: str | None = full
    reason: str | None = None
    if not stops and not full:  # hold back what a stop string may still take back, as the engine does
        text = text[: len(text) - max((len(stop) - 1 for stop in params.stop_strings), default=0)]
    if stops:
        at, stop = min(stops)
        text, token_ids, finish, reason = text[:at], token_ids[: at + len(stop)], "stop", stop
    if params.logprobs is not None:
        top = range(params.logprobs)
        logprobs = [TokenLogprobs(t, -0.5, 1, {(t + k) % 256: -0.5 - k for k in top}) for t in token_ids]
    return CompletionOutput(index, text, token_ids, finish, reason, logprobs, list(sources[: len(token_ids)]))


def _delta(before: CompletionOutput, now: CompletionOutput) -> CompletionOutput:
    known = len(before.token_ids)
    return CompletionOutput(
        now.index,
        now.text[len(before.text) :],
        now.token_ids[known:],
        now.finish_reason,
        now.stop_reason,
        None if now.token_logprobs is None else now.token_logprobs[known:],
        now.token_sources[known:],
    )


def _metrics(prompt: Sequence[int], outputs: Sequence[CompletionOutput], num_steps: int, method: str) -> RequestMetrics:
    num_tokens = sum(len(output.token_ids) for output in outputs)
    num_steps *= len(outputs)
    drafts = 0 if method == "none" else num_steps
    accepted = num_tokens - num_steps
    per_position = [drafts, accepted - drafts] if drafts else []
    counts = DraftCounts(3 * drafts, accepted, per_position, drafts, num_steps, num_tokens)
    return RequestMetrics(len(prompt), 0, counts, queue_s=0.0, ttft_s=0.001, tpot_s=0.001, e2e_s=0.01)
