"""Which features of a request a drafter has, however often it was skipped meanwhile."""

import numpy as np
import torch

from paceline.core.request import Request
from paceline.spec.engine_parts import EngineParts
from paceline.spec.feature.feature_queue import FeatureQueue
from paceline.spec.proposer import RequestPass, StepContext
from tests.toy import toy_request

BLOCK_SIZE, NUM_BLOCKS = 4, 8


class Drafter:
    """A queue, and a pool whose blocks are handed out by hand."""

    def __init__(self) -> None:
        services = EngineParts(
            vocab_size=24, max_model_len=64, block_size=BLOCK_SIZE, num_slots=NUM_BLOCKS * BLOCK_SIZE
        )
        self.queue = FeatureQueue([1], services)
        self.uses = np.zeros(NUM_BLOCKS, dtype=np.int32)

    def request(self, name: str, num_tokens: int, blocks: list[int], num_shared: int = 0) -> Request:
        request = toy_request(name, [1] * num_tokens)
        request.block_ids = blocks
        self.uses[blocks[num_shared:]] += 1
        return request

    def take_in(self, request: Request, start: int) -> None:
        """Of its tokens from `start` on, the last one excepted."""
        count = request.num_tokens - 1 - start
        done = RequestPass(request, range(count), start, count)
        done.block_ids = tuple(request.block_ids)
        step = StepContext([request], [done], [], None, torch.zeros(count, 1, 2), (1,), self.uses)
        self.queue.follow(step, self.flush)
        self.flush()

    def flush(self) -> None:
        self.queue.take()

    def positions(self, request: Request) -> list[int]:
        where = {slot: i for i, slot in enumerate(slots_of(request))}
        return [where[int(slot)] for slot in self.queue.context(request)]


def slots_of(request: Request) -> list[int]:
    return [block * BLOCK_SIZE + i for block in request.block_ids for i in range(BLOCK_SIZE)]


def test_features_are_missing_only_for_tokens_that_came_while_it_was_skipped() -> None:
    drafter = Drafter()
    request = drafter.request("a", 7, [5, 2, 7])
    drafter.take_in(request, 0)
    assert drafter.positions(request) == [0, 1, 2, 3, 4, 5]
    request.token_ids.extend([1, 1, 1])  # the drafter was not told of these, nor of a request that ended
    assert drafter.positions(request) == [0, 1, 2, 3, 4, 5]
    request.token_ids.extend([1])
    drafter.take_in(request, 9)
    assert drafter.positions(request) == [0, 1, 2, 3, 4, 5, 9]


def test_the_features_of_a_shared_prefix_stay_known() -> None:
    drafter = Drafter()
    first = drafter.request("a", 10, [0, 1, 2])
    drafter.take_in(first, 0)
    drafter.queue.follow(StepContext([], gone=[first]), drafter.flush)  # skipped: told only which request ended
    second = drafter.request("b", 12, [0, 1, 3], num_shared=2)
    drafter.take_in(second, 10)
    assert drafter.positions(second) == [0, 1, 2, 3, 4, 5, 6, 7, 10]


def test_a_block_that_was_handed_out_again_has_no_known_features() -> None:
    drafter = Drafter()
    first = drafter.request("a", 10, [0, 1, 2])
    drafter.take_in(first, 0)
    second = drafter.request("b", 12, [4, 2, 1])  # computed while the drafter was skipped
    drafter.take_in(second, 10)
    assert drafter.positions(second) == [10]
