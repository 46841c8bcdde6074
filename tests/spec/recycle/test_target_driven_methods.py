"""Recycling and lookahead learn from the target's own logits; checked on targets whose next token is a known rule."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.tree import DraftTree
from paceline.spec.model.top_tokens import top_tokens
from paceline.spec.proposer import RequestPass, StepContext
from paceline.spec.recycle.lookahead import Pool
from paceline.spec.speculator import Speculator
from tests.spec.replaying import accept, request, speculator, tokens_per_step

VOCAB = 1000
STEP_TABLE = random.Random(0).choices(range(VOCAB), k=VOCAB)


def following(tokens: list[int]) -> int:
    """The target's rule: the next token depends on the last one alone, and goes through a long cycle."""
    return STEP_TABLE[tokens[-1]]


def logits_of(tokens: list[int], tree: DraftTree) -> torch.Tensor:
    """The root's row and one per node: the rule's token first, then three neighbours."""
    rows = torch.zeros(1 + len(tree), VOCAB)
    contexts = [tokens, *([*tokens, *(tree.token_ids[i] for i in tree.ancestors(n))] for n in range(len(tree)))]
    for row, context in zip(rows, contexts, strict=True):
        for rank in range(4):
            row[(following(context) + 7 * rank) % VOCAB] = 10.0 - rank
    return rows


def run(spec: Speculator, prompt: list[int], num_tokens: int, request_id: str = "a") -> list[int]:
    """Generate by the rule, verifying what is drafted; tokens emitted by each step."""
    job = request(prompt, request_id, num_tokens)
    tree, emitted = DraftTree(), []
    start, num_committed = 0, len(prompt)
    while job.num_output_tokens < num_tokens:
        truth: list[int] = []
        while len(truth) <= len(tree):
            truth.append(following([*job.token_ids, *truth]))
        logits = logits_of(job.token_ids, tree)
        accepted, new = accept(tree, truth[: num_tokens - job.num_output_tokens])
        job.token_ids += new
        emitted.append(len(new))
        done = RequestPass(job, range(1), start, num_committed, tree, accepted, new_token_ids=new, logits_row=0)
        done.counts.count(tree, accepted, len(new))
        start, num_committed = job.num_tokens - 1, 1
        step = StepContext([job], [done], logits=logits)
        spec.observe(step)
        [tree] = spec.propose(step)
    spec.observe(StepContext([], gone=[job]))
    return emitted


def test_recycling_uses_what_other_requests_were_shown() -> None:
    spec = speculator({"method": "recycling"})
    first = run(spec, [5], 60, "first")
    second = run(spec, [5], 60, "second")
    assert tokens_per_step(second) > 3.0 > tokens_per_step(first) >= 1.0


def test_recycling_learns_from_rejected_nodes() -> None:
    """One pass with a wrong draft teaches what follows the wrong tokens."""
    spec = speculator({"method": "recycling", "node_budget": 8})
    job = request([3])
    wrong = DraftTree.chain([11, 12])
    job.token_ids.append(following([3]))
    new = [following([3])]
    done = RequestPass(job, range(3), 0, 1, wrong, [], new_token_ids=new, logits_row=0)
    spec.observe(StepContext([], [done], logits=logits_of([3], wrong)))
    [tree] = spec.propose(StepContext([request([99, 12], "b")]))
    assert tree.token_ids[0] == following([12])
    [other] = spec.propose(StepContext([request([99, 11], "c")]))
    assert other.token_ids[0] == following([11])


def test_recycling_measures_its_ranks_and_shapes_its_tree_by_them() -> None:
    spec = speculator({"method": "recycling"})
    run(spec, [5], 400)
    proposer = spec.proposers["recycling"]
    rates = proposer.acceptance  # type: ignore[attr-defined]
    assert rates[0] > 0.5 > rates[1]


def test_recycling_knows_the_prompt_before_any_pass() -> None:
    spec = speculator({"method": "recycling", "num_speculative_tokens": 3})
    job = request([1, 2, 3, 4, 1])
    spec.observe(StepContext([], [RequestPass(job, range(5), 0, 5)]))
    [tree] = spec.propose(StepContext([job]))
    assert tree.token_ids[0] == 2


def test_lookahead_finds_n_grams_that_the_text_never_had() -> None:
    """The window runs ahead of the text, so drafts are right although nothing in the text repeats."""
    spec = speculator({"method": "lookahead", "window_size": 12, "ngram_size": 4, "guess_set_size": 6})
    emitted = run(spec, [5, 6, 7], 120)
    assert len(set(emitted)) > 1 and tokens_per_step(emitted) > 1.5


def test_lookahead_respects_small_budgets() -> None:
    spec = speculator({"method": "lookahead"})
    job = request([1, 2, 3, 4, 1, 2], max_tokens=3)
    [tree] = spec.propose(StepContext([job]))
    assert max(tree.depths(), default=0) <= 2


def test_the_pool_keeps_the_newest_n_grams() -> None:
    pool = Pool(per_key=2)
    for rest in [(1, 1), (2, 2), (1, 1), (3, 3)]:
        pool.add(9, rest)
    assert pool.get(9) == [(3, 3), (1, 1)]
    assert pool.get(8) == []


@given(
    st.integers(1, 5), st.sampled_from([3, 127, 128, 129, 1000, 2048, 5000]), st.integers(1, 9), st.integers(0, 2**31)
)
def test_top_tokens_are_the_top_tokens(rows: int, vocab: int, k: int, seed: int) -> None:
    values = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    best = top_tokens(values, k)
    expected = torch.topk(values, min(k, vocab), dim=1)
    assert torch.equal(values.gather(1, best), expected.values)


@pytest.mark.parametrize("method", ["recycling", "lookahead"])
def test_steps_without_logits_are_accepted(method: str) -> None:
    spec = speculator({"method": method})
    job = request([1, 2, 3])
    done = RequestPass(job, range(3), 0, 3, new_token_ids=[3], logits_row=-1)
    spec.observe(StepContext([job], [done]))
    spec.propose(StepContext([job]))
