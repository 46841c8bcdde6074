"""The engine in rounds on the Triton kernels of all that happens between two passes: the trees of the host. Run by
test_triton_drafts.py in a process of its own, in Triton's interpreter."""

from typing import Any

import pytest
import torch

from paceline.models.drafters.paged import Placement
from paceline.ops.triton import chain, lookup, rounds
from paceline.spec import captured_rounds
from paceline.spec.feature import medusa, medusa_rounds
from paceline.spec.feature.fused_heads import FusedHeads
from paceline.spec.lookup import ngram_rounds
from paceline.spec.model import chain_rounds
from tests.engine.test_padded_passes import PLAIN, asked, small_decoder
from tests.engine.test_rounds import (
    FIRST_LAYERS,
    HOT,
    LAYERS,
    MEDUSA_TREE,
    NGRAM_TREE,
    assert_same_trees,
    watch,
    with_rounds,
    without_rounds,
)
from tests.toy import run_all, toy_core


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, kernels in ((captured_rounds, rounds), (ngram_rounds, lookup), (chain_rounds, chain)):
        monkeypatch.setattr(module, "_kernels", lambda _, kernels=kernels: kernels)
    monkeypatch.setattr(medusa_rounds, "_heads", lambda *args: FusedHeads(*args[:-1]))
    monkeypatch.setattr(medusa, "placement", lambda _: Placement(torch.device("cpu"), native=False))


@pytest.mark.parametrize("config", [NGRAM_TREE, MEDUSA_TREE, LAYERS, FIRST_LAYERS], ids=lambda c: c["method"])
def test_rounds_make_the_trees_of_the_host(config: dict[str, object]) -> None:
    options: list[dict[str, Any]] = [PLAIN] if config is NGRAM_TREE else [HOT, PLAIN]
    decoder = small_decoder()
    plain = run_all(toy_core(None, decoder=decoder), asked(options, 3, max_tokens=16))
    stepwise, core = without_rounds(with_rounds(config, decoder)), with_rounds(config, decoder)
    expected, seen = watch(stepwise), watch(core)
    assert run_all(stepwise, asked(options, 3, max_tokens=16)) == plain
    assert run_all(core, asked(options, 3, max_tokens=16)) == plain
    assert core.clock.num_ahead > 5, "meant to run in rounds"
    assert_same_trees(seen, expected, max_depth=4)
