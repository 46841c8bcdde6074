"""What the recipes' tests share: a tiny target, half of its vocabulary, and answers that it wrote."""

import pytest
import torch

from paceline.train.corpus import Batch, Batches
from paceline.train.recipe import DraftVocabulary
from paceline.train.target import DenseTarget
from tests.train.tiny_target import CONFIG, tiny_corpus, tiny_target


@pytest.fixture(scope="module")
def target() -> DenseTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def vocabulary(target: DenseTarget) -> DraftVocabulary:
    return DraftVocabulary.of(target, torch.arange(1, CONFIG.vocab_size, 2))  # odd ids only: a mapping shows


@pytest.fixture(scope="module")
def batch(target: DenseTarget) -> Batch:
    corpus = tiny_corpus(target, num_prompts=3)
    return Batches(corpus, 10_000, target.device).at(0)
