"""The search for layers that draft: finds a planted answer, measures agreement rightly, stores and reads it back."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.errors import InvalidOptionError
from paceline.spec.model.layer_search import (
    AgreementMeter,
    Candidate,
    judged,
    load_stored,
    search_layers,
    store,
    stored_path,
)
from tests.toy import ToyDecoder


def test_useless_layers_are_taken_away() -> None:
    """Layers 3, 5 and 7 of ten do nothing; each of the others is worth a tenth of the agreement."""
    useless = {3, 5, 7}

    def agreement(layers: Sequence[int]) -> float:
        return 1.0 - 0.1 * len([layer for layer in range(10) if layer not in layers and layer not in useless])

    steps: list[int] = []
    best = search_layers(
        agreement, lambda n: n / 10, 10, evaluations=150, on_step=lambda done, found: steps.append(done)
    )
    assert not useless & set(best.layers)
    assert {0, 9} <= set(best.layers)
    assert best.speedup == pytest.approx(judged(best.layers, best.agreement, len(best.layers) / 10).speedup)
    assert max(steps) <= 150 and steps[-1] >= steps[0]


def test_speedup_is_expected_tokens_over_cost() -> None:
    candidate = judged((0, 1), agreement=0.8, cost=0.2)
    by_hand = {k: sum(0.8**i for i in range(k + 1)) / (1 + 0.2 * k) for k in range(1, 13)}
    assert candidate.num_speculative_tokens == max(by_hand, key=lambda k: by_hand[k])
    assert candidate.speedup == pytest.approx(max(by_hand.values()))
    assert judged((0,), agreement=0.1, cost=0.9).speedup < 1.0


def test_agreement_of_all_layers_with_the_target_is_total() -> None:
    """The toy target's own greedy text; the toy asserts that every row attends to the right positions."""
    decoder = ToyDecoder()
    texts = []
    for prompt in ([1, 2, 3], [4] * 20, list(range(10))):
        tokens = list(prompt)
        for _ in range(30):
            tokens.append(int(decoder.logits(tokens).argmax()))
        texts.append((tokens, len(prompt)))
    meter = AgreementMeter(decoder, texts)
    assert meter.num_positions == 90
    assert meter.agreement([0]) == 1.0
    other = AgreementMeter(ToyDecoder(), [([*t[:-1], (t[-1] + 1) % 24], n) for t, n in texts])
    assert other.agreement([0]) == pytest.approx(1.0 - 3 / 90)
    with pytest.raises(InvalidOptionError, match="no output to learn from"):
        AgreementMeter(decoder, [([1, 2, 3], 3)])


def test_stored_layers_are_read_back_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = stored_path(tmp_path, ToyDecoder.config)
    assert load_stored(path) is None
    store(path, Candidate((0, 2, 5), 0.6, 1.2, 3), {"model": "toy"})
    assert load_stored(path) == [0, 2, 5]
    assert json.loads(path.read_text())["num_speculative_tokens"] == 3
    assert not list(tmp_path.rglob("*.tmp"))
    path.write_text("{")
    with pytest.raises(InvalidOptionError, match="tune layer-skip"):
        load_stored(path)
