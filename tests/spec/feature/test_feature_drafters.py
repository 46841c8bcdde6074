"""Drafters trained on a tiny target and run by the engine: what the engine drafts is what was trained.

Training measures acceptance without an engine (train/acceptance.py), over padded batches. The engine runs the same
network over ragged rows, its own KV and slots that are reused. If both agree, positions, features, slots and masks are
right; anything stale or shifted by one costs acceptance at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.kv_tensor import allocate_kv
from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE
from paceline.engine.core import EngineCore
from paceline.engine.scheduler import SchedulerConfig
from paceline.models.drafters.store import save_drafter
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.engine_parts import EngineParts
from paceline.spec.proposer import StepContext
from paceline.spec.speculator import Speculator
from paceline.train.acceptance import measure_acceptance
from paceline.train.corpus import Batches, Corpus, draft_vocabulary
from paceline.train.methods import METHODS, build_recipe
from paceline.train.recipe import DraftVocabulary
from paceline.train.target import DenseTarget
from paceline.train.trainer import Trainer, TrainSettings
from paceline.verifiers import make_verifier
from tests.toy import ToyTokenizer, run_all, toy_request
from tests.train.tiny_target import tiny_corpus, tiny_target

NUM_TOKENS = 3  # of the drafted chains
BLOCK_SIZE = 4
PROPOSER_OF = {"draft": "draft_model"}  # the others are called like what they run


@pytest.fixture(scope="module")
def target() -> DenseTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def corpus(target: DenseTarget) -> tuple[Corpus, Corpus]:
    return tiny_corpus(target, num_prompts=240).split(0.15)


class Trained:
    def __init__(self, method: str, path: Path, expected: float) -> None:
        self.method, self.path, self.expected = method, path, expected

    def config(self, **more: Any) -> dict[str, Any]:
        chain = {"num_speculative_tokens": NUM_TOKENS, "node_budget": NUM_TOKENS}
        return {"method": PROPOSER_OF.get(self.method, self.method), "model": str(self.path), **chain, **more}


@pytest.fixture(scope="module", params=list(METHODS))
def trained(
    request: pytest.FixtureRequest,
    target: DenseTarget,
    corpus: tuple[Corpus, Corpus],
    tmp_path_factory: pytest.TempPathFactory,
) -> Trained:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    training, held_out = corpus
    ids, _ = draft_vocabulary(training, 56, target.config.vocab_size)
    options = {"draft": {"num_layers": 3}, "dflash": {"num_layers": 1, "num_features": 3}}.get(request.param, {})
    recipe = build_recipe(request.param, target, DraftVocabulary.of(target, ids), options)
    checks = Batches(held_out, 4096, target.device)
    settings = TrainSettings(steps=60, learning_rate=3e-3, eval_every=60)
    Trainer(recipe, target, Batches(training, 2048, target.device), checks, settings).run()
    acceptance = measure_acceptance(recipe, target, checks.once(), NUM_TOKENS)
    path = tmp_path_factory.mktemp("drafters") / f"{request.param}.safetensors"
    shared = request.param != "eagle3"
    save_drafter(path, request.param, recipe.network, head_is_target=shared, target=target.config, card={})
    return Trained(request.param, path, acceptance.mean_acceptance_length)


def make_core(
    target: DenseTarget, speculative: dict[str, Any] | None, *, num_blocks: int = 1024, max_batched: int = 512
) -> EngineCore:
    decoder = target.decoder
    kv_cache = allocate_kv(decoder.config, num_blocks * BLOCK_SIZE, decoder.dtype, decoder.device)
    services = EngineParts(
        vocab_size=decoder.config.vocab_size,
        max_model_len=256,
        block_size=BLOCK_SIZE,
        num_slots=num_blocks * BLOCK_SIZE,
        decoder=decoder,
        kv_cache=kv_cache,
        num_threads=1,
    )
    config = SpeculativeConfig.parse(speculative)
    return EngineCore(
        decoder,
        ToyTokenizer(),
        kv_cache,
        BLOCK_SIZE,
        SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=max_batched),
        Speculator(config, services),
        make_verifier(config.rejection_sample_method if config else "sample_match"),
    )


def requests(corpus: Corpus, limit: int = 100, **params: Any) -> list[Request]:
    prompts = [
        corpus.tokens[corpus.offsets[i] : corpus.offsets[i] + corpus.prompt_lengths[i]].tolist()
        for i in range(min(limit, len(corpus)))
    ]
    made = [toy_request(str(i), p, max_tokens=24, seed=i, **params) for i, p in enumerate(prompts)]
    for request in made:
        request.eos_token_ids = (0,)
    return made


def acceptance_of(core: EngineCore) -> float:
    """Mean acceptance length over the passes that verified a draft."""
    [counts] = [stats.counts for stats in core.speculator._stats.values() if stats.counts.num_drafts]
    return 1.0 + counts.num_accepted_tokens / counts.num_drafts


def test_the_engine_accepts_what_training_measured(
    trained: Trained, target: DenseTarget, corpus: tuple[Corpus, Corpus]
) -> None:
    plain = run_all(make_core(target, None), requests(corpus[1]))
    core = make_core(target, trained.config())
    assert run_all(core, requests(corpus[1])) == plain
    assert trained.expected > 1.25, "the drafter did not learn enough for this test to say anything"
    # Drafts at the very end of an answer are cut in both, but not counted alike; int8 weights flip a few choices.
    assert acceptance_of(core) == pytest.approx(trained.expected, rel=0.06)


@pytest.mark.parametrize(
    "how",
    ["chunked", "preempted", "prefix", "off for a while", "skipped for a while"],
    ids=lambda how: how.replace(" ", "-"),
)
def test_acceptance_survives_chunks_preemption_cached_prefixes_and_pauses(
    trained: Trained, target: DenseTarget, corpus: tuple[Corpus, Corpus], how: str
) -> None:
    """Whatever happens to a request's slots, its acceptance stays what it was."""
    batch = requests(corpus[1], limit=24)
    calm = make_core(target, trained.config())
    expected = run_all(calm, requests(corpus[1], limit=24))
    core = make_core(
        target,
        trained.config(),
        num_blocks=40 if how == "preempted" else 1024,
        max_batched=7 if how == "chunked" else 512,
    )
    if how == "prefix":
        run_all(core, requests(corpus[1], limit=24))
        core.speculator._stats.clear()
        longer = [
            toy_request(f"{i}+", expected_prompt(b, e), max_tokens=12)
            for i, (b, e) in enumerate(zip(batch, expected, strict=True))
        ]
        run_all(core, longer)
        assert sum(r.num_cached_tokens for r in longer) > 4 * len(longer)
    elif how in ("off for a while", "skipped for a while"):
        assert run_with_pause(core, batch, skipped=how == "skipped for a while") == expected
    else:
        assert run_all(core, batch) == expected
    if how == "preempted":
        assert sum(r.num_preemptions for r in batch) > 0
    # One that was skipped has only the end of each text to draft from.
    least = 0.8 if how == "skipped for a while" else 0.9
    assert acceptance_of(core) > least * acceptance_of(calm)


