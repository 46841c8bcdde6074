"""Our drafters as vLLM asks them: rows of tokens without names go in, chains come out."""

import ast
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.core.request import RequestStatus
from paceline.core.tree import DraftTree
from paceline.errors import InvalidOptionError
from paceline.vllm_proposer import BatchRows, Proposer, configuration
from tests.spec.replaying import accept

WIDTH = 256


def vllm_config(length: int = 4, additional: Any = None, max_model_len: int = WIDTH) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len, get_vocab_size=lambda: 1000),
        speculative_config=SimpleNamespace(num_speculative_tokens=length),
        additional_config={} if additional is None else {"paceline": additional},
    )


class Batch:
    """vLLM's side: rows of one array that keeps what earlier requests left behind, as vLLM's does."""

    def __init__(self, num_rows: int = 8) -> None:
        self.token_ids = np.full((num_rows, WIDTH), 7, np.int32)
        self.num_tokens = np.zeros(num_rows, np.int32)

    def put(self, row: int, tokens: list[int]) -> None:
        self.token_ids[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)

    def given(self, new: list[list[int]]) -> tuple[list[list[int]], Any, Any]:
        for row, tokens in enumerate(new):
            begin = self.num_tokens[row]
            self.token_ids[row, begin : begin + len(tokens)] = tokens
            self.num_tokens[row] += len(tokens)
        return new, self.num_tokens, self.token_ids


def advance(rows: BatchRows, batch: Batch, *new: list[int]) -> tuple[dict[int, str], list[str]]:
    requests, gone = rows.advance(*batch.given(list(new)))
    for row, request in requests.items():
        assert request.token_ids == batch.token_ids[row, : batch.num_tokens[row]].tolist()
    assert all(request.status is RequestStatus.FINISHED for request in gone)
    return {row: request.request_id for row, request in requests.items()}, [request.request_id for request in gone]


def test_a_request_is_followed_while_its_tokens_grow_and_rows_move() -> None:
    rows, batch = BatchRows(WIDTH), Batch()
    batch.put(0, [1, 2, 3])
    batch.put(1, [4, 5])
    assert advance(rows, batch, [10], [11]) == ({0: "1", 1: "2"}, [])
    assert advance(rows, batch, [12, 13], [14]) == ({0: "1", 1: "2"}, [])
    batch.put(0, [4, 5, 11, 14])  # the first one ended, and the second one took its row
    assert advance(rows, batch, [15]) == ({0: "2"}, ["1"])


def test_a_prompt_in_parts_is_no_request_until_its_first_token() -> None:
    rows, batch = BatchRows(WIDTH), Batch()
    batch.put(0, [1, 2, 3, 4])
    assert advance(rows, batch, []) == ({}, [])
    requests, _ = rows.advance(*batch.given([[9]]))
    assert requests[0].prompt_token_ids == [1, 2, 3, 4] and requests[0].output_token_ids == [9]


def test_a_conversation_that_goes_on_in_the_same_row_is_a_new_request() -> None:
    rows, batch = BatchRows(WIDTH), Batch()
    batch.put(0, [1, 2])
    advance(rows, batch, [3])
    batch.put(0, [1, 2, 3, 50, 51])
    assert advance(rows, batch, [52]) == ({0: "2"}, ["1"])


def test_a_preempted_request_comes_back_as_a_new_one() -> None:
    rows, batch = BatchRows(WIDTH), Batch()
    batch.put(0, [1, 2])
    batch.put(1, [3, 4])
    advance(rows, batch, [5], [6])
    assert advance(rows, batch, [7]) == ({0: "1"}, ["2"])
    batch.put(1, [3, 4, 6])
    assert advance(rows, batch, [8], [9]) == ({0: "1", 1: "3"}, [])


def test_of_requests_with_the_same_tokens_each_keeps_its_own_row() -> None:
    rows, batch = BatchRows(WIDTH), Batch()
    for row in (0, 1):
        batch.put(row, [1, 2])
    assert advance(rows, batch, [5], [5]) == ({0: "1", 1: "2"}, [])
    assert advance(rows, batch, [6], [6]) == ({0: "1", 1: "2"}, [])
    batch.put(0, [8, 8])
    assert advance(rows, batch, [], [7]) == ({1: "2"}, ["1"])


def test_requests_that_change_places_are_told_apart_although_vllm_writes_over_its_rows() -> None:
    rows, batch = BatchRows(WIDTH), Batch()
    batch.put(0, [1, 2])
    batch.put(1, [3, 4])
    advance(rows, batch, [5], [6])
    batch.put(0, [3, 4, 6])
    batch.put(1, [1, 2, 5])
    assert advance(rows, batch, [7], [8]) == ({0: "2", 1: "1"}, [])


def decode(proposer: Proposer, prompt: list[int], output: list[int]) -> list[list[int]]:
    """One request alone, greedy with a known output: the drafts that were verified."""
    batch, drafts, draft, done = Batch(), [], [], 0
    batch.put(0, prompt)
    while done < len(output):
        _, new = accept(DraftTree.chain(draft), output[done:])
        done += len(new)
        [draft] = proposer.propose(*batch.given([new]), slot_mappings=None)
        drafts.append(draft)
    return drafts


