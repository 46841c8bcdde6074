"""The engine on captured passes of the fused kernels, on a GPU: one answer, alone, in a batch, and with drafts."""

import itertools
import random
import time
from pathlib import Path

import pytest
import torch

from paceline.core.kv_tensor import FLOAT8
from paceline.core.request import Request
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from paceline.models.loader import LoadedModel
from paceline.models.padded_decoder import PaddedDecoder
from paceline.models.static_inputs import PassRoom
from tests.engine.test_flight import again, run_with_random_events, some_request
from tests.engine.test_padded_passes import METHODS, NEED_LOGITS, PLAIN, WARM, asked, clock_of
from tests.engine.test_rounds import (
    CHAIN,
    FIRST_LAYERS,
    HOT,
    LAYERS,
    LOOKUPS,
    MEDUSA_TREE,
    NGRAM_TREE,
    NGRAMS,
    TREE,
    assert_same_trees,
    watch,
    without_rounds,
)
from tests.models.small_models import hf_config_dict, random_weights
from tests.toy import EOS, VOCAB, ToyTokenizer, run_all, toy_core, toy_request

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

STRESS_SECONDS = 300
OPTIONS = [PLAIN, WARM, {"temperature": 20.0}, *NEED_LOGITS]


def requests() -> list[Request]:
    return asked(OPTIONS, count=2 * len(OPTIONS))


