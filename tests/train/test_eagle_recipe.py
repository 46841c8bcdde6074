"""EAGLE-1's recipe: its drafts and its loss against plain, one-position-at-a-time twins."""

import pytest
import torch
from torch import Tensor

from paceline.train.corpus import Batch
from paceline.train.eagle import EagleRecipe, EagleSettings
from paceline.train.recipe import DraftVocabulary
from paceline.train.target import DenseTarget
from tests.train.test_recipes import LAST, NUM_TOKENS, check, grow


def twin_features(recipe: EagleRecipe, tokens: Tensor, normed: Tensor, last: int, count: int) -> list[Tensor]:
    """What the drafter makes of the true states up to `last` - 1, then of its own, [hidden] each."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    target, features = recipe.target, []
    feature = torch.empty(0)
    for position in range(last + count - 1):
        given = normed[position] if position < last else feature
        args = (target.embedding[tokens[position + 1]], given, target.cos[position], target.sin[position])
        feature = recipe.network(*args, grow(keys, values))
        features.append(feature)
    return features[last - 1 :]


def test_drafts(target: DenseTarget, vocabulary: DraftVocabulary, batch: Batch) -> None:
    torch.manual_seed(0)
    recipe = EagleRecipe(target, vocabulary, EagleSettings())

    def twin(tokens: Tensor, features: Tensor, normed: Tensor) -> Tensor:
        states = torch.stack(twin_features(recipe, tokens, normed, LAST, NUM_TOKENS))
        return recipe.network.d2t[recipe.network.logits(states).argmax(-1)]

    check(recipe, target, batch, twin)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_loss(num_steps: int, target: DenseTarget, vocabulary: DraftVocabulary, batch: Batch) -> None:
    torch.manual_seed(0)
    settings = EagleSettings(num_steps=num_steps, step_decay=0.5, feature_weight=2.0, token_weight=0.3, noise=0.0)
    recipe = EagleRecipe(target, vocabulary, settings)
    with torch.no_grad():
        seen = target.forward(batch.tokens)
        found = recipe.loss(batch, seen, step=0).loss
        expected = torch.zeros(())
        for i in range(num_steps):
            distances, entropies = [], []
            for row, (start, length) in enumerate(zip(batch.prompt_lengths, batch.lengths, strict=True)):
                # Answers are at [start, length); the anchor's own last token is one of them, and so is the draft.
                for last in range(int(start), int(length) - 1 - i):
                    feature = twin_features(recipe, batch.tokens[row], seen.normed[row], last, i + 1)[-1]
                    wanted = seen.normed[row, last + i]
                    distances.append(torch.nn.functional.smooth_l1_loss(feature, wanted))
                    p, q = ((vocabulary.head @ state).softmax(0) for state in (wanted, feature))
                    is_known = vocabulary.known[batch.tokens[row, last + 1 + i]]
                    entropies.append(-(p * q.log()).sum() * is_known)
            both = 2.0 * torch.stack(distances).mean() + 0.3 * torch.stack(entropies).mean()
            expected += 0.5**i * both / sum(0.5**j for j in range(num_steps))
    torch.testing.assert_close(found, expected)


def test_noise_is_a_function_of_the_step(target: DenseTarget, vocabulary: DraftVocabulary, batch: Batch) -> None:
    """So that a run which was killed goes on as if it had not been."""
    recipe = EagleRecipe(target, vocabulary, EagleSettings())
    seen = target.forward(batch.tokens)
    losses = [recipe.loss(batch, seen, step).loss.item() for step in (3, 3, 4)]
    assert losses[0] == losses[1] != losses[2]
