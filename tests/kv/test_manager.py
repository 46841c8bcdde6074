"""A request's slots: what is reserved, moved, given back, and found again by others."""

import pytest

from paceline.core.request import Request
from paceline.kv.manager import KVCacheManager
from tests.toy import toy_request

BLOCK = 4


def manager(num_blocks: int = 8, **options: bool) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK, **options)


def computed(kv: KVCacheManager, name: str, tokens: list[int], num_computed: int | None = None) -> Request:
    """A request whose tokens, or the first of them, went through a pass."""
    request = toy_request(name, tokens)
    request.num_computed_tokens = kv.reuse_prefix(request)
    assert kv.reserve(request, len(tokens))
    request.num_computed_tokens = len(tokens) if num_computed is None else num_computed
    kv.register_prefix(request)
    return request


def test_a_request_has_as_many_blocks_as_its_slots_need() -> None:
    kv, request = manager(), toy_request("r", [1, 2, 3])
    for num_slots, num_blocks in ((1, 1), (4, 1), (5, 2), (3, 2), (12, 3)):
        assert kv.reserve(request, num_slots)
        assert len(request.block_ids) == num_blocks, "and it never loses one by reserving fewer"
    assert kv.usage == 3 / 8
    kv.check_integrity([request])


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    kv, one, other = manager(3), toy_request("one", [1]), toy_request("other", [1])
    assert kv.reserve(one, 2 * BLOCK)
    before = list(one.block_ids)
    assert not kv.reserve(one, 4 * BLOCK) and one.block_ids == before
    assert not kv.reserve(other, 2 * BLOCK) and other.block_ids == []
    assert kv.reserve(other, BLOCK), "what was left is still there"
    kv.check_integrity([one, other])


def test_blocks_past_the_last_slot_are_given_back() -> None:
    kv, request = manager(), toy_request("r", [1, 2, 3, 4, 5])
    kv.reserve(request, 4 * BLOCK)
    first, second, *_ = request.block_ids
    kv.trim(request, 5)
    assert request.block_ids == [first, second] and kv.pool.num_free == 6
    kv.trim(request, 100)
    assert request.block_ids == [first, second]
    kv.release(request)
    assert request.block_ids == [] and kv.usage == 0.0
    kv.check_integrity([])


def test_a_slot_is_found_through_the_block_table() -> None:
    kv, request = manager(), toy_request("r", [1])
    request.block_ids = [5, 2]
    assert [kv.slot(request, i) for i in (0, 3, 4, 7)] == [20, 23, 8, 11]


def test_an_accepted_chain_stays_where_it_is_and_a_path_of_a_tree_moves_down() -> None:
    kv, request = manager(), toy_request("r", [1, 2, 3])
    request.block_ids = [5, 2]
    assert kv.moves(request, 3, [0, 1, 2]) == []
    assert kv.moves(request, 3, []) == []
    # node 0 is in slot 3 already; node 2 lies in slot 5 and belongs into slot 4, node 4 in slot 7 and belongs into 5
    assert kv.moves(request, 3, [0, 2, 4]) == [(9, 8), (11, 9)]


def test_a_prefix_is_shared_as_far_as_whole_blocks_agree() -> None:
    kv = manager()
    first = computed(kv, "first", [*range(10)])  # two whole blocks and a part
    second = toy_request("second", [*range(8), 20, 21, 22])
    assert kv.reuse_prefix(second) == 8 and second.block_ids == first.block_ids[:2]
    third = toy_request("third", [*range(4), 20, 21, 22, 23, 24])
    assert kv.reuse_prefix(third) == 4 and third.block_ids == first.block_ids[:1]
    assert kv.reuse_prefix(toy_request("fourth", [9, *range(1, 9)])) == 0, "what comes later in a block counts too"
    kv.check_integrity([first, second, third])


def test_the_last_token_is_always_computed() -> None:
    kv = manager()
    first = computed(kv, "first", [*range(8)])
    twin = toy_request("twin", [*range(8)])
    assert kv.reuse_prefix(twin) == 4 and twin.block_ids == first.block_ids[:1]


def test_only_what_was_computed_is_shared() -> None:
    kv = manager()
    computed(kv, "first", [*range(12)], num_computed=7)
    assert kv.reuse_prefix(toy_request("second", [*range(12)])) == 4


def test_a_prefix_outlives_its_request_until_the_block_is_needed() -> None:
    kv = manager(3)
    first = computed(kv, "first", [*range(9)])
    blocks = list(first.block_ids)
    kv.release(first)
    second = toy_request("second", [*range(9)])
    assert kv.reuse_prefix(second) == 8 and second.block_ids == blocks[:2]
    kv.release(second)
    assert kv.reserve(toy_request("large", [1]), 3 * BLOCK)
    assert kv.reuse_prefix(toy_request("third", [*range(9)])) == 0


@pytest.mark.parametrize("reason", ["salt", "prompt_logprobs", "switched off"])
def test_prefixes_are_not_shared(reason: str) -> None:
    kv = manager(enable_prefix_caching=reason != "switched off")
    first = toy_request("first", [*range(9)])
    kv.reuse_prefix(first)
    kv.reserve(first, 9)
    first.num_computed_tokens = 9
    kv.register_prefix(first)
    options: dict[str, object] = {"prompt_logprobs": 1} if reason == "prompt_logprobs" else {}
    second = toy_request("second", [*range(9)], **options)
    second.cache_salt = "another" if reason == "salt" else ""
    assert kv.reuse_prefix(second) == 0 and second.block_ids == []


def test_a_token_without_a_slot_and_a_block_with_two_owners_fail_the_integrity_check() -> None:
    kv, request = manager(), toy_request("r", [1, 2, 3, 4, 5])
    kv.reserve(request, 4)
    kv.check_integrity([request])
    request.num_computed_tokens = 5
    with pytest.raises(AssertionError, match="tokens without slots"):
        kv.check_integrity([request])
    request.num_computed_tokens = 4
    thief = toy_request("thief", [1])
    thief.block_ids = list(request.block_ids)
    with pytest.raises(AssertionError):
        kv.check_integrity([request, thief])
