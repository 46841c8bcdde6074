"""Rounds: the device walks, drafts and verifies without a turn of the host. Here with the plain twins, on a CPU.

The outputs are those of plain decoding, and what is accepted is what is accepted where every pass is collected before
the next is planned.
"""

import random
from typing import Any

import pytest
import torch

from paceline.engine.core import EngineCore
from paceline.models.decoder import Decoder
from paceline.models.drafters.paged import Placement
from paceline.models.padded_decoder import PaddedDecoder
from paceline.models.plain_passes import DrawingDecoder
from paceline.spec.feature import eagle3, medusa
from paceline.spec.feature.device_drafts import plain_drafts
from paceline.spec.proposer import StepContext
from tests.engine.test_padded_passes import PLAIN, WARM, asked, small_decoder
from tests.toy import run_all, toy_core, toy_request

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
CHAIN = {"method": "eagle3", "model": "untrained", "num_speculative_tokens": 3, "node_budget": 3}
HOT: dict[str, Any] = {"temperature": 2.0}  # noise, which the drafter knows, decides: many drafts are accepted
TREE = {"method": "eagle3", "model": "untrained", "num_speculative_tokens": 3, "node_budget": 7, "draft_width": 3}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
NGRAM_TREE = NGRAMS | {"node_budget": 9}
MEDUSA = {"method": "medusa", "model": "untrained", "num_speculative_tokens": 3, "node_budget": 3}
MEDUSA_TREE = MEDUSA | {"node_budget": 8, "draft_width": 4}
LAYERS = {"method": "layer_skip", "draft_layers": [0, 2], "num_speculative_tokens": 3}
FIRST_LAYERS = {"method": "draft_model", "num_draft_layers": 1, "num_speculative_tokens": 4}
LOOKUPS = {"ngrams": NGRAMS, "ngram tree": NGRAM_TREE}


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are made whole, by the plain twin of the fused kernels."""

    def drafts(network: Any, target: Any, *rest: Any) -> Any:
        while isinstance(target, PaddedDecoder | DrawingDecoder):
            target = target.base
        return plain_drafts(network, target, *rest)

    for module in (eagle3, medusa):
        monkeypatch.setattr(module, "placement", lambda _: Placement(torch.device("cpu"), native=False))
    monkeypatch.setattr(eagle3, "device_drafts", drafts)


def with_rounds(config: dict[str, object], decoder: Decoder, **options: Any) -> EngineCore:
    room = {"num_blocks": 128, "max_num_batched_tokens": 128} | options
    return toy_core(config, decoder=decoder, sizes=SIZES, **room)


def without_rounds(core: EngineCore) -> EngineCore:
    core.launcher.rounds = None
    return core


Seen = dict[tuple[str, int], tuple[list[int], list[int], list[int]]]


def watch(core: EngineCore) -> Seen:
    """(request id, number of tokens) -> tokens and parents of its tree, and the nodes accepted."""
    seen: Seen = {}

    def look(step: StepContext) -> None:
        for one in step.passes:
            if one.logits_row >= 0:
                tree = one.draft
                seen[one.request.request_id, one.start] = (tree.token_ids, tree.parents, list(one.accepted))

    core.observers.append(look)
    return seen


def assert_same_trees(seen: Seen, expected: Seen, max_depth: int) -> None:
    """Near its end a request's drafts are cut, but not those of a round."""
    ends = {name: max(start for other, start in expected if other == name) for name, _ in expected}
    for (name, start), found in seen.items():
        if start < ends[name] - max_depth - 1:
            assert found == expected[name, start]


def seen_in_rounds(
    config: dict[str, object], options: list[dict[str, Any]], count: int, *, max_tokens: int, max_depth: int
) -> Seen:
    """So many requests in rounds give the output of plain decoding, from the trees that are drafted without rounds."""
    decoder = small_decoder()
    plain = run_all(toy_core(None, decoder=decoder), asked(options, count, max_tokens=max_tokens))
    stepwise, core = without_rounds(with_rounds(config, decoder)), with_rounds(config, decoder)
    expected, seen = watch(stepwise), watch(core)
    assert run_all(stepwise, asked(options, count, max_tokens=max_tokens)) == plain
    assert run_all(core, asked(options, count, max_tokens=max_tokens)) == plain
    assert core.clock.num_ahead >= core.clock.num_steps // 2, "meant to run in rounds"
    assert_same_trees(seen, expected, max_depth)
    return seen


@pytest.mark.parametrize("options", [[PLAIN], [HOT], [HOT, WARM, PLAIN]], ids=["greedy", "hot", "mixed"])
@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("count", [1, 5])
def test_rounds_give_the_output_of_plain_decoding_with_the_trees_that_are_drafted_without_them(
    on_device: None, config: dict[str, object], options: list[dict[str, Any]], count: int
) -> None:
    seen = seen_in_rounds(config, options, count, max_tokens=40, max_depth=3)
    if HOT in options:
        assert sum(len(accepted) for _, _, accepted in seen.values()) > 5 * count, "meant to accept drafts"
    if HOT in options and config is TREE and count > 1:
        assert any(accepted != list(range(len(accepted))) for _, _, accepted in seen.values()), "meant to move rows"


