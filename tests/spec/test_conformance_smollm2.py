"""Every method on the real model, float32: the same tokens as plain decoding, greedy and seeded.

Alone, in a batch of 32, methods mixed in one batch, under preemption, after prefix-cache hits, and when requests are
cancelled in mid-draft. Methods come from the table, and what they need to be tried from their rows."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from paceline import LLM, SamplingParams, StructuredOutputsParams
from paceline.errors import ModelLoadError
from paceline.models.loader import LoadedModel
from paceline.spec.config.speculative_config import at_default_size
from paceline.spec.methods import PROPOSERS
from tests.spec.smollm2_batch import as_dict, batch, float32_llm, tokens_of

MOST_NODES = 12  # of a tree: the float32 path is slow


@pytest.fixture(scope="module")
def make(smollm2_float32: LoadedModel) -> Callable[..., LLM]:
    return functools.partial(float32_llm, smollm2_float32)


@pytest.fixture(scope="module")
def truth(make: Callable[..., LLM]) -> list[list[int]]:
    return tokens_of(make(enable_prefix_caching=False).generate(*batch(32)))


@dataclass(frozen=True, slots=True)
class MethodUnderTest:
    """A method set up on the real model, with all that its row says that it needs."""

    method: str
    llm: LLM
    is_trained: bool  # False: its network has random weights, for none is shipped for this target

    def params(self, params: Sequence[SamplingParams], truth: Sequence[Sequence[int]]) -> list[SamplingParams]:
        """The same, with the truth where the request must bring it, and small trees."""
        row, largest = PROPOSERS[self.method], self.llm.engine.core.speculator.max_nodes
        size = {"node_budget": MOST_NODES} if largest > MOST_NODES else {}
        by_request = row.told_by is not None and row.told_by not in row.options
        if row.told_by == "structured_outputs":  # a grammar that allows this output alone
            return [
                SamplingParams(**{**as_dict(one), "structured_outputs": self.only(output), "speculative": size or None})
                for one, output in zip(params, truth, strict=True)
            ]
        told = [{row.told_by: output} if by_request else {} for output in truth]
        return [
            SamplingParams(**{**as_dict(one), "speculative": {**size, **known} or None})
            for one, known in zip(params, told, strict=True)
        ]

    def only(self, output: Sequence[int]) -> StructuredOutputsParams:
        """Every token by its own id: another spelling of the same text would be another output."""
        eos = self.llm.get_tokenizer().eos_token_ids
        tokens = " ".join(f"<[{token}]>" for token in output if token not in eos)
        return StructuredOutputsParams(grammar=f"start: {tokens}")


@pytest.fixture(scope="module")
def set_up(make: Callable[..., LLM], truth: list[list[int]]) -> Callable[..., MethodUnderTest]:
    def build(method: str, **options: Any) -> MethodUnderTest:
        row = PROPOSERS[method]
        told: dict[str, Any] = {}
        if row.told_by in row.options:
            tokenizer = make().get_tokenizer()
            told[row.told_by] = [
                [*tokenizer.encode(text), *output] for text, output in zip(batch(32)[0], truth, strict=True)
            ]
        try:
            return MethodUnderTest(
                method, make(at_default_size({"method": method, **told}), **options), is_trained=True
            )
        except ModelLoadError:  # no network of this kind is shipped for the model
            given = at_default_size({"method": method, **row.example, **told})
            return MethodUnderTest(method, make(given, **options), is_trained=False)

    return build


@pytest.mark.parametrize("method", PROPOSERS)
def test_a_few_together(set_up: Callable[..., MethodUnderTest], truth: list[list[int]], method: str) -> None:
    prompts, params = batch(8)
    tested = set_up(method)
    outputs = tested.llm.generate(prompts, tested.params(params, truth[:8]))
    assert tokens_of(outputs) == truth[:8]
    row, stats = PROPOSERS[method], tested.llm.stats()["speculation"][method]
    assert not stats.get("num_failures")
    if row.drafts and not row.by_time:  # by measured time drafts may not pay here
        assert stats["num_draft_tokens"] > 0, "nothing was ever drafted: this proves nothing"
        assert stats["num_accepted_tokens"] > 0 or not tested.is_trained, "nothing was ever accepted"


def test_methods_mixed_in_one_batch_of_32(make: Callable[..., LLM], truth: list[list[int]]) -> None:
    prompts, params = batch(32)
    by_choice = [name for name, row in PROPOSERS.items() if row.per_request]
    choices: list[dict[str, Any] | None] = [None, {"off": True}, {"num_speculative_tokens": 2}, {"node_budget": 6}]
    choices += [{"method": name, "node_budget": MOST_NODES} for name in by_choice]
    choices += [{"prediction": "four one two three four"}]
    mixed = [SamplingParams(**{**as_dict(p), "speculative": choices[i % len(choices)]}) for i, p in enumerate(params)]
    llm = make({"method": "merge", "node_budget": MOST_NODES}, max_num_batched_tokens=256)
    assert tokens_of(llm.generate(prompts, mixed)) == truth
    assert set(by_choice) | {"merge"} <= set(llm.stats()["speculation"])


@pytest.mark.slow  # the toy target is preempted, chunked and cached with every method in the default run
@pytest.mark.parametrize("method", PROPOSERS)
def test_preempted_chunked_and_cached(
    set_up: Callable[..., MethodUnderTest], truth: list[list[int]], method: str
) -> None:
    prompts, params = batch(8)
    small: dict[str, Any] = {"num_kv_blocks": 24, "kv_cache_memory_bytes": None, "max_model_len": 256}
    tested = set_up(method, **small, max_num_batched_tokens=64)
    for _ in range(2):  # the second time prompts come from the prefix cache
        assert tokens_of(tested.llm.generate(prompts, tested.params(params, truth[:8]))) == truth[:8]


@pytest.mark.slow
@pytest.mark.parametrize("method", PROPOSERS)
def test_cancelled_in_mid_draft(set_up: Callable[..., MethodUnderTest], truth: list[list[int]], method: str) -> None:
    prompts, params = batch(3)
    tested = set_up(method)
    asked = tested.params(params, truth[:3])
    for i, _ in enumerate(tested.llm.stream(prompts[2], asked[2])):
        if i == 3:
            break  # leaving the stream aborts the request
    core = tested.llm.engine.core
    core.check_integrity()
    assert not core.has_requests and core.kv.usage == 0.0
    assert tokens_of(tested.llm.generate(prompts, asked)) == truth[:3]


@pytest.mark.slow
@pytest.mark.parametrize("method", PROPOSERS)
def test_batch_of_32(set_up: Callable[..., MethodUnderTest], truth: list[list[int]], method: str) -> None:
    tested = set_up(method, max_num_batched_tokens=256)
    prompts, params = batch(32)
    assert tokens_of(tested.llm.generate(prompts, tested.params(params, truth))) == truth


@pytest.mark.slow
@pytest.mark.parametrize("method", PROPOSERS)
def test_each_alone(set_up: Callable[..., MethodUnderTest], truth: list[list[int]], method: str) -> None:
    tested = set_up(method)
    prompts, params = batch(16)
    for prompt, one, expected in zip(prompts, tested.params(params, truth[:16]), truth, strict=False):
        assert tokens_of(tested.llm.generate(prompt, one)) == [expected]
