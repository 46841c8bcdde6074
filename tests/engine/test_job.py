"""Deltas: they add up to the whole state, a slow reader misses none, and none costs more than the one before it."""

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import pytest
import torch
from torch import Tensor

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.core.output_merger import OutputMerger
from paceline.core.outputs import CompletionOutput, RequestOutput, RequestOutputKind
from paceline.models.loader import LoadedModel
from paceline.spec.config.speculative_config import at_default_size
from tests.bench.toy_llm import toy_model
from tests.toy import EOS, VOCAB, ToyDecoder, ToyTokenizer

SMALL: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 16, "max_num_seqs": 8}
PROMPT = {"prompt_token_ids": [1, 2, 3]}
KINDS = RequestOutputKind
OPTIONS = (
    {"n": 1},
    {"n": 3, "temperature": 1.0},
    {"n": 2, "temperature": 1.0, "stop": ["ab", "abc", "g", "hi"], "logprobs": 2},
    {"prompt_logprobs": 1, "logprobs": 0, "ignore_eos": True},
    {"stop": ["abcdefgh"], "ignore_eos": True, "include_stop_str_in_output": True},
)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "seed": 7, "max_tokens": 60, **options})


def merge_outputs(outputs: Iterable[RequestOutput]) -> RequestOutput:
    merger = OutputMerger()
    for output in outputs:
        merger.add(output)
    return merger.output()


def same(found: RequestOutput, expected: RequestOutput) -> None:
    """All but the ids of the two calls and their times."""
    assert found.outputs == expected.outputs and found.finished and expected.finished
    assert found.prompt_logprobs == expected.prompt_logprobs
    assert found.metrics is not None and expected.metrics is not None
    assert found.metrics.num_output_tokens == expected.metrics.num_output_tokens


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("method", ["none", "ngram"])
def test_deltas_add_up_to_the_whole_state(options: dict[str, Any], method: str) -> None:
    llm = LLM(toy_model(), at_default_size({"method": method}), **SMALL)
    asked = params(**options)
    (whole,) = llm.generate(PROMPT, asked)
    states = list(llm.stream(PROMPT, asked))
    deltas = list(llm.stream(PROMPT, asked, output_kind=KINDS.DELTA))
    assert len(deltas) == len(states) > 5
    for i, state in enumerate(states):
        merged = merge_outputs(deltas[: i + 1])
        begun = [output for output in state.outputs if output.token_ids]
        assert merged.outputs == begun and merged.finished == state.finished
    same(merge_outputs(deltas), whole)
    (last,) = llm.stream(PROMPT, asked, output_kind=KINDS.FINAL_ONLY)
    same(last, whole)


def test_the_end_of_a_sample_is_in_one_delta_only() -> None:
    llm = LLM(toy_model(), {"method": "none"}, **SMALL)
    deltas = list(llm.stream(PROMPT, params(n=4, temperature=1.0, stop=["a", "b"]), output_kind=KINDS.DELTA))
    ends = [output.index for delta in deltas for output in delta.outputs if output.finish_reason is not None]
    assert sorted(ends) == [0, 1, 2, 3]
    for delta, following in itertools.pairwise(deltas):
        ended = {output.index for output in delta.outputs if output.finish_reason is not None}
        assert not ended & {output.index for output in following.outputs}


async def outputs_of(stream: AsyncIterator[RequestOutput], pause_s: float) -> list[RequestOutput]:
    outputs = []
    async for output in stream:
        outputs.append(output)
        await asyncio.sleep(pause_s)
    return outputs


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_slow_reader_misses_no_token(options: dict[str, Any]) -> None:
    asked = params(**options)
    (whole,) = LLM(toy_model(), {"method": "ngram", "node_budget": 4}, **SMALL).generate(PROMPT, asked)

    async def scenario() -> None:
        with AsyncLLM(toy_model(), {"method": "ngram", "node_budget": 4}, **SMALL) as llm:
            for pause_s in (0.0, 0.01, 0.3):
                deltas = await outputs_of(llm.generate(PROMPT, asked, output_kind=KINDS.DELTA), pause_s)
                same(merge_outputs(deltas), whole)
                if pause_s == 0.3:
                    assert len(deltas) <= 3, "what was not read yet is one delta"
                states = await outputs_of(llm.generate(PROMPT, asked), pause_s)
                same(states[-1], whole)
                lengths = [sum(len(output.token_ids) for output in state.outputs) for state in states]
                assert lengths == sorted(lengths) and all(len(state.outputs) == asked.n for state in states)
                same(*(await outputs_of(llm.generate(PROMPT, asked, output_kind=KINDS.FINAL_ONLY), pause_s)), whole)

    asyncio.run(scenario())