PATTERN = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("method", ["ngram", "suffix", "merge"])
def test_what_stood_before_is_drafted_as_a_chain_of_the_length_that_vllm_gives(method: str) -> None:
    drafts = decode(Proposer(vllm_config(4, {"method": method})), [*PATTERN, 1, 5], [*PATTERN[1:], 99])
    assert drafts[0] == PATTERN[2:6]
    assert all(len(draft) <= 4 for draft in drafts)


@pytest.mark.parametrize("method", ["ngram", "suffix", "merge"])
def test_of_two_continuations_one_is_drafted(method: str) -> None:
    prompt = [1, 2, 30, 31, 32, 1, 2, 40, 41, 42, 1]
    batch, proposer = Batch(), Proposer(vllm_config(3, {"method": method, "node_budget": 12}))
    batch.put(0, prompt)
    [draft] = proposer.propose(*batch.given([[2]]))
    assert draft in ([30, 31, 32], [40, 41, 42])


def test_a_draft_ends_before_the_context_does() -> None:
    prompt = PATTERN * 3
    proposer = Proposer(vllm_config(6, max_model_len=len(prompt) + 4))
    batch = Batch()
    batch.put(0, prompt)
    [draft] = proposer.propose(*batch.given([[5]]))
    assert draft == PATTERN[1:3], "vLLM has room for 3 more tokens, and the target adds one"


def test_the_output_of_a_request_that_ended_is_drafted_for_the_next_one() -> None:
    output = list(range(100, 120))
    proposer = Proposer(vllm_config())
    first = decode(proposer, [1, 2, 3], output)
    second = decode(proposer, [4, 5, 3], output)
    assert sum(map(len, first)) == 0 and len(second) < len(output) / 2
    nothing_kept = Proposer(vllm_config(4, {"method": "suffix", "suffix_decoding_max_cached_requests": 0}))
    decode(nothing_kept, [1, 2, 3], output)
    assert sum(map(len, decode(nothing_kept, [4, 5, 3], output))) == 0


def test_drafts_do_not_depend_on_what_else_is_in_the_batch_or_where_rows_stand() -> None:
    """Six requests join, move and leave at random; each gets the drafts that it gets alone. `ngram` keeps no memory."""
    rng = random.Random(3)
    texts = [[rng.randrange(4) + 1 for _ in range(60)] for _ in range(6)]
    config = {"method": "ngram", "prompt_lookup_max": 4}
    alone = [decode(Proposer(vllm_config(4, config)), text[:20], text[20:]) for text in texts]
    proposer, together = Proposer(vllm_config(4, config)), [[] for _ in texts]  # type: ignore[var-annotated]
    waiting, running = list(range(6)), []  # type: ignore[var-annotated]
    done = dict.fromkeys(range(6), 20)
    while waiting or running:
        while waiting and len(running) < 4 and rng.random() < 0.7:
            running.append(waiting.pop(0))
        rng.shuffle(running)
        batch, news = Batch(), []
        for row, name in enumerate(running):
            batch.put(row, texts[name][: done[name]])
            draft = together[name][-1] if together[name] else []
            news.append(accept(DraftTree.chain(draft), texts[name][done[name] :])[1])
            done[name] += len(news[-1])
        for name, draft in zip(running, proposer.propose(*batch.given(news)), strict=True):
            together[name].append(draft)
        running = [name for name in running if done[name] < 60]
    assert together == alone


@pytest.mark.faults
def test_a_drafter_that_raises_costs_drafts_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = Proposer(vllm_config(4, {"method": "ngram"}))
    monkeypatch.setattr(proposer.speculator.proposers["ngram"], "propose", lambda step, budgets: 1 / 0)
    assert decode(proposer, PATTERN, PATTERN) == [[]] * len(PATTERN)


@pytest.mark.parametrize(
    ("additional", "words"),
    [
        ({"method": "eagle3"}, "only tokens"),
        ({"method": "recycling"}, "use one of ngram, suffix, merge"),
        ({"method": "none"}, "use one of"),
        ({"method": "merge", "members": ["ngram", "recycling"]}, "use one of ngram, suffix"),
        ({"method": "suffix", "num_speculative_tokens": 3}, "num_speculative_tokens is vLLM's to decide"),
        ({"method": "suffix", "rejection_sample_method": "typical"}, "rejection_sample_method is vLLM's to decide"),
        ({"method": "suffix", "epsilon": 0.1}, "epsilon is vLLM's to decide"),
        ({"method": "suffix", "sufix_decoding_max_tree_depth": 3}, "suffix_decoding_max_tree_depth"),
        ("suffix", "must be a dictionary"),
    ],
)
def test_what_cannot_be_honoured_inside_vllm_is_refused(additional: Any, words: str) -> None:
    with pytest.raises(InvalidOptionError, match=words):
        configuration(vllm_config(4, additional))


def test_without_options_it_is_suffix_and_merge_takes_what_needs_only_tokens() -> None:
    assert configuration(vllm_config(5)).method == "suffix"
    assert configuration(vllm_config(5)).num_speculative_tokens == 5
    merge = configuration(vllm_config(5, {"method": "merge"}))
    assert [member.method for member in merge.options["members"]] == ["ngram", "suffix"]
    other = vllm_config(5)
    other.additional_config = object()  # of another plug-in
    assert configuration(other).method == "suffix"


def test_nothing_in_the_package_imports_vllm() -> None:
    for path in Path(paceline.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [name for name in names if name.split(".")[0] == "vllm"], path