def expected_prompt(request: Request, output: Sequence[int]) -> list[int]:
    """The prompt and all of the answer but its last tokens: a second turn whose beginning is cached."""
    return [*request.prompt_token_ids, *output[:-2]]


def run_with_pause(core: EngineCore, batch: Sequence[Request], skipped: bool) -> list[list[int]]:
    """Six steps in the middle in which no drafter is asked, nor told what happened if `skipped`."""
    for request in batch:
        core.add_request(request)
    steps = 0
    ask, tell = core.speculator.propose, core.speculator.observe
    while core.has_requests:
        paused = 2 <= steps < 8
        core.speculator.propose = (lambda step: [EMPTY_TREE] * len(step.requests)) if paused else ask  # type: ignore[method-assign]
        core.speculator.observe = (  # type: ignore[method-assign]
            (lambda step: tell(StepContext([], gone=step.gone))) if paused and skipped else tell
        )
        if steps == 8:
            core.speculator._stats.clear()
        core.step()
        core.check_integrity()
        steps += 1
    return [request.output_token_ids for request in batch]


def test_trees_accept_more_than_chains(trained: Trained, target: DenseTarget, corpus: tuple[Corpus, Corpus]) -> None:
    if trained.method == "draft":
        config = trained.config(tree_widths=[3, 2, 1], node_budget=15)
    else:
        config = trained.config(node_budget=20)
    chain, tree = make_core(target, trained.config()), make_core(target, config)
    assert run_all(chain, requests(corpus[1])) == run_all(tree, requests(corpus[1]))
    assert acceptance_of(tree) > 1.05 * acceptance_of(chain)


def test_sampled_output_is_the_same_and_coupling_pays(
    trained: Trained, target: DenseTarget, corpus: tuple[Corpus, Corpus]
) -> None:
    plain = run_all(make_core(target, None), requests(corpus[1], temperature=1.0))
    coupled, greedy = (make_core(target, trained.config(draft_sampling=mode)) for mode in ("coupled", "greedy"))
    assert run_all(coupled, requests(corpus[1], temperature=1.0)) == plain
    assert run_all(greedy, requests(corpus[1], temperature=1.0)) == plain
    assert acceptance_of(coupled) > acceptance_of(greedy)


def test_rejection_takes_its_q(trained: Trained, target: DenseTarget, corpus: tuple[Corpus, Corpus]) -> None:
    core = make_core(target, trained.config(rejection_sample_method="rejection"))
    outputs = run_all(core, requests(corpus[1], temperature=1.0))
    assert all(outputs)
    assert acceptance_of(core) > 1.1
