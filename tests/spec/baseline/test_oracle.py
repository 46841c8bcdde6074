"""The oracle's random trees are a function of the seed and of the request's own tokens."""

from paceline.spec.proposer import StepContext
from paceline.spec.speculator import Speculator
from tests.spec.conformance_cases import PROMPTS, requests, shapes
from tests.toy import toy_core


def test_random_trees_are_the_same_alone_and_in_a_batch() -> None:
    services = toy_core().speculator.services
    sequences = [[*prompt, *range(10)] for prompt in PROMPTS]
    config = {"method": "oracle", "sequences": sequences, "shape": "random", "accuracy": 0.5}
    batch = requests("oracle", sequences)
    together = Speculator(config, services).propose(StepContext(batch))
    alone = [Speculator(config, services).propose(StepContext([request]))[0] for request in batch]
    assert any(tree.token_ids for tree in together)
    assert shapes(together) == shapes(alone)
