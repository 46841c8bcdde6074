"""The measurement of a pass before the first request runs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.core.forward import ForwardBatch
from paceline.lab.pass_cost import PassCost
from paceline.spec.pass_calibration import calibrate

VOCAB = 5000
CHEAP_ROWS = PassCost.of({1: 0.50, 8: 0.55, 16: 0.70, 32: 1.0, 64: 1.8})


def test_a_slow_second_does_not_change_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    class Target:
        draws_tokens = False

        def forward(self, batch: ForwardBatch, kv_cache: torch.Tensor) -> Any:
            nonlocal now_s
            slowness = 1.7 if 0.2 < now_s < 0.8 else 1.0
            now_s += slowness * CHEAP_ROWS(len(batch.token_ids)) / 100
            return SimpleNamespace(logits=torch.zeros(1, 1), tokens=None)

    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    services: Any = SimpleNamespace(
        pass_cost=None,
        pass_sizes=(),
        decoder=Target(),
        kv_cache=torch.zeros(1),
        block_size=16,
        num_slots=4096,
        max_model_len=1024,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
    )
    measured = calibrate(services)
    for rows in (2, 8, 16, 64):
        assert measured[rows] / measured[1] == pytest.approx(CHEAP_ROWS(rows) / CHEAP_ROWS(1), rel=0.02)
