"""Names of KV blocks: equal only for equal tokens, salt and fingerprint."""

from paceline.kv.hashes import ROOT_HASH, BlockKey, block_keys, hash_block, root_hash
from paceline.kv.manager import KVCacheManager
from tests.kv.test_manager import computed
from tests.toy import toy_request


def test_without_salt_and_fingerprint_the_chain_begins_with_nothing() -> None:
    assert root_hash("") == ROOT_HASH == b""


def test_salt_and_fingerprint_both_set_the_chain_apart() -> None:
    roots = {root_hash(salt, print_) for salt in ("", "a", "b") for print_ in (b"", b"x" * 16, b"y" * 16)}
    assert len(roots) == 9


def test_keys_are_those_of_the_manager_for_every_full_block() -> None:
    kv = KVCacheManager(8, 4)
    kv.use_fingerprint(b"f" * 16)
    request = computed(kv, "r", [*range(11)])
    keys = block_keys(request.token_ids, 4, root_hash("", b"f" * 16))
    assert [key.token_ids for key in keys] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [kv.pool.lookup(key.hash) for key in keys] == request.block_ids[:2]
    assert keys[0].parent == kv.root("") and keys[1].parent == keys[0].hash
    assert all(key.is_true for key in keys)
    assert not BlockKey(keys[1].hash, keys[0].parent, keys[1].token_ids).is_true
    assert not BlockKey(keys[1].hash, keys[1].parent, (4, 5, 6, 8)).is_true


def test_a_fingerprint_that_comes_late_is_the_root_of_what_running_requests_publish_next() -> None:
    kv = KVCacheManager(8, 4)
    running = computed(kv, "running", [*range(9)])
    kv.use_fingerprint(b"f" * 16)
    assert kv.reuse_prefix(toy_request("early", [*range(9)])) == 0, "older hashes are forgotten"
    kv.register_prefix(running)
    again = toy_request("again", [*range(9)])
    assert kv.reuse_prefix(again) == 8 and again.block_ids == running.block_ids[:2]
    assert kv.pool.lookup(hash_block(root_hash("", b"f" * 16), [*range(4)])) == running.block_ids[0]
    kv.check_integrity([running, again])
