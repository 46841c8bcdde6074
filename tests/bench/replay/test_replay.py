"""Replay: the same acceptance as the live engine, from a recording alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.replay.check_live import live_acceptance_length
from paceline.bench.replay.opinions import Opinions
from paceline.bench.replay.recording import Recorded, joined, load_recording, record, rejected_paths, save_recording
from paceline.bench.replay.replay import Replay
from paceline.bench.run.backend import Sampling
from paceline.bench.workloads.workload import Prompt
from paceline.core.tree import DraftTree
from paceline.errors import InvalidOptionError, PacelineError
from paceline.lab.pass_cost import PassCost
from paceline.llm import LLM
from tests.bench.toy_llm import toy_model

LIMITS: dict[str, Any] = {"num_kv_blocks": 128, "block_size": 4, "max_num_batched_tokens": 64}
PROMPTS = [Prompt(str(i), "toy", text, chat=False) for i, text in enumerate(["abcabcab", "hello", "qrqrqr", "mmm"])]


@pytest.fixture(scope="module")
def recorded() -> list[Recorded]:
    llm = LLM(toy_model(), {"method": "recycling", "node_budget": 8}, max_num_seqs=4, **LIMITS)
    return record(llm, PROMPTS, Sampling(max_tokens=40, temperature=1.0))


@pytest.mark.parametrize("config", [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "suffix"}])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_replay_emits_what_the_live_run_emitted(
    recorded: list[Recorded], config: dict[str, Any], concurrency: int
) -> None:
    """These drafters see only tokens, so every draft, and with it every count, is the same."""
    replayed = Replay(recorded, config, concurrency=concurrency).run()
    live, _ = live_acceptance_length(toy_model(), config, recorded, concurrency, **LIMITS)
    assert replayed.counts.num_accepted_tokens > 0
    assert replayed.counts.mean_acceptance_length == pytest.approx(live, rel=0.03 if concurrency > 1 else 1e-12)


def test_drafters_that_read_logits_learn_from_rejected_nodes_too(recorded: list[Recorded]) -> None:
    """Alone, as recorded: what was rejected then is rejected now, at the same place, with the same tokens after it."""
    config = {"method": "recycling", "node_budget": 8}
    llm = LLM(toy_model(), config, max_num_seqs=1, **LIMITS)
    alone = record(llm, PROMPTS, Sampling(max_tokens=40, temperature=1.0))
    assert [one.output_token_ids for one in alone] == [one.output_token_ids for one in recorded]
    assert sum(len(one.rejected) for one in alone) > 100
    live, _ = live_acceptance_length(toy_model(), config, alone, 1, **LIMITS)
    assert Replay(alone, config).run().counts.mean_acceptance_length == pytest.approx(live, rel=0.03)
    blind = [replace(one, rejected=[]) for one in alone]
    assert Replay(blind, config).run().counts.num_drafts < Replay(alone, config).run().counts.num_drafts


def test_rejected_nodes_are_noted_by_where_they_leave_the_output() -> None:
    #          root -> 5 -> 6 (accepted: 5)      7 -> 8
    tree = DraftTree([5, 6, 7, 8], [-1, 0, -1, 2])
    assert rejected_paths(tree, [0], 10) == [(11, []), (11, [6]), (10, [7]), (10, [7, 8])]


def test_notes_of_several_methods_are_joined_and_answers_must_be_the_same(recorded: list[Recorded]) -> None:
    one = replace(recorded[0], rejected=[(0, [1], [2])])
    other = replace(one, rejected=[(3, [4], [5])])
    assert joined([one, other]).rejected == [(0, [1], [2]), (3, [4], [5])]
    with pytest.raises(PacelineError, match="another answer"):
        joined([one, replace(one, output_token_ids=[*one.output_token_ids, 0])])


def test_an_earlier_opinion_is_taken_where_the_very_node_is_not_recorded() -> None:
    notes = [(1, [7], [70]), (1, [7, 8], [80]), (3, [7], [71])]
    one = Recorded("a", "toy", [9], [1, 2, 1, 2], [[10], [20], [11], [21]], 0.0, 16, rejected=notes)
    opinions = Opinions({"a": one})
    assert opinions.after("a", 1, [7, 8]) == [80]  # this very node
    assert opinions.after("a", 2, [7, 8]) == [80]  # the same pair, earlier
    assert opinions.after("a", 2, [3, 7]) == [70]  # the same token, earlier: what was said later is not known yet
    assert opinions.after("a", 4, [3, 7]) == [71]
    assert opinions.after("a", 3, [1, 2]) == [11]  # the output's own tokens say something as well
    assert opinions.after("a", 0, [7, 8]) is None and opinions.after("a", 0, [1]) is None


def test_plain_decoding_costs_what_the_curve_says(recorded: list[Recorded]) -> None:
    cost = PassCost.of({1: 0.010, 2: 0.012, 4: 0.02})
    result = Replay(recorded, {"method": "none"}, concurrency=2, pass_cost=cost).run()
    assert (result.num_passes, result.counts.num_steps) == (80, 160)
    assert result.pass_s == pytest.approx(80 * 0.012) == result.plain_s


def test_a_recording_is_the_same_after_saving_and_loading(recorded: list[Recorded], tmp_path: Path) -> None:
    save_recording(recorded, tmp_path / "r.jsonl")
    assert load_recording(tmp_path / "r.jsonl") == recorded
    (tmp_path / "r.jsonl").write_text('{"prompt": 1}\n')
    with pytest.raises(InvalidOptionError, match="paceline bench record"):
        load_recording(tmp_path / "r.jsonl")


def test_a_method_that_cannot_be_replayed_is_refused_with_a_reason(recorded: list[Recorded]) -> None:
    with pytest.raises(InvalidOptionError, match="a replay needs"):
        Replay([], {"method": "ngram"})