@pytest.mark.parametrize("options", [[PLAIN], [WARM, PLAIN]], ids=["greedy", "mixed"])
@pytest.mark.parametrize("method", LOOKUPS)
@pytest.mark.parametrize("count", [1, 5])
def test_lookups_in_rounds_make_the_trees_of_the_host(method: str, options: list[dict[str, Any]], count: int) -> None:
    seen = seen_in_rounds(LOOKUPS[method], options, count, max_tokens=60, max_depth=4)
    if options == [PLAIN]:
        assert sum(len(accepted) for _, _, accepted in seen.values()) > 5 * count, "meant to accept drafts"


@pytest.mark.parametrize("options", [[PLAIN], [HOT], [HOT, WARM, PLAIN]], ids=["greedy", "hot", "mixed"])
@pytest.mark.parametrize("config", [MEDUSA, MEDUSA_TREE], ids=["chain", "tree"])
def test_medusa_in_rounds_makes_the_trees_of_the_host(
    on_device: None, config: dict[str, object], options: list[dict[str, Any]]
) -> None:
    seen = seen_in_rounds(config, options, 5, max_tokens=30, max_depth=3)
    if HOT in options:
        assert sum(len(accepted) for _, _, accepted in seen.values()) > 15, "meant to accept drafts"


@pytest.mark.parametrize("options", [[PLAIN], [HOT, WARM, PLAIN]], ids=["greedy", "mixed"])
@pytest.mark.parametrize("config", [LAYERS, FIRST_LAYERS], ids=["layer_skip", "draft_model"])
def test_the_targets_own_layers_draft_in_rounds_what_they_draft_on_the_host(
    config: dict[str, object], options: list[dict[str, Any]]
) -> None:
    seen = seen_in_rounds(config, options, 5, max_tokens=30, max_depth=4)
    assert sum(len(accepted) for _, _, accepted in seen.values()) > 15, "meant to accept drafts"


def test_a_prefix_found_after_rounds_is_the_text_that_was_accepted(on_device: None) -> None:
    """Accepted nodes stand at their places in the cache when another request finds them there, also those of the
    request's last pass."""
    decoder = small_decoder()
    for num_tokens in range(9, 20):  # the end falls on every place of a path
        core = with_rounds(TREE, decoder)
        (first,) = asked([HOT], 1, max_tokens=num_tokens)
        run_all(core, [first])
        follower = toy_request("next", first.token_ids, seed=5, **HOT)
        (found,) = run_all(core, [follower])
        assert follower.num_cached_tokens > first.num_prompt_tokens
        assert [found] == run_all(
            toy_core(None, decoder=decoder), [toy_request("next", first.token_ids, seed=5, **HOT)]
        )


@pytest.mark.parametrize("configs", [[CHAIN, TREE], [NGRAM_TREE, MEDUSA_TREE, LAYERS]], ids=["eagle3", "others"])
def test_requests_come_end_and_are_aborted_between_rounds(on_device: None, configs: list[dict[str, object]]) -> None:
    """Random arrivals, cancellations, stop tokens and a pool that is too small: every answer is the one it gets alone,
    and no block is lost (`check_integrity` after every step)."""
    decoder = small_decoder()
    alone = [run_all(toy_core(None, decoder=decoder), [one])[0] for one in asked([HOT, PLAIN, WARM], 12)]
    ahead = 0
    for seed in range(6):
        rng = random.Random(seed)
        core = with_rounds(configs[seed % len(configs)], decoder, num_blocks=24 if seed > 3 else 96)
        requests, cut = asked([HOT, PLAIN, WARM], 12), set()
        waiting = list(requests)
        while waiting or core.has_requests:
            while waiting and (not core.has_requests or rng.random() < 0.2):
                core.add_request(waiting.pop(0))
            core.step()
            core.check_integrity()
            if rng.random() < 0.03 and core.scheduler.running:
                gone = rng.choice(core.scheduler.running)
                core.abort(gone.request_id)
                cut.add(gone.request_id)
        for request, expected in zip(requests, alone, strict=True):
            if request.request_id in cut:
                assert request.output_token_ids == expected[: request.num_output_tokens]
            else:
                assert request.output_token_ids == expected
        assert core.kv.pool.num_free == core.kv.pool.num_blocks
        ahead += core.clock.num_ahead
    assert ahead > 60, "meant to run in rounds"


@pytest.mark.parametrize("config", [TREE, NGRAM_TREE], ids=["eagle3", "ngram"])
def test_a_request_with_options_of_its_own_takes_the_ordinary_way_with_its_company(
    on_device: None, config: dict[str, object]
) -> None:
    decoder = small_decoder()
    options: list[dict[str, Any]] = [HOT, {"temperature": 0.8, "top_k": 3}]
    plain = run_all(toy_core(None, decoder=decoder), asked(options, 4))
    core = with_rounds(config, decoder)
    assert run_all(core, asked(options, 4)) == plain
    assert core.clock.num_ahead == 0


@pytest.mark.parametrize("config", [TREE, NGRAM_TREE], ids=["eagle3", "ngram"])
def test_rounds_stop_where_the_context_ends(on_device: None, config: dict[str, object]) -> None:
    decoder = small_decoder()
    (plain,) = run_all(toy_core(None, decoder=decoder, num_blocks=12), asked([HOT], 1, max_tokens=40))
    core = with_rounds(config, decoder, num_blocks=12)  # 48 tokens, 8 of the prompt
    assert run_all(core, asked([HOT], 1, max_tokens=40)) == [plain]
    assert 0 < core.clock.num_ahead < core.clock.num_steps - 2
