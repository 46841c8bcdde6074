from paceline.kv.block_pool import BlockPool
from paceline.kv.hashes import ROOT_HASH, hash_block


def test_allocation_returns_none_when_too_few_blocks_are_free() -> None:
    pool = BlockPool(3)
    first = pool.allocate(2)
    assert first is not None and pool.num_free == 1
    assert pool.allocate(2) is None, "a failed allocation must not take anything"
    assert pool.num_free == 1
    pool.release(first)
    pool.check_integrity([])
    assert pool.num_free == 3


def test_a_released_block_is_found_again_until_it_is_handed_out() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    key = hash_block(ROOT_HASH, [1, 2, 3])
    pool.register(block, key)
    pool.release([block])
    assert pool.lookup(key) == block
    pool.share([block])
    pool.check_integrity([[block]])
    pool.release([block])
    pool.allocate(2)
    assert pool.lookup(key) is None


def test_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3) or []
    keys = [hash_block(ROOT_HASH, [i]) for i in range(3)]
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release([block])
    pool.allocate(1)
    assert [pool.lookup(key) is not None for key in keys] == [True, False, True]


def test_blocks_without_content_are_handed_out_before_cached_ones() -> None:
    pool = BlockPool(2)
    cached, plain = pool.allocate(2) or []
    pool.register(cached, hash_block(ROOT_HASH, [1]))
    pool.release([cached])
    pool.release([plain])
    assert pool.allocate(1) == [plain]


def test_the_hash_depends_on_everything_before() -> None:
    assert hash_block(hash_block(ROOT_HASH, [1]), [2]) != hash_block(hash_block(ROOT_HASH, [3]), [2])


def test_integrity_check_can_fail() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1) or []
    for holders in ([], [blocks, blocks], [[*blocks, *blocks]]):
        try:
            pool.check_integrity(holders)
        except AssertionError:
            continue
        raise RuntimeError(f"integrity check did not notice {holders}")
