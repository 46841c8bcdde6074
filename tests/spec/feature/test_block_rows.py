"""A drafter's rows travel with the target's blocks: after an import it drafts exactly as where the prompt was read."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.kv_tensor import allocate_kv
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.engine.core import EngineCore
from paceline.kv.offload import OffloadOption
from paceline.spec.engine_parts import EngineParts
from paceline.spec.feature.block_rows import FeatureBlockRows
from paceline.spec.feature.feature_queue import FeatureQueue
from paceline.spec.proposer import StepContext
from paceline.train.target import DenseTarget
from tests.core.test_kv_tensor import resident_bytes
from tests.kv.test_exchange import received, sent
from tests.spec.feature.test_feature_drafters import make_core
from tests.toy import VOCAB, ToyDecoder, run_all, toy_request
from tests.train.tiny_target import tiny_target

PROMPT = [5, 9, 33, 5, 9, 2, 61, 7, 7, 12, 3, 44, 5, 9, 33, 5, 9, 2, 8]  # four full blocks of four, and three tokens
WITH_ROWS = ("eagle3", "eagle", "dflash")


@pytest.fixture(scope="module")
def target() -> DenseTarget:
    return tiny_target()


def config(method: str) -> dict[str, Any]:
    return {"method": method, "model": "untrained", "draft_min_prob": 0.0}


def prefilled(target: DenseTarget, speculative: dict[str, Any]) -> EngineCore:
    core = make_core(target, speculative)
    assert core.exchange.snapshot() == []
    run_all(core, [toy_request("prefill", PROMPT, max_tokens=1)])
    return core


Nodes = tuple[list[int], list[int]]


def drafts(core: EngineCore) -> tuple[Request, list[Nodes]]:
    """What was drafted in each step: tokens and parents (this target's kernels promise no bits)."""
    drafted: list[Nodes] = []
    ask = core.speculator.propose

    def propose(step: StepContext) -> list[DraftTree]:
        trees = ask(step)
        drafted.extend((tree.token_ids, tree.parents) for tree in trees)
        return trees

    core.speculator.propose = propose  # type: ignore[method-assign]
    request = toy_request("r", PROMPT, max_tokens=12, ignore_eos=True)
    run_all(core, [request])
    return request, list(drafted)


@pytest.mark.parametrize("method", WITH_ROWS)
def test_after_an_import_the_same_is_drafted_as_where_the_prompt_was_read(target: DenseTarget, method: str) -> None:
    keys, data = sent(prefilled(target, config(method)), PROMPT)
    core = make_core(target, config(method))
    assert received(core, keys, data) == 4
    request, drafted = drafts(core)
    _, expected = drafts(make_core(target, config(method)))
    assert request.num_cached_tokens == 16 and drafted == expected and any(tokens for tokens, _ in drafted)


@pytest.mark.parametrize("method", WITH_ROWS)
def test_rows_of_another_drafter_are_left_and_the_target_is_used(target: DenseTarget, method: str) -> None:
    other = "dflash" if method != "dflash" else "eagle"
    keys, data = sent(prefilled(target, config(other)), PROMPT)
    core = make_core(target, config(method))
    assert received(core, keys, data) == 4
    request, drafted = drafts(core)
    expected_request, expected = drafts(make_core(target, config(method)))
    assert request.output_token_ids == expected_request.output_token_ids and request.num_cached_tokens == 16
    assert drafted != expected, "this test can fail: without its rows it drafts something else"


@pytest.mark.parametrize("method", WITH_ROWS)
def test_rows_that_do_not_fit_are_refused_and_rows_have_their_networks_name(target: DenseTarget, method: str) -> None:
    core = prefilled(target, config(method))
    [rows] = core.speculator.block_rows()
    block = core.kv.pool.lookup(core.exchange.usable(PROMPT)[0].hash)
    assert block is not None
    use = int(core.kv.pool.num_uses[block])
    data = rows.read(block, use)
    assert data is not None and rows.write(block, use, data)
    assert not rows.write(block, use, data[:-1]) and rows.read(block, use) == data
    assert rows.read(block, use + 1) is None, "rows of another use of the block are not its own"
    names = {make_core(target, config(kind)).speculator.block_rows()[0].name for kind in WITH_ROWS}
    assert len(names) == 3 and rows.name in names


def test_members_of_a_merge_bring_their_rows(target: DenseTarget) -> None:
    merged = {"method": "merge", "members": ["ngram", config("eagle3"), config("dflash")]}
    core = make_core(target, merged)
    assert [rows.name.split()[0] for rows in core.speculator.block_rows()] == ["eagle3", "dflash"]
    assert make_core(target, {"method": "ngram"}).speculator.block_rows() == []


def test_a_kept_prompt_comes_back_with_its_drafters_rows(target: DenseTarget, tmp_path: Path) -> None:
    core = make_core(target, config("eagle3"), num_blocks=16)
    core.keep_blocks(OffloadOption(1 << 22, tmp_path))
    run_all(core, [toy_request("prefill", PROMPT, max_tokens=1)])  # its rows come with the pass that ends it
    core.kv.pool.release(core.kv.pool.allocate(16) or [])
    request, drafted = drafts(core)
    _, expected = drafts(make_core(target, config("eagle3")))
    assert request.num_cached_tokens == 16 and drafted == expected


def test_rows_that_still_wait_for_a_blocks_last_owner_do_not_overwrite_what_came(target: DenseTarget) -> None:
    keys, data = sent(prefilled(target, config("eagle3")), PROMPT)
    core = make_core(target, config("eagle3"), num_blocks=8, max_batched=8)
    assert core.exchange.snapshot() == []
    core.add_request(toy_request("aborted", [40 + i for i in range(19)]))
    core.step()  # eight rows are in the drafter's queue
    core.abort("aborted")
    others = core.kv.pool.allocate(4) or []  # so that the two blocks of that request are handed out next
    ticket = core.exchange.reserve(keys)
    verified = [i for i in ticket.missing if core.exchange.write(ticket, i, data[i])]
    assert core.exchange.commit(ticket, verified) == 4
    core.kv.pool.release(others)
    request, drafted = drafts(core)
    _, expected = drafts(make_core(target, config("eagle3")))
    assert request.num_cached_tokens == 16 and drafted == expected


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_the_first_requests_need_has_memory_before_they_come() -> None:
    pool = allocate_kv(ToyDecoder.config, 16 << 20, torch.float32, torch.device("cpu"))  # 128 MiB
    services = EngineParts(VOCAB, 4096, num_slots=15 << 20, first_slots=4 << 20)
    before = resident_bytes()
    FeatureBlockRows("any", torch.nn.Identity(), pool, FeatureQueue((), replace(services, num_slots=1)), services, int)
    assert 36 << 20 < resident_bytes() - before < 56 << 20  # 4 of 16 parts, and one of scratch
