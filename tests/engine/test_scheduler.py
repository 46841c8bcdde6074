"""Which requests run in a pass, with how many rows, and which wait: the scheduler alone, without a model."""

from dataclasses import replace

import pytest

from paceline.core.request import Request, RequestStatus
from paceline.core.tree import DraftTree
from paceline.engine.scheduler import LEAST_ROWS, SOLO_DELAYS, Scheduler, SchedulerConfig, SchedulerOutput
from paceline.kv.manager import KVCacheManager
from tests.toy import toy_request

BLOCK = 4
MS = 2.0**-10  # about a millisecond, and exact in sums


def scheduler(
    *, seats: int = 8, rows: int = 64, blocks: int = 64, delay_s: float | None = None, row_s: float = MS
) -> Scheduler:
    made = Scheduler(SchedulerConfig(seats, rows, delay_s), KVCacheManager(blocks, BLOCK))
    made.row_cost.row_s = row_s
    return made


def prompt_of(name: str, num_tokens: int, **params: object) -> Request:
    """Prompts of different requests share no prefix."""
    first = sum(map(ord, name)) % 23
    return toy_request(name, [first, *[(first + i) % 23 for i in range(1, num_tokens)]], max_tokens=100, **params)


def add(to: Scheduler, *requests: Request) -> list[Request]:
    for request in requests:
        to.add(request)
    return list(requests)


def rows(output: SchedulerOutput) -> dict[str, tuple[int, int, int]]:
    """request -> (first token, tokens, nodes)"""
    return {e.request.request_id: (e.start, e.num_committed, len(e.draft)) for e in output.scheduled}


def after_pass(of: Scheduler, output: SchedulerOutput, accepted: int = 0) -> None:
    """What the engine does with a pass: a path of the draft and one more token become tokens."""
    for entry in output.scheduled:
        if entry.reaches_end:
            entry.request.token_ids += [*entry.draft.token_ids[:accepted], 1]
        of.update(entry, min(accepted, len(entry.draft)))
    of.check_integrity()


def step(of: Scheduler) -> dict[str, tuple[int, int, int]]:
    output = of.schedule()
    after_pass(of, output)
    return rows(output)


def decoding(of: Scheduler, *names: str, **params: object) -> list[Request]:
    """Requests whose prompts are read."""
    requests = add(of, *(prompt_of(name, 3, **params) for name in names))
    while any(request.num_output_tokens == 0 for request in requests):
        step(of)
    return requests


def test_a_prompt_is_read_in_chunks_and_then_decodes() -> None:
    alone = scheduler(rows=4)
    add(alone, prompt_of("a", 10))
    assert [step(alone)["a"] for _ in range(4)] == [(0, 4, 0), (4, 4, 0), (8, 2, 0), (10, 1, 0)]


def test_first_come_first_served_within_the_rows_of_a_pass() -> None:
    busy = scheduler(rows=10)
    add(busy, prompt_of("a", 6), prompt_of("b", 6), prompt_of("c", 6))
    assert step(busy) == {"a": (0, 6, 0), "b": (0, 4, 0)}
    assert step(busy) == {"a": (6, 1, 0), "b": (4, 2, 0), "c": (0, 6, 0)}


def test_no_more_requests_run_than_there_are_seats() -> None:
    full = scheduler(seats=2)
    first, _, third = add(full, *(prompt_of(name, 3) for name in "abc"))
    assert set(step(full)) == {"a", "b"} and third.status is RequestStatus.WAITING
    full.finish(first)
    assert set(step(full)) == {"b", "c"}


def test_a_draft_leaves_a_row_to_every_request_after_it() -> None:
    busy = scheduler(rows=9)
    for request in decoding(busy, "a", "b", "c"):
        request.draft = DraftTree.chain([5] * 9)
    assert rows(busy.schedule()) == {"a": (3, 1, 6), "b": (3, 1, 0), "c": (3, 1, 0)}


def test_a_draft_is_no_deeper_than_the_tokens_that_may_still_come() -> None:
    one = scheduler()
    (request,) = decoding(one, "a")
    request.max_tokens = request.num_output_tokens + 3
    request.draft = DraftTree.chain([5] * 9)
    assert rows(one.schedule())["a"] == (3, 1, 2), "two nodes and the token after them"


def test_after_a_pass_accepted_nodes_have_kv_and_other_slots_are_given_back() -> None:
    one = scheduler()
    (request,) = decoding(one, "a")
    request.draft = DraftTree.chain([5] * 9)
    output = one.schedule()
    assert len(request.block_ids) == 4  # 13 slots
    after_pass(one, output, accepted=2)
    assert request.num_tokens == 7 and request.num_computed_tokens == 6 and len(request.draft) == 0
    assert len(request.block_ids) == 2


def test_slots_for_the_next_draft_are_kept_behind_the_last_token() -> None:
    one = scheduler()
    (request,) = decoding(one, "a")
    after_pass(one, one.schedule(num_lookahead_tokens=8))
    assert len(request.block_ids) * BLOCK >= request.num_tokens + 8


def test_where_blocks_are_short_a_draft_is_dropped_before_a_request_is_preempted() -> None:
    tight = scheduler(blocks=3)
    one, other = decoding(tight, "a", "b")
    one.draft = DraftTree.chain([5] * 9)
    output = tight.schedule(num_lookahead_tokens=8)
    assert rows(output) == {"a": (3, 1, 0), "b": (3, 1, 0)} and not output.preempted
    assert (one.status, other.status) == (RequestStatus.RUNNING, RequestStatus.RUNNING)


