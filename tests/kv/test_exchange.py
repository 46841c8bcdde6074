"""KV blocks between two engines: the same tokens as computed here, and nothing wrong, lost or held for ever.

The toy target asserts that every key it reads is at its place: a block in the wrong slot fails at once."""

import random
from collections.abc import Sequence

import pytest

from paceline.core.request import Request
from paceline.engine.core import EngineCore
from paceline.errors import InvalidOptionError, InvalidRequestError
from paceline.kv.exchange import KVExchange
from paceline.kv.hashes import BlockHash, BlockKey, hash_block
from tests.toy import run_all, toy_core, toy_request

PROMPT = [(7 * i + i * i // 5) % 23 for i in range(30)]  # seven full blocks of four, and two tokens
BLOCK = 4


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def with_clock(core: EngineCore) -> Clock:
    clock = Clock()
    core.exchange._clock = clock
    return clock


def asked(name: str = "r", prompt: Sequence[int] = PROMPT, **options: object) -> Request:
    request = toy_request(name, prompt, max_tokens=10, seed=5, ignore_eos=True, logprobs=2, **options)
    request.logprobs = []
    return request


def prefilled(prompt: Sequence[int] = PROMPT) -> EngineCore:
    core = toy_core()
    assert core.exchange.snapshot() == []
    run_all(core, [toy_request("prefill", prompt, max_tokens=1)])
    return core


def sent(core: EngineCore, prompt: Sequence[int] = PROMPT) -> tuple[list[BlockKey], list[bytes]]:
    keys = core.exchange.usable(prompt)
    lease = core.exchange.pin([key.hash for key in keys])
    core.check_integrity()
    data = [core.exchange.read(lease, i) for i in range(len(lease.hashes))]
    core.exchange.release(lease)
    core.check_integrity()
    return keys, data


def received(core: EngineCore, keys: Sequence[BlockKey], data: Sequence[bytes]) -> int:
    exchange = core.exchange
    ticket = exchange.reserve(keys)
    core.check_integrity()
    verified = [i for i in ticket.missing if i < len(data) and exchange.write(ticket, i, data[i])]
    num_here = exchange.commit(ticket, verified)
    core.check_integrity()
    return num_here


def local(**options: object) -> Request:
    request = asked("local", **options)
    run_all(toy_core(), [request])
    return request


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("method", ["none", "ngram", "suffix"])
def test_tokens_and_log_probabilities_after_an_import_are_those_computed_here(
    options: dict[str, object], method: str
) -> None:
    keys, data = sent(prefilled())
    assert len(keys) == len(data) == 7
    core = toy_core({"method": method})
    assert received(core, keys, data) == 7
    request = asked(**options)
    run_all(core, [request])
    expected = local(**options)
    assert request.num_cached_tokens == 28 and expected.num_cached_tokens == 0
    assert (request.output_token_ids, request.logprobs) == (expected.output_token_ids, expected.logprobs)


@pytest.mark.parametrize("broken", [0, 3, 6])
def test_a_damaged_block_is_not_used_and_the_others_are(broken: int) -> None:
    keys, data = sent(prefilled())
    data[broken] = data[broken][:-1] + bytes([data[broken][-1] ^ 1])
    core = toy_core()
    assert received(core, keys, data) == broken
    request = asked()
    run_all(core, [request])
    assert request.num_cached_tokens == broken * BLOCK
    assert request.output_token_ids == local().output_token_ids


def test_a_block_that_nobody_verified_is_not_used() -> None:
    keys, data = sent(prefilled())
    core = toy_core()
    ticket = core.exchange.reserve(keys)
    assert all(core.exchange.write(ticket, i, data[i]) for i in ticket.missing)
    assert core.exchange.commit(ticket, [0, 1, 5]) == 2
    core.check_integrity()
    assert core.exchange.num_held([keys[5].hash]) == 1, "kept: it counts once what is between was computed"


def test_blocks_may_come_in_any_order_and_twice_but_not_for_one_another() -> None:
    keys, data = sent(prefilled())
    core = toy_core()
    exchange = core.exchange
    ticket = exchange.reserve(keys)
    assert not exchange.write(ticket, 1, data[2]) and not exchange.write(ticket, 7, data[0])
    for i in (6, 1, 1, 0, 5, 4, 2, 3, 0):
        assert exchange.write(ticket, i, data[i])
    assert exchange.commit(ticket, range(7)) == 7
    assert exchange.commit(ticket, range(7)) == 0 and not exchange.write(ticket, 0, data[0])
    request = asked()
    run_all(core, [request])
    assert request.output_token_ids == local().output_token_ids and request.num_cached_tokens == 28


def test_blocks_of_another_model_or_salt_are_never_found() -> None:
    keys, data = sent(prefilled())
    other = toy_core(sharpness=2.0)
    assert other.exchange.fingerprint.differences(toy_core().exchange.fingerprint) == ["probe"]
    ticket = other.exchange.reserve(keys)
    assert not any(other.exchange.write(ticket, i, data[i]) for i in ticket.missing)
    other.exchange.abandon(ticket)
    core = toy_core()
    received(core, keys, data)
    salted = asked()
    salted.cache_salt = "alice"
    run_all(core, [salted])
    assert salted.num_cached_tokens == 0
    assert core.exchange.usable(PROMPT, "alice")[0].hash != keys[0].hash


def test_only_what_is_missing_is_asked_for() -> None:
    core = toy_core()
    keys, data = sent(prefilled())
    received(core, keys[:3], data[:3])
    ticket = core.exchange.reserve(keys)
    assert ticket.missing == (3, 4, 5, 6) and ticket.keys == tuple(keys)
    core.check_integrity()
    core.exchange.abandon(ticket)
    core.exchange.abandon(ticket)
    core.check_integrity()
    assert core.exchange.num_held(key.hash for key in keys) == 3


def test_two_tickets_for_the_same_blocks_leave_one_copy() -> None:
    core = toy_core()
    keys, data = sent(prefilled())
    one, two = core.exchange.reserve(keys), core.exchange.reserve(keys)
    for ticket in (one, two):
        for i in ticket.missing:
            core.exchange.write(ticket, i, data[i])
        assert core.exchange.commit(ticket, range(7)) == 7
        core.check_integrity()
    assert core.kv.pool.num_cached == 7


def test_a_pinned_block_is_not_handed_out_and_an_expired_lease_holds_nothing() -> None:
    core = prefilled()
    clock = with_clock(core)
    keys = core.exchange.usable(PROMPT)
    lease = core.exchange.pin([key.hash for key in keys], ttl_s=10)
    data = core.exchange.read(lease, 0)
    run_all_but_held(core, [toy_request(f"r{i}", [i, *range(20)], max_tokens=30, ignore_eos=True) for i in range(8)])
    assert core.exchange.num_held(lease.hashes) == 7 and core.exchange.read(lease, 0) == data
    clock.now += 9
    assert core.exchange.renew(lease, ttl_s=10)
    clock.now += 9
    assert core.exchange.read(lease, 0) == data
    clock.now += 1
    with pytest.raises(InvalidRequestError, match="expired"):
        core.exchange.read(lease, 0)
    assert not core.exchange.renew(lease)
    core.exchange.release(lease)
    assert core.kv.pool.num_free == core.kv.pool.num_blocks


def run_all_but_held(core: EngineCore, requests: Sequence[Request]) -> None:
    for request in requests:
        core.add_request(request)
    while core.has_requests:
        core.step()
        core.check_integrity()


def test_a_request_that_needs_the_blocks_of_an_expired_lease_gets_them() -> None:
    core = toy_core(num_blocks=16)
    run_all(core, [toy_request("prefill", PROMPT, max_tokens=1)])
    clock = with_clock(core)
    run_all(core, [toy_request("prefill again", PROMPT, max_tokens=1)])
    lease = core.exchange.pin([key.hash for key in core.exchange.usable(PROMPT)], ttl_s=10)
    assert len(lease.hashes) == 7
    clock.now += 20
    long = toy_request("long", [*range(20)], max_tokens=40, ignore_eos=True)
    run_all(core, [long])
    assert len(long.output_token_ids) == 40


def test_leases_and_tickets_leave_half_of_the_pool_to_requests() -> None:
    core = toy_core(num_blocks=10)
    keys, data = sent(prefilled())
    ticket = core.exchange.reserve(keys)
    assert len(ticket.keys) == 5 and ticket.missing == (0, 1, 2, 3, 4)
    assert core.exchange.reserve(keys).keys == () and core.exchange.pin([keys[0].hash]).hashes == ()
    for i in ticket.missing:
        assert core.exchange.write(ticket, i, data[i])
    assert core.exchange.commit(ticket, range(5)) == 5
    core.check_integrity()


def test_a_ticket_that_expires_leaves_nothing_behind() -> None:
    core = toy_core()
    clock = with_clock(core)
    keys, data = sent(prefilled())
    ticket = core.exchange.reserve(keys, ttl_s=1)
    assert core.exchange.write(ticket, 0, data[0])
    clock.now += 2
    assert not core.exchange.write(ticket, 1, data[1])
    assert core.exchange.commit(ticket, range(7)) == 0
    assert core.kv.pool.num_free == core.kv.pool.num_blocks and core.kv.pool.num_cached == 0
    core.check_integrity()


def test_a_ticket_lives_as_long_again_after_every_write() -> None:
    core = toy_core()
    clock = with_clock(core)
    keys, data = sent(prefilled())
    ticket = core.exchange.reserve(keys, ttl_s=1)
    for i in range(4):
        assert core.exchange.write(ticket, i, data[i])
        clock.now += 0.9
    assert core.exchange.commit(ticket, range(4)) == 4
    core.check_integrity()


def test_a_key_that_does_not_name_its_tokens_is_refused() -> None:
    core = toy_core()
    good = core.exchange.usable(PROMPT)
    for bad in (
        BlockKey(good[1].hash, good[0].hash, (0, 0, 0, 0)),
        BlockKey(b"x" * 16, good[0].hash, good[1].token_ids),
        BlockKey(hash_block(good[0].hash, (1, 2, 3)), good[0].hash, (1, 2, 3)),  # too short
    ):
        with pytest.raises(InvalidRequestError, match="is not the hash"):
            core.exchange.reserve([good[0], bad])
    core.check_integrity()


def test_blocks_come_and_go_while_a_pass_is_under_way() -> None:
    """The engine launches passes ahead; blocks of requests that end are taken for others while one still runs."""
    sizes = (1, 2, 4, 8, 16, 64)
    source, core = (toy_core(sizes=sizes, num_blocks=40) for _ in range(2))
    expected = run_all(toy_core(sizes=sizes), [toy_request("a", PROMPT, max_tokens=12, ignore_eos=True)])
    run_all(source, [toy_request("prefill", PROMPT, max_tokens=1)])
    keys, data = sent(source)  # of a cache that its first use forgets
    run_all(source, [toy_request("again", PROMPT, max_tokens=1)])
    keys, data = sent(source)
    assert len(data) == 7
    for i in range(5):
        core.add_request(toy_request(f"short {i}", [i, *PROMPT[:6]], max_tokens=2 + i, ignore_eos=True))
        core.step()
        core.step()
        received(core, keys, data)
    request = toy_request("r", PROMPT, max_tokens=12, ignore_eos=True)
    assert run_all(core, [request]) == expected and request.num_cached_tokens == 28
    assert core.clock.num_ahead > 0


def test_an_engine_that_never_uses_it_does_nothing_for_it() -> None:
    core = toy_core()
    run_all(core, [asked()])
    assert "exchange" not in vars(core) and core.kv.fingerprint == b"" and core.kv.pool.listener is None
    assert core.kv.kept is None and core.kv.reclaim is None and core.offload is None
    assert core.runner.model.num_passes == core.clock.num_steps, "no pass but its own"  # type: ignore[attr-defined]


def test_without_a_prefix_cache_there_is_no_exchange() -> None:
    with pytest.raises(InvalidOptionError, match="prefix cache"):
        _ = toy_core(prefix_caching=False).exchange


class Mirror:
    """What a router would know from events alone."""

    def __init__(self) -> None:
        self.keys: dict[BlockHash, BlockKey] = {}
        self.num_cleared = 0

    def stored(self, key: BlockKey, block_size: int) -> None:
        assert len(key.token_ids) == block_size and key.is_true and key.hash not in self.keys
        self.keys[key.hash] = key

    def removed(self, block_hash: BlockHash) -> None:
        del self.keys[block_hash]

    def cleared(self) -> None:
        self.keys.clear()
        self.num_cleared += 1


def test_a_listener_knows_at_any_time_what_can_be_found() -> None:
    core = toy_core(num_blocks=24)
    mirror = Mirror()
    core.exchange.listen(mirror)
    rng = random.Random(3)
    for round_ in range(12):
        prompts = [PROMPT[: rng.randint(3, 30)] + [rng.randrange(23) for _ in range(rng.randint(0, 9))] for _ in "abc"]
        requests = [toy_request(f"{round_}-{i}", prompt, max_tokens=6) for i, prompt in enumerate(prompts)]
        run_all(core, requests)
        keys, data = sent(core, prompts[0])
        received(core, keys, data)
        pool = core.kv.pool
        assert set(mirror.keys) == {h for h in mirror.keys if pool.lookup(h) is not None}
        assert len(mirror.keys) == pool.num_cached
        snapshot = core.exchange.snapshot()
        assert {key.hash: key for key in snapshot} == mirror.keys
        places = {key.hash: i for i, key in enumerate(snapshot)}
        assert all(places.get(key.parent, -1) < i for i, key in enumerate(snapshot)), "parents first"
    core.kv.forget_all()
    assert mirror.num_cleared == 1 and core.exchange.snapshot() == []


@pytest.mark.faults
def test_a_listener_that_raises_is_told_no_more_and_ends_no_request() -> None:
    class Broken(Mirror):
        def stored(self, key: BlockKey, block_size: int) -> None:
            raise RuntimeError("no")

    core, mirror = toy_core(), Mirror()
    core.exchange.listen(Broken())
    core.exchange.listen(mirror)
    run_all(core, [asked()])
    assert len(mirror.keys) == core.kv.pool.num_cached > 0


def test_random_leases_tickets_and_requests_lose_no_block() -> None:
    rng = random.Random(1)
    source = prefilled()
    keys, data = sent(source)
    core = toy_core(num_blocks=20)
    clock = with_clock(core)
    open_: list[tuple[str, object]] = []
    exchange: KVExchange = core.exchange
    for i in range(300):
        what = rng.choice(["pin", "reserve", "write", "commit", "abandon", "release", "add", "step", "step", "time"])
        tickets = [one for kind, one in open_ if kind == "ticket"]
        leases = [one for kind, one in open_ if kind == "lease"]
        if what == "pin":
            open_.append(("lease", exchange.pin([k.hash for k in keys[: rng.randint(0, 7)]], rng.randint(1, 9))))
        elif what == "reserve":
            open_.append(("ticket", exchange.reserve(keys[: rng.randint(0, 7)], rng.randint(1, 9))))
        elif what == "write" and tickets:
            exchange.write(rng.choice(tickets), (j := rng.randrange(7)), data[j])  # type: ignore[arg-type]
        elif what == "commit" and tickets:
            exchange.commit(rng.choice(tickets), rng.sample(range(7), 4))  # type: ignore[arg-type]
        elif what == "abandon" and tickets:
            exchange.abandon(rng.choice(tickets))  # type: ignore[arg-type]
        elif what == "release" and leases:
            exchange.release(rng.choice(leases))  # type: ignore[arg-type]
        elif what == "add" and len(core.scheduler.waiting) < 4:
            core.add_request(asked(f"r{i}", PROMPT[: rng.randint(1, 30)]))
        elif what == "step":
            core.step()
        else:
            clock.now += rng.random()
        core.check_integrity()
    clock.now += 100
    exchange.expire()
    while core.has_requests:
        core.step()
        core.check_integrity()
    assert core.kv.pool.num_free == core.kv.pool.num_blocks and not core.kv.held