@pytest.mark.parametrize("dtype, kv_dtype", [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, FLOAT8)])
def test_answers_do_not_depend_on_company_drafts_chunks_or_graphs(
    dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    from paceline.models.captured_passes import CapturedPasses
    from paceline.models.fused_decoder import FusedDecoder

    heads = {} if kv_dtype is None else {"head_dim": 32}
    config = config_from_dict(hf_config_dict("qwen3", vocab_size=VOCAB, eos_token_id=EOS, **heads))
    fused = FusedDecoder(Decoder(config, random_weights(config), dtype=dtype, device="cuda", kv_dtype=kv_dtype))

    def capture(room: PassRoom) -> PaddedDecoder:
        return PaddedDecoder(fused, CapturedPasses(fused), room, sizes=(1, 2, 4, 8, 16, 48))

    def eager(room: PassRoom) -> PaddedDecoder:
        return PaddedDecoder(fused, CapturedPasses(fused), room, sizes=(0,))

    alone = [run_all(toy_core(None, decoder=fused, capture=eager), [request])[0] for request in requests()]
    assert len({tuple(answer) for answer in alone}) > 4, "the model was meant to say different things"
    for method in METHODS.values():
        core = toy_core(method, decoder=fused, capture=capture, num_blocks=40, max_num_batched_tokens=24)
        assert run_all(core, requests()) == alone
        assert clock_of(core).num_passes > 10 and clock_of(core).num_eager == 0


def run_ahead(seed: int) -> int:
    """Random arrivals, cancellations, stops and small pools, every answer checked; how many passes ran ahead."""
    from paceline.models.captured_passes import CapturedPasses
    from paceline.models.fused_decoder import FusedDecoder

    config = config_from_dict(hf_config_dict("qwen3", vocab_size=VOCAB, eos_token_id=EOS))
    fused = FusedDecoder(Decoder(config, random_weights(config), dtype=torch.bfloat16, device="cuda"))
    rng = random.Random(seed)
    requests = [some_request(rng, i, chosen_by_host=0.1 * (seed % 2)) for i in range(60)]
    alone = toy_core(None, decoder=fused, capture=lambda room: PaddedDecoder(fused, CapturedPasses(fused), room, (0,)))
    expected = {request.request_id: run_all(alone, [again(request)])[0] for request in requests}

    def capture(room: PassRoom) -> PaddedDecoder:
        return PaddedDecoder(fused, CapturedPasses(fused), room, sizes=(1, 2, 4, 8, 16, 48))

    core = toy_core(None, decoder=fused, capture=capture, num_blocks=rng.choice([30, 60]), max_num_batched_tokens=24)
    aborted = run_with_random_events(core, rng, list(requests))
    for request in requests:
        answer, found = expected[request.request_id], request.output_token_ids
        assert found == (answer[: len(found)] if request.request_id in aborted else answer), request
    return core.clock.num_ahead


@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals_cancellations_stops_and_small_pools_change_no_output(seed: int) -> None:
    assert run_ahead(seed) > 5, "meant to run ahead"


def run_in_rounds(seed: int) -> dict[str, tuple[int, int]]:
    """Trees and chains, hot requests whose drafts are accepted among greedy ones, random arrivals and cancellations,
    pools that are too small; every answer checked. Of each drafter: rounds launched ahead, draft tokens accepted."""
    from paceline.models.captured_passes import CapturedPasses
    from paceline.models.fused_decoder import FusedDecoder

    config = config_from_dict(hf_config_dict("qwen3", vocab_size=VOCAB, eos_token_id=EOS))
    fused = FusedDecoder(Decoder(config, random_weights(config), dtype=torch.bfloat16, device="cuda"))
    rng = random.Random(seed)
    requests = [some_request(rng, i, chosen_by_host=0.0) for i in range(40)]
    requests += [toy_request(f"hot {i}", [i, 2, 3], max_tokens=60, seed=i, **HOT) for i in range(20)]
    alone = toy_core(None, decoder=fused, capture=lambda room: PaddedDecoder(fused, CapturedPasses(fused), room, (0,)))
    expected = {request.request_id: run_all(alone, [again(request)])[0] for request in requests}

    def capture(room: PassRoom) -> PaddedDecoder:
        return PaddedDecoder(fused, CapturedPasses(fused), room, sizes=(1, 2, 4, 8, 16, 32, 64))

    counts = {}
    for config in (TREE, CHAIN, NGRAMS, NGRAM_TREE, MEDUSA_TREE, LAYERS, FIRST_LAYERS):
        core = toy_core(
            config, decoder=fused, capture=capture, num_blocks=rng.choice([60, 120]), max_num_batched_tokens=64
        )
        asked_now = [again(request) for request in requests]
        aborted = run_with_random_events(core, rng, list(asked_now))
        for request in asked_now:
            answer, found = expected[request.request_id], request.output_token_ids
            assert found == (answer[: len(found)] if request.request_id in aborted else answer), request
        accepted = core.speculator.stats()[config["method"]]["num_accepted_tokens"]
        counts[str(config)] = core.clock.num_ahead, accepted
    return counts


@pytest.mark.parametrize("seed", range(4))
def test_rounds_change_no_output(seed: int) -> None:
    counts = run_in_rounds(seed)
    assert all(ahead > 5 and accepted > 5 for ahead, accepted in counts.values()), counts


@pytest.mark.parametrize("method", LOOKUPS)
def test_lookups_on_the_device_make_the_trees_of_the_host(method: str) -> None:
    from paceline.models.captured_passes import CapturedPasses
    from paceline.models.fused_decoder import FusedDecoder

    config = config_from_dict(hf_config_dict("qwen3", vocab_size=VOCAB, eos_token_id=EOS))
    fused = FusedDecoder(Decoder(config, random_weights(config), dtype=torch.bfloat16, device="cuda"))

    def capture(room: PassRoom) -> PaddedDecoder:
        return PaddedDecoder(fused, CapturedPasses(fused), room, sizes=(1, 2, 4, 8, 16, 32, 64))

    stepwise, core = (
        toy_core(LOOKUPS[method], decoder=fused, capture=capture, num_blocks=128, max_num_batched_tokens=64)
        for _ in range(2)
    )
    expected, seen = watch(without_rounds(stepwise)), watch(core)
    plain = run_all(stepwise, asked([PLAIN], 5, max_tokens=60))
    assert run_all(core, asked([PLAIN], 5, max_tokens=60)) == plain
    assert core.clock.num_ahead >= core.clock.num_steps // 2, "meant to run in rounds"
    assert_same_trees(seen, expected, max_depth=4)


def test_a_draft_model_that_is_the_targets_twin_is_right_in_rounds() -> None:
    """Its own keys stay in step with the target's, whatever was accepted."""
    from paceline.models.captured_passes import CapturedPasses
    from paceline.models.fused_decoder import FusedDecoder

    config = config_from_dict(hf_config_dict("qwen3", vocab_size=VOCAB, eos_token_id=EOS))
    weights = random_weights(config)
    fused, twin = (FusedDecoder(Decoder(config, weights, dtype=torch.bfloat16, device="cuda")) for _ in range(2))

    def capture(room: PassRoom) -> PaddedDecoder:
        return PaddedDecoder(fused, CapturedPasses(fused), room, sizes=(1, 2, 4, 8, 16, 32, 64))

    def capture_twin(room: PassRoom) -> PaddedDecoder:
        return PaddedDecoder(twin, CapturedPasses(twin), room)

    loaded = LoadedModel("twin", Path(), config, twin, ToyTokenizer(), "toy", capture_twin)
    core = toy_core(
        {"method": "draft_model", "model": loaded, "num_speculative_tokens": 4},
        decoder=fused, capture=capture, num_blocks=128, max_num_batched_tokens=64,
    )  # fmt: skip
    plain = toy_core(None, decoder=fused, capture=capture, num_blocks=128, max_num_batched_tokens=64)
    expected = run_all(plain, asked([PLAIN, WARM], 6, max_tokens=40))
    assert run_all(core, asked([PLAIN, WARM], 6, max_tokens=40)) == expected
    assert core.clock.num_ahead > 3, "meant to run in rounds"
    accepted = core.speculator.stats()["draft_model"]["num_accepted_tokens"]
    assert accepted >= 0.6 * sum(map(len, expected))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_minutes_of_random_arrivals_cancellations_stops_and_small_pools_change_no_output() -> None:
    seeds, end = itertools.count(1000), time.monotonic() + STRESS_SECONDS
    ahead, in_rounds, accepted = [], 0, 0  # with some seeds the pool is too small to run ahead at all
    while time.monotonic() < end:
        seed = next(seeds)
        ahead.append(run_ahead(seed))
        counts = run_in_rounds(seed)
        in_rounds += sum(rounds for rounds, _ in counts.values())
        accepted += sum(tokens for _, tokens in counts.values())
    print(f"{len(ahead)} seeds, {sum(ahead)} passes ahead, {in_rounds} rounds, {accepted} draft tokens accepted")
    assert sum(ahead) > 5 * len(ahead) and in_rounds > 35 * len(ahead) and accepted > 35 * len(ahead)
