"""Rounds of the size that pays, or plain decoding where none does: the same outputs, whoever drafts."""

from typing import Any

import pytest
import torch

from paceline.models.drafters.paged import Placement
from paceline.spec.captured_rounds import CapturedRounds
from paceline.spec.feature import medusa
from paceline.spec.round_sizes import OPTIONS, RoundSizes, largest_of
from tests.engine.test_padded_passes import PLAIN, asked, small_decoder
from tests.engine.test_rounds import watch, with_rounds
from tests.toy import run_all, toy_core

METHODS: dict[str, dict[str, object]] = {
    "ngram": {"method": "ngram"},
    "medusa": {"method": "medusa", "model": "untrained"},
    "layer_skip": {"method": "layer_skip", "draft_layers": [0, 2]},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_few_requests_get_the_size_that_pays_and_many_decode_plainly(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(medusa, "placement", lambda _: Placement(torch.device("cpu"), native=False))
    decoder, largest, options = small_decoder(), largest_of(method), OPTIONS[method]
    sized = {"size_by_price": True, "node_budget": largest.num_nodes, "num_speculative_tokens": largest.max_depth}
    core = with_rounds(METHODS[method] | sized, decoder)
    rounds = core.speculator.proposers[method].rounds()
    assert isinstance(rounds, CapturedRounds) and rounds.sizes is not None, "measured when the engine was built"
    paying = options[1]  # of four nodes
    times: dict[int, list[float | None]] = {
        1: [1.0, *(0.5 if option is paying else 9.0 for option in options)],
        2: [1.0, *(0.5 if option is paying else 9.0 for option in options)],
        8: [1.0, *(99.0 for _ in options)],
    }

    def run(count: int) -> list[int]:
        """The numbers of nodes that were verified."""
        rounds.sizes = RoundSizes(times, options)
        seen = watch(core)
        requests: Any = asked([PLAIN], count, max_tokens=20)
        expected = run_all(toy_core(None, decoder=decoder), asked([PLAIN], count, max_tokens=20))
        before = core.clock.num_ahead
        assert run_all(core, requests) == expected
        assert core.clock.num_ahead > before + 3, "the host runs ahead in both cases"
        return [len(tokens) for tokens, _, _ in seen.values()]

    assert 2 < max(run(2)) <= paying.nodes
    assert sum(nodes > 0 for nodes in run(7)) <= 7, "but for the first, which was drafted before so many came"
