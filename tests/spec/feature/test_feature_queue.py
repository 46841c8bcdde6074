"""What a drafter has heard of a request, however often it slept meanwhile."""

import numpy as np
import torch

from paceline.core.request import Request
from paceline.spec.engine_parts import Services
from paceline.spec.feature.feature_queue import FeatureQueue
from paceline.spec.proposer import RequestPass, StepContext
from tests.toy import toy_request

BLOCK_SIZE, NUM_BLOCKS = 4, 8


class Listener:
    """A queue, and a pool whose blocks are handed out by hand."""

    def __init__(self) -> None:
        services = Services(vocab_size=24, max_model_len=64, block_size=BLOCK_SIZE, num_slots=NUM_BLOCKS * BLOCK_SIZE)
        self.queue = FeatureQueue([1], services)
        self.uses = np.zeros(NUM_BLOCKS, dtype=np.int32)

    def request(self, name: str, num_tokens: int, blocks: list[int], num_shared: int = 0) -> Request:
        request = toy_request(name, [1] * num_tokens)
        request.block_ids = blocks
        self.uses[blocks[num_shared:]] += 1
        return request

    def hear(self, request: Request, start: int) -> None:
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


def test_what_came_while_it_slept_is_unknown_and_the_rest_is_not() -> None:
    listener = Listener()
    request = listener.request("a", 7, [5, 2, 7])
    listener.hear(request, 0)
    assert listener.positions(request) == [0, 1, 2, 3, 4, 5]
    request.token_ids.extend([1, 1, 1])  # nobody was told, nor that anybody was gone
    assert listener.positions(request) == [0, 1, 2, 3, 4, 5]
    request.token_ids.extend([1])
    listener.hear(request, 9)
    assert listener.positions(request) == [0, 1, 2, 3, 4, 5, 9]


def test_a_shared_prefix_heard_before_is_still_known() -> None:
    listener = Listener()
    first = listener.request("a", 10, [0, 1, 2])
    listener.hear(first, 0)
    listener.queue.follow(StepContext([], gone=[first]), listener.flush)  # asleep, told who is gone
    second = listener.request("b", 12, [0, 1, 3], num_shared=2)
    listener.hear(second, 10)
    assert listener.positions(second) == [0, 1, 2, 3, 4, 5, 6, 7, 10]


def test_a_block_that_was_handed_out_again_holds_nothing() -> None:
    listener = Listener()
    first = listener.request("a", 10, [0, 1, 2])
    listener.hear(first, 0)
    second = listener.request("b", 12, [4, 2, 1])  # computed while the drafter slept
    listener.hear(second, 10)
    assert listener.positions(second) == [10]
