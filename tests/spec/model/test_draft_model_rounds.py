"""A draft model with keys of its own in rounds: a twin of the target is never wrong, so its keys stay in step.

Its last token was drawn but never fed where all of a draft was accepted: exactly what a twin's drafts always are."""

import random
from pathlib import Path
from typing import Any

import pytest

from paceline.engine.core import EngineCore
from paceline.models.loader import LoadedModel
from paceline.models.padded_decoder import PaddedDecoder
from paceline.models.plain_passes import DrawingDecoder, PlainPasses
from paceline.models.static_inputs import PassRoom
from tests.spec.model.test_model_drafting import PROMPTS, acceptance, batch
from tests.toy import ToyDecoder, ToyTokenizer, run_all, toy_core, toy_request

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def captured(decoder: ToyDecoder) -> LoadedModel:
    def capture(room: PassRoom) -> PaddedDecoder:
        drawing = DrawingDecoder(decoder)
        return PaddedDecoder(drawing, PlainPasses(drawing), room)

    return LoadedModel("toy", Path(), decoder.config, decoder, ToyTokenizer(), "toy", capture)  # type: ignore[arg-type]


def with_rounds(sharpness: float = 3.0, **options: Any) -> EngineCore:
    config = {"method": "draft_model", "model": captured(ToyDecoder(sharpness)), "num_speculative_tokens": 4}
    return toy_core(config, sizes=SIZES, max_num_batched_tokens=128, **options)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_a_twin_is_always_right_in_rounds(params: dict[str, Any]) -> None:
    core = with_rounds(num_blocks=256)
    found = run_all(core, batch(**params))
    assert found == run_all(toy_core(None, num_blocks=256), batch(**params))
    # The first draft of a round may go past a request's end: nothing else is rejected.
    [stats] = core.speculator.stats().values()
    assert core.clock.num_ahead > 0, "meant to run in rounds"
    assert stats["num_accepted_tokens"] >= 0.7 * sum(map(len, found))


def test_a_wrong_draft_leaves_no_wrong_keys() -> None:
    """The drafting model asserts the position of every key that it reads, and after a rejection it reads new ones."""
    requests = [toy_request(str(i), p, max_tokens=30, seed=i, temperature=0.8) for i, p in enumerate(PROMPTS)]
    core = with_rounds(sharpness=1.0, num_blocks=256)
    plain = run_all(
        toy_core(None, num_blocks=256),
        [toy_request(r.request_id, r.prompt_token_ids, 30, r.seed, temperature=0.8) for r in requests],
    )
    assert run_all(core, requests) == plain
    assert core.clock.num_ahead > 5 and 0.1 < acceptance(core) < 0.95


def test_rounds_are_left_and_entered_again() -> None:
    rng = random.Random(5)
    waiting = batch()
    core = with_rounds(num_blocks=40)
    plain = run_all(toy_core(None, num_blocks=256), batch())
    asked = list(waiting)
    while waiting or core.has_requests:
        if waiting and rng.random() < 0.3:
            core.add_request(waiting.pop(0))
        core.step()
        core.check_integrity()
    assert [request.output_token_ids for request in asked] == plain
    assert core.clock.num_ahead > 3