def test_what_was_merged_does_not_change_with_what_comes_later() -> None:
    def part(text: str, token: int) -> RequestOutput:
        return RequestOutput("r", None, [1], [CompletionOutput(0, text, [token], token_sources=["target"])], False)

    parts = [part("a", 1), part("b", 2), part("c", 3)]
    merger = OutputMerger()
    outputs = []
    for new in parts:
        merger.add(new)
        outputs.append(merger.output())
    assert [output.outputs[0].text for output in outputs] == ["a", "ab", "abc"]
    assert [output.outputs[0].token_ids for output in outputs] == [[1], [1, 2], [1, 2, 3]]
    assert parts[0] == part("a", 1)


class Counts:
    copied = 0


class CountedList(list[Any]):
    """Counts the entries that are taken out of it, one by one or in a slice."""

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        found = super().__getitem__(key)
        Counts.copied += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Iterator[Any]:
        Counts.copied += len(self)
        return super().__iter__()

    def __add__(self, other: Iterable[Any]) -> Any:
        Counts.copied += len(self)
        return super().__add__(list(other))

    def copy(self) -> Any:
        Counts.copied += len(self)
        return super().copy()


class CountedText(str):
    """Counts the characters of every text that it becomes a part of."""

    def __add__(self, other: str) -> "CountedText":
        Counts.copied += len(self) + len(other)
        return CountedText(super().__add__(other))

    def __radd__(self, other: str) -> "CountedText":
        Counts.copied += len(self) + len(other)
        return CountedText(other.__add__(self))

    def __getitem__(self, key: SupportsIndex | slice) -> "CountedText":
        found = CountedText(super().__getitem__(key))
        Counts.copied += len(found)
        return found


class CountedTokenizer(ToyTokenizer):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        Counts.copied += len(token_ids)
        return CountedText(super().decode(token_ids, skip_special_tokens))


class EndlessDecoder(ToyDecoder):
    """Looks at the last four tokens only, so that a long text costs little, and never ends one."""

    config = dataclasses.replace(ToyDecoder.config, max_position=4096)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        logits = super().logits(tokens[-4:]).clone()
        logits[EOS] = -torch.inf
        return logits


def endless_model() -> LoadedModel:
    decoder, tokenizer = EndlessDecoder(), CountedTokenizer()
    return LoadedModel("toy", Path("toy"), decoder.config, decoder, tokenizer, "toy")  # type: ignore[arg-type]


def copied_by_step(llm: LLM, asked: SamplingParams) -> list[int]:
    job = llm.submit(PROMPT, asked)
    (state,) = job.states
    request, detokenizer = state.request, state.detokenizer
    request.token_ids, request.token_sources = CountedList(request.token_ids), CountedList()
    request.logprobs = None if request.logprobs is None else CountedList()
    detokenizer.pieces = CountedList()
    copied, text = [], []
    while not job.finished:
        Counts.copied = 0
        llm.step()
        for output in job.delta().outputs:
            text.append(output.text)
            Counts.copied += len(output.text) + len(output.token_ids)
        copied.append(Counts.copied)
    assert "".join(text) == detokenizer.text and len(detokenizer.text) == 2_000
    return copied


@pytest.mark.parametrize("options", [{}, {"logprobs": 1, "stop": ["zz", "never said"]}], ids=str)
def test_the_last_token_of_a_long_answer_costs_what_the_first_one_does(options: dict[str, Any]) -> None:
    """Or less, once the texts of its tokens are known. Counted in tokens and characters taken out of what the engine
    keeps; blocks of 16 make it periodic."""
    assert VOCAB < 26  # every token is one letter
    llm = LLM(endless_model(), {"method": "none"}, num_kv_blocks=256, block_size=16, max_model_len=4096)
    copied = copied_by_step(llm, params(max_tokens=2_000, temperature=1.0, ignore_eos=True, **options))
    assert len(copied) == 2_000
    assert 160 <= sum(copied[-176:-16]) <= sum(copied[16:176]) < 160 * 40


def test_the_cost_test_detects_a_copy_of_the_whole_answer() -> None:
    """So that the test above can fail."""
    llm = LLM(endless_model(), {"method": "none"}, num_kv_blocks=256, block_size=16, max_model_len=4096)
    job = llm.submit(PROMPT, params(max_tokens=50, ignore_eos=True))
    (state,) = job.states
    state.request.token_ids = CountedList(state.request.token_ids)
    while not job.finished:
        llm.step()
    Counts.copied = 0
    assert len(job.output().outputs[0].token_ids) == 50
    assert Counts.copied >= 50
