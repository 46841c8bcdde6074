"""The engine on padded passes that draw their own tokens: the plain twin of the captured passes, on a CPU.

Outputs are those of the ordinary path, whatever else is going on: chunked prompts, prefix hits, preemption, drafts, and
options that need logits beside requests that do not.
"""

import itertools
from typing import Any

import pytest
import torch

from paceline.core.forward import DonePass, ForwardBatch
from paceline.core.request import Request
from paceline.engine.core import EngineCore
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from paceline.models.padded_decoder import PaddedDecoder
from tests.models.small_models import hf_config_dict, random_weights
from tests.toy import EOS, VOCAB, ToyDecoder, run_all, toy_core, toy_request

SIZES = (1, 2, 4, 8, 16, 48)
PLAIN: dict[str, Any] = {"temperature": 0.0}
WARM: dict[str, Any] = {"temperature": 0.9}
NEED_LOGITS: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_k": 3},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 0.8, "min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"temperature": 0.7, "presence_penalty": 0.5},
    {"logit_bias": {3: 2.0}},
    {"allowed_token_ids": [1, 2, 3, 4]},
    {"min_tokens": 4},
    {"logprobs": 2},
]
METHODS: dict[str, dict[str, object] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
    "eagle3 tree": {"method": "eagle3", "model": "untrained", "num_speculative_tokens": 3, "node_budget": 7},
    "recycling": {"method": "recycling", "num_speculative_tokens": 3, "node_budget": 8},
}


def asked(options: list[dict[str, Any]], count: int = 10, max_tokens: int = 20) -> list[Request]:
    made = []
    for i, chosen in zip(range(count), itertools.cycle(options), strict=False):
        prompt = [1, 2, 3, 4, 1, 2, 3] * (1 + i % 3) + [i % 5]
        request = toy_request(f"r{i}", prompt, max_tokens=max_tokens, seed=i * 2**62 + i, **chosen)
        if request.sampling_params.logprobs is not None:
            request.logprobs = []
        made.append(request)
    return made


def clock_of(core: EngineCore) -> Any:
    assert isinstance(core.runner.model, PaddedDecoder)
    return core.runner.model.clock


def small_decoder() -> Decoder:
    names = hf_config_dict("llama", vocab_size=VOCAB, eos_token_id=EOS)
    return Decoder(config_from_dict(names), random_weights(config_from_dict(names)), batch_invariant=True)


@pytest.mark.parametrize("options", [[PLAIN], [WARM], [PLAIN, WARM, *NEED_LOGITS]], ids=["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("method", METHODS)
def test_padded_passes_give_the_output_of_ordinary_ones(method: str, options: list[dict[str, Any]]) -> None:
    needs_features = method.startswith("eagle3")
    decoder = small_decoder() if needs_features else None
    plain = run_all(toy_core(None, decoder=decoder), asked(options, count=len(options) * 2 + 4))
    core = toy_core(METHODS[method], decoder=decoder, sizes=SIZES, max_num_batched_tokens=24)
    assert run_all(core, asked(options, count=len(options) * 2 + 4)) == plain
    assert clock_of(core).num_passes >= 6 and clock_of(core).num_eager == 0, "meant to run padded"


@pytest.mark.parametrize("options", [[PLAIN], [WARM, PLAIN]], ids=["greedy", "sampled"])
def test_outputs_are_the_same_under_preemption_chunks_and_prefix_hits(options: list[dict[str, Any]]) -> None:
    alone = [run_all(toy_core(), [request])[0] for request in asked(options)]
    core = toy_core(METHODS["ngram"], sizes=SIZES, num_blocks=18, max_num_batched_tokens=9)
    requests = asked(options)
    assert run_all(core, requests) == alone
    assert sum(request.num_preemptions for request in requests) > 0, "meant to run out of blocks"
    assert sum(request.num_cached_tokens for request in requests) > 0, "meant to share prefixes"
    assert clock_of(core).num_eager == 0


def test_a_pass_larger_than_every_size_is_left_to_the_decoder_beneath_and_draws_from_its_logits() -> None:
    expected = run_all(toy_core(), asked([PLAIN, WARM]))
    core = toy_core(sizes=(1, 2), max_num_batched_tokens=40)
    assert run_all(core, asked([PLAIN, WARM])) == expected
    assert clock_of(core).num_eager > 0


def test_logits_are_asked_for_only_where_somebody_reads_them() -> None:
    wanted: list[bool] = []
    core = toy_core(sizes=SIZES)
    model = core.runner.model
    assert isinstance(model, PaddedDecoder)
    launch = model.launch

    def watched(batch: ForwardBatch, *args: Any, **kwargs: Any) -> Any:
        wanted.append(batch.wants_logits)
        output = launch(batch, *args, **kwargs).collect()
        assert output.logits.shape == (len(batch.logits_rows) if batch.wants_logits else 0, VOCAB)
        assert output.tokens is not None or not len(batch.logits_rows)
        return DonePass(output)

    model.launch = watched  # type: ignore[method-assign]
    run_all(core, asked([PLAIN, WARM]))
    assert wanted and not any(wanted)
    wanted.clear()
    run_all(core, asked([WARM, {"temperature": 0.5, "top_k": 2}], count=2))
    assert all(wanted)


def test_a_row_that_cannot_be_sampled_ends_its_request_alone() -> None:
    class Broken(ToyDecoder):
        def logits(self, tokens: Any) -> torch.Tensor:
            found = super().logits(tokens)
            return torch.full_like(found, torch.nan) if tokens[0] == 7 and len(tokens) > 6 else found

    requests = [toy_request("bad", [7, 1, 2], seed=1), toy_request("good", [1, 2, 3], seed=1)]
    core = toy_core(decoder=Broken(), sizes=SIZES)
    _, good = run_all(core, requests)
    assert requests[0].finish_reason == "error" and "nothing can be sampled" in str(requests[0].error)
    assert good == run_all(toy_core(), [toy_request("good", [1, 2, 3], seed=1)])[0]


def test_a_request_draws_the_same_tokens_whatever_its_company_asks_for() -> None:
    """One way of drawing for one request: a neighbour that needs logits must not move it to another."""
    used: list[list[bool]] = []
    for company in ([], NEED_LOGITS):
        core = toy_core(sizes=SIZES, max_num_seqs=16)
        seen: list[bool] = []
        launch = core.runner.launch

        def watched(scheduled: Any, *args: Any, seen: Any = seen, launch: Any = launch, **kwargs: Any) -> Any:
            launched = launch(scheduled, *args, **kwargs)
            seen.extend(
                drawn
                for entry, drawn in zip(scheduled, launched.is_drawn, strict=True)
                if entry.request.request_id == "me" and entry.reaches_end
            )
            return launched

        core.runner.launch = watched  # type: ignore[method-assign]
        others = asked(company, count=len(company)) if company else []
        run_all(core, [toy_request("me", [1, 2, 3], seed=5, temperature=1.0), *others])
        used.append(seen)
    assert all(used[0]) and all(used[1]) and min(map(len, used)) >= 8  # a surplus row may come on top