def test_the_newest_is_preempted_and_no_request_takes_its_blocks_in_the_same_pass() -> None:
    tight = scheduler(blocks=4, rows=4, seats=2)
    tight.kv.enable_prefix_caching = False  # so that a first chunk of b would fit into what it gave back
    old, new = decoding(tight, "a", "b")  # each in one block
    add(tight, prompt_of("c", 2))
    output = tight.schedule()
    while not output.preempted:
        after_pass(tight, output)
        output = tight.schedule()
    assert output.preempted == [new] and set(rows(output)) == {"a"}
    assert new.status is RequestStatus.WAITING and new.num_computed_tokens == 0 and new.block_ids == []
    assert new.num_preemptions == 1 and tight.waiting[0] is new and old.num_preemptions == 0
    after_pass(tight, output)


def test_what_is_preempted_is_computed_again_from_what_is_still_cached() -> None:
    tight = scheduler(blocks=4)
    old, new = decoding(tight, "a", "b")
    while not new.num_preemptions:
        after_pass(tight, tight.schedule())
    tight.finish(old)
    start, num_committed, _ = rows(tight.schedule())["b"]
    assert start == BLOCK and start + num_committed == new.num_tokens
    assert new.num_cached_tokens == 0, "a user's figure: what the prompt found, not what was computed twice"


def test_a_cached_prefix_is_not_computed_again() -> None:
    one = scheduler()
    add(one, prompt_of("a", 11))
    step(one)
    twin = replace(prompt_of("a", 11), request_id="twin")
    add(one, twin)
    assert step(one)["twin"] == (8, 3, 0) and twin.num_cached_tokens == 8


def test_a_finished_request_gives_its_blocks_back_wherever_it_was() -> None:
    one = scheduler(seats=1)
    running, waiting = add(one, prompt_of("a", 9), prompt_of("b", 9))
    step(one)
    one.finish(waiting)
    one.finish(running)
    assert not one.has_requests and one.kv.usage == 0.0
    one.check_integrity()


# From here on time counts: a row takes MS.


def test_while_a_request_decodes_a_prompt_takes_no_longer_than_the_delay() -> None:
    timed = scheduler(delay_s=20 * MS, rows=256)
    decoding(timed, "a")
    add(timed, prompt_of("long", 100))
    assert step(timed) == {"a": (3, 1, 0), "long": (0, 20, 0)}
    free = scheduler(rows=256)
    decoding(free, "a")
    add(free, prompt_of("long", 100))
    assert step(free)["long"] == (0, 100, 0)


def test_where_no_request_decodes_a_pass_may_be_longer() -> None:
    timed = scheduler(delay_s=10 * MS, rows=256)
    add(timed, prompt_of("long", 200))
    assert step(timed)["long"] == (0, 10 * SOLO_DELAYS, 0)


def test_the_oldest_prompt_gets_a_quarter_and_the_shortest_go_first() -> None:
    timed = scheduler(delay_s=20 * MS, rows=256)
    decoding(timed, "a")
    add(timed, prompt_of("oldest", 100), prompt_of("long", 60), prompt_of("short", 9))
    assert step(timed) == {"a": (3, 1, 0), "oldest": (0, 5, 0), "long": (0, 6, 0), "short": (0, 9, 0)}


def test_the_oldest_prompt_makes_progress_however_slow_rows_are() -> None:
    timed = scheduler(delay_s=20 * MS, rows=256, row_s=1.0)
    decoding(timed, "a")
    add(timed, prompt_of("oldest", 100), prompt_of("long", 60))
    assert step(timed) == {"a": (3, 1, 0), "oldest": (0, LEAST_ROWS, 0)}


def test_a_long_context_makes_rows_fewer() -> None:
    timed = scheduler(delay_s=20 * MS, rows=256, blocks=600)
    decoding(timed, "a")
    (long,) = add(timed, prompt_of("long", 2000))
    timed.row_cost.context_s = MS  # a row after 1000 tokens takes twice as long
    assert step(timed)["long"][1] == 18
    while long.num_computed_tokens < 1000:
        step(timed)
    assert step(timed)["long"][1] == 11


@pytest.mark.parametrize(("names", "samples", "num_nodes"), [("a", 1, 30), ("ab", 1, 20), ("ab", 4, 5)])
def test_a_draft_takes_no_longer_than_the_delay_where_others_wait_for_it(
    names: str, samples: int, num_nodes: int
) -> None:
    timed = scheduler(delay_s=20 * MS, rows=256)
    for request in decoding(timed, *names, n=samples, temperature=1.0):
        request.draft = DraftTree.chain([5] * 30)
    assert {nodes for _, _, nodes in rows(timed.schedule()).values()} == {num_nodes}


def test_one_call_leaves_half_of_the_seats_to_others() -> None:
    timed = scheduler(seats=4, delay_s=1.0)
    many = [replace(prompt_of(f"m{i}", 3), call_id="many") for i in range(6)]
    add(timed, *many, replace(prompt_of("neighbour", 3), call_id="neighbour"))
    assert set(step(timed)) == {"m0", "m1", "neighbour"}
    alone = scheduler(seats=4, delay_s=1.0)
    add(alone, *[replace(prompt_of(f"m{i}", 3), call_id="many") for i in range(6)])
    assert set(step(alone)) == {"m0", "m1", "m2", "m3"}


def test_the_cost_of_rows_is_learned_from_passes() -> None:
    timed = scheduler(delay_s=20 * MS, rows=256)
    decoding(timed, "a")
    add(timed, prompt_of("long", 200))
    for _ in range(20):
        output = timed.schedule()
        timed.note_pass(output.scheduled, 4 * MS * output.num_rows)
        after_pass(timed, output)
    # Of 20 it gets its least, counted as a quarter of the time, and what fits into the other three.
    assert rows(timed.schedule())["long"][1] == LEAST_ROWS + 3
