"""EAGLE's drafters over whole batches, fed their own features: as while drafting, with every position an anchor."""

from collections.abc import Iterator

from torch import Tensor, nn

from paceline.train.attention import TrainingTimeTest
from paceline.train.corpus import Batch
from paceline.train.target import DenseTarget


def unroll(network: nn.Module, target: DenseTarget, batch: Batch, feature: Tensor, num_steps: int) -> Iterator[Tensor]:
    """The feature that comes out of every step, for every anchor; the tokens are the true ones.

    `feature`: of the true pairs, [sequences, positions, hidden]; so is each result"""
    attend = TrainingTimeTest()
    length = batch.tokens.shape[1]
    for i in range(num_steps):
        embedding = target.embedding[batch.shifted(1 + i)]
        cos, sin = target.cos[i : i + length], target.sin[i : i + length]
        feature = network(embedding, feature, cos, sin, attend)
        yield feature
