"""Every recipe's drafts over whole batches against a plain, one-position-at-a-time twin of what drafting means."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.models.drafters.layers import Attend
from paceline.train.acceptance import count_accepted, coupled_chance, greedy_drafts, measure_acceptance
from paceline.train.corpus import Batch
from paceline.train.dflash import DFlashRecipe, DFlashSettings
from paceline.train.draft import DraftRecipe, DraftSettings
from paceline.train.eagle3 import Eagle3Recipe, Eagle3Settings
from paceline.train.losses import soft_cross_entropy
from paceline.train.medusa import MedusaRecipe, MedusaSettings
from paceline.train.recipe import DraftVocabulary, Recipe
from paceline.train.target import DenseTarget
from tests.train.tiny_target import CONFIG

NUM_TOKENS = 4
LAST = 14  # position of the last token in these checks


def softmax_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query [heads, dim] over keys and values [n, kv heads, dim]"""
    share = query.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
    scores = torch.einsum("hd,nhd->hn", query, keys) * query.shape[-1] ** -0.5
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), values)


def grow(keys: list[Tensor], values: list[Tensor]) -> Attend:
    """Attention of one row that first adds its own key and value."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys.append(key)
        values.append(value)
        return softmax_attention(query, torch.stack(keys), torch.stack(values))

    return attend


def check(recipe: Recipe, target: DenseTarget, batch: Batch, twin: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """`twin(tokens, features, normed)` of one sequence -> NUM_TOKENS drafts after token LAST."""
    with torch.no_grad():
        seen = target.forward(batch.tokens, recipe.hidden_layers)
        drafts = greedy_drafts(recipe, batch, seen, NUM_TOKENS)
        for row in range(len(batch.tokens)):
            expected = twin(batch.tokens[row], seen.features[row], seen.normed[row])
            assert drafts[row, LAST].tolist() == expected.tolist()


def test_eagle3(target: DenseTarget, vocabulary: DraftVocabulary, batch: Batch) -> None:
    recipe = Eagle3Recipe(target, vocabulary, Eagle3Settings())
    recipe.calibrate(batch)
    recipe.finish()
    network = recipe.network

    def twin(tokens: Tensor, features: Tensor, normed: Tensor) -> Tensor:
        keys: list[Tensor] = []
        values: list[Tensor] = []
        drafts = []
        feature = torch.empty(0)
        for position in range(LAST):  # pairs (g_t, x_{t+1}) up to the last token
            args = (target.embedding[tokens[position + 1]], network.fuse(features[position]))
            feature = network(*args, target.cos[position], target.sin[position], grow(keys, values))
        for k in range(NUM_TOKENS):
            drafts.append(network.d2t[network.logits(feature).argmax()])
            position = LAST + k
            args = (target.embedding[tokens[position + 1]], feature)
            feature = network(*args, target.cos[position], target.sin[position], grow(keys, values))
        return torch.stack(drafts)

    check(recipe, target, batch, twin)


def test_medusa(target: DenseTarget, vocabulary: DraftVocabulary, batch: Batch) -> None:
    recipe = MedusaRecipe(target, vocabulary, MedusaSettings(num_heads=NUM_TOKENS))
    for parameter in recipe.network.blocks.parameters():
        torch.nn.init.normal_(parameter, std=0.3)

    def twin(tokens: Tensor, features: Tensor, normed: Tensor) -> Tensor:
        return recipe.network.d2t[recipe.network.logits(normed[LAST - 1]).argmax(-1)]

    check(recipe, target, batch, twin)


def test_dflash(target: DenseTarget, vocabulary: DraftVocabulary, batch: Batch) -> None:
    settings = DFlashSettings(block_size=NUM_TOKENS + 1, mask_token_id=5, num_features=3)
    recipe = DFlashRecipe(target, vocabulary, settings)
    recipe.calibrate(batch)
    recipe.finish()
    network = recipe.network

    def twin(tokens: Tensor, features: Tensor, normed: Tensor) -> Tensor:
        context = network.context_key_value(network.context(features[:LAST]), target.cos[:LAST], target.sin[:LAST])
        positions = slice(LAST, LAST + settings.block_size)
        block = target.embedding[torch.tensor([int(tokens[LAST]), *[5] * NUM_TOKENS])]

        def attend_with(context_key: Tensor, context_value: Tensor) -> Attend:
            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                keys, values = torch.cat([context_key, key]), torch.cat([context_value, value])
                return torch.stack([softmax_attention(q, keys, values) for q in query])

            return attend

        attends = [attend_with(key, value) for key, value in context]
        states = network(block, target.cos[positions], target.sin[positions], attends)
        return network.d2t[network.lm_head(states[1:]).argmax(-1)]

    check(recipe, target, batch, twin)


def test_draft(target: DenseTarget, vocabulary: DraftVocabulary, batch: Batch) -> None:
    recipe = DraftRecipe(target, vocabulary, DraftSettings(num_layers=2))
    network = recipe.network

    def twin(tokens: Tensor, features: Tensor, normed: Tensor) -> Tensor:
        caches: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in network.layers]
        drafts = []
        for position in range(LAST + NUM_TOKENS):
            attends = [grow(*cache) for cache in caches]
            embedding = target.embedding[tokens[position]]
            state = network(embedding, target.cos[position], target.sin[position], attends)
            if position >= LAST:
                drafts.append(network.d2t[network.lm_head(state).argmax()])
        return torch.stack(drafts)

    check(recipe, target, batch, twin)


def test_a_draft_model_of_all_layers_is_the_target(target: DenseTarget, batch: Batch) -> None:
    everything = DraftVocabulary.of(target, torch.arange(CONFIG.vocab_size))
    recipe = DraftRecipe(target, everything, DraftSettings(num_layers=CONFIG.num_layers))
    acceptance = measure_acceptance(recipe, target, [batch], NUM_TOKENS)
    answer_lengths = (batch.lengths - batch.prompt_lengths).tolist()
    # The prompt's pass brings the first token; every later pass brings all that is left or NUM_TOKENS + 1.
    passes = sum(-(-(length - 1) // (NUM_TOKENS + 1)) for length in answer_lengths)
    assert acceptance.num_passes == passes
    assert acceptance.mean_acceptance_length == pytest.approx((sum(answer_lengths) - 3) / passes)


def test_count_accepted_stops_at_the_first_wrong_draft() -> None:
    batch = Batch(torch.tensor([[7, 8, 9, 10, 11, 12]]), torch.tensor([6]), torch.tensor([1]))
    drafts = torch.tensor(
        [[[8, 9, 0, 11], [9, 10, 11, 12], [0, 11, 12, 0], [11, 0, 0, 0], [12, 3, 3, 3], [1, 1, 1, 1]]]
    )
    assert count_accepted(batch, drafts).tolist() == [[2, 4, 0, 1, 1, 0]]


def test_coupled_chance_is_how_often_shared_noise_leads_both_to_the_same_token() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(1, 4, generator=generator) for _ in range(2))
    heads = torch.randn(12, 4, generator=generator)
    ids = torch.tensor([0, 2, 3, 5, 7, 8, 11])
    noise = -torch.empty(200_000, 12).exponential_(generator=generator).log()
    drawn = ((teacher @ heads.T) + noise).argmax(-1)
    drafted = ids[((student @ heads[ids].T) + noise[:, ids]).argmax(-1)]
    for token in ids.tolist():
        chosen = drawn == token
        expected = coupled_chance(student, heads[ids], teacher, heads, ids, torch.tensor([token]))
        spread = 0.5 * int(chosen.sum()) ** -0.5  # at most: of a share among that many draws
        assert float(expected) == pytest.approx(float((drafted[chosen] == token).float().mean()), abs=4 * spread)


def test_coupled_drafts_of_the_target_itself_are_always_right(target: DenseTarget, batch: Batch) -> None:
    everything = DraftVocabulary.of(target, torch.arange(CONFIG.vocab_size))
    recipe = DraftRecipe(target, everything, DraftSettings(num_layers=CONFIG.num_layers))
    coupled = measure_acceptance(recipe, target, [batch], NUM_TOKENS, coupled=True)
    assert coupled == measure_acceptance(recipe, target, [batch], NUM_TOKENS)


def test_total_variation_has_the_gradient_that_autograd_finds() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(6, 8, generator=generator) for _ in range(2))
    head, guide = (torch.randn(20, 8, generator=generator) for _ in range(2))
    weights = torch.rand(6, generator=generator)
    student.requires_grad_()
    loss, _ = soft_cross_entropy(student, head, teacher, guide, weights, 3.0)
    p, log_q = (teacher @ guide.T).softmax(-1), (student @ head.T).log_softmax(-1)
    expected = (weights * (3.0 * 0.5 * (p - log_q.exp()).abs().sum(-1) - (p * log_q).sum(-1))).sum()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(torch.autograd.grad(loss, student), torch.autograd.grad(expected, student))


def test_going_on_from_a_finished_drafter_changes_nothing_at_first(
    target: DenseTarget, vocabulary: DraftVocabulary, batch: Batch
) -> None:
    recipe = Eagle3Recipe(target, vocabulary, Eagle3Settings())
    recipe.calibrate(batch)
    seen = target.forward(batch.tokens, recipe.hidden_layers)
    with torch.no_grad():
        before = recipe.network.fuse(recipe.scale(seen.features))
        recipe.finish()
        recipe.scale.starts_folded = True
        recipe.calibrate(batch)
        torch.testing.assert_close(recipe.network.fuse(recipe.scale(seen.features)), before)
