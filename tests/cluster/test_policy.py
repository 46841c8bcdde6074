"""Where a prompt is computed: each policy's rule at its border."""

import numpy as np
import pytest

from paceline.cluster.policy import POLICIES, Situation, WorkerLoad, make_policy
from paceline.cluster.prefill_time import LEAST_ROWS
from paceline.engine.row_cost import RowCost
from paceline.errors import InvalidOptionError
from tests.cluster.specs import LINEAR, time

IDLE = WorkerLoad()


def remote(policy: str, situation: Situation) -> bool:
    return make_policy(policy, time(), time()).decide(situation).remote


def prompt(new: int, cached: int = 0, here: WorkerLoad = IDLE, there: WorkerLoad | None = IDLE) -> Situation:
    return Situation(new + cached, cached, here, cached, there)


def test_local_and_remote_do_what_they_say() -> None:
    assert not remote("local", prompt(100_000))
    assert remote("remote", prompt(100))


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_prefill_worker_every_policy_stays_local(policy: str) -> None:
    assert not remote(policy, prompt(100_000, there=None))


def test_dynamos_first_policy_goes_there_above_its_length_while_the_queue_is_short() -> None:
    assert not remote("dynamo-queue", prompt(1000))
    assert remote("dynamo-queue", prompt(1001))
    assert not remote("dynamo-queue", prompt(1001, there=WorkerLoad(num_queued=2)))
    assert remote("dynamo-queue,max_prefill_queue_size=3", prompt(1001, there=WorkerLoad(num_queued=2)))


def test_dynamos_policy_stays_local_only_when_few_tokens_are_new_and_a_small_share() -> None:
    assert not remote("dynamo", prompt(new=2047, cached=2000))
    assert remote("dynamo", prompt(new=2048, cached=2000))
    assert remote("dynamo", prompt(new=700, cached=300))  # 70 %
    assert not remote("dynamo", prompt(new=699, cached=301))


def test_dynamos_policy_stays_local_when_the_prefill_worker_is_busy() -> None:
    assert not remote("dynamo", prompt(5000, there=WorkerLoad(queued_tokens=20_000)))


def test_a_threshold_looks_at_new_tokens_only() -> None:
    assert not remote("threshold,max_local_tokens=100", prompt(new=100, cached=5000))
    assert remote("threshold,max_local_tokens=100", prompt(new=101))


def test_cost_stays_local_when_nothing_is_held_up_here() -> None:
    """Equal workers, nothing running: going there can only add a transfer and another pass."""
    assert not remote("cost", prompt(2000))


def test_cost_goes_there_when_streams_would_wait_for_the_prompt() -> None:
    assert remote("cost", prompt(2000, here=WorkerLoad(num_running=8)))
    assert not remote("cost,stream_weight=0", prompt(2000, here=WorkerLoad(num_running=1)))


def test_cost_counts_the_queue_there_and_the_link() -> None:
    busy = WorkerLoad(num_running=2)
    assert remote("cost", prompt(2000, here=busy))
    assert not remote("cost", prompt(2000, here=busy, there=WorkerLoad(num_queued=9, queued_tokens=50_000)))
    slow = time(bandwidth=1e6)  # 46 s for 2000 tokens
    assert not make_policy("cost", slow, time()).decide(prompt(2000, here=busy)).remote


def test_a_decision_says_why() -> None:
    assert make_policy("cost", time(), time()).decide(prompt(2000)).reason.endswith("ms there")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dynmo", "there is no policy 'dynmo': choose one of local, remote, dynamo"),
        ("dynamo,length=3", "has no option 'length': it has max_local_tokens, max_local_share"),
        ("dynamo,max_local_tokens=many", "expected option=number"),
        ("local,x=1", "has no option 'x': it has none"),
    ],
)
def test_an_unknown_policy_or_option_is_refused_with_the_known_ones(text: str, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        make_policy(text, time(), time())


def test_cost_without_measured_times_says_what_to_measure() -> None:
    with pytest.raises(InvalidOptionError, match="paceline bench curve"):
        make_policy("cost")


def test_prompt_times_of_one_worker_and_of_many_are_the_same() -> None:
    model = time(max_token_delay_s=0.02, context_s=0.001)
    tokens, cached, running = np.meshgrid([0, 1, 17, 512, 3000], [0, 160], [0, 1, 5, 64, 100])
    many = model.prompts_s(tokens.ravel(), cached.ravel(), running.ravel())
    for i, one in enumerate(zip(tokens.ravel(), cached.ravel(), running.ravel(), strict=True)):
        alone = model.prompt_s(*map(int, one))
        assert many.seconds[i] == pytest.approx(alone.seconds)
        assert many.delay_s[i] == pytest.approx(alone.delay_s)


def test_a_token_delay_makes_chunks_short_while_streams_decode() -> None:
    model = time(max_token_delay_s=0.02)
    assert model.chunk_rows(1) == 11  # of 12 rows in 21 ms
    assert model.chunk_rows(0) == 151  # 8 x 20 ms for the whole pass, of which the first row takes 10
    short, long = model.prompt_s(200, 0, 4), time().prompt_s(200, 0, 4)
    assert short.seconds > long.seconds


@pytest.mark.parametrize("streams", [1, 2, 8, 30])
def test_a_chunk_is_what_the_engines_account_of_rows_settles_at(streams: int) -> None:
    account, rows = RowCost(), LEAST_ROWS
    for _ in range(100):
        account.learn(streams + rows, 0, LINEAR(streams + rows))
        rows = max(LEAST_ROWS, account.rows_within(0.02, 0, 512))
    assert abs(rows - time(max_token_delay_s=0.02).chunk_rows(streams)) <= 1
