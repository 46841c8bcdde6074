"""A processor that is lent is left alone by passes, whose bits stay."""

import pytest
import torch

from paceline.core import processors
from paceline.core.processors import borrowed_processor, threads_left, with_one_torch_thread
from paceline.models.native import NativeDecoder
from paceline.ops import native
from paceline.ops.native.profile import profiled_steps
from paceline.ops.native.team import set_waiting
from tests.forward_batches import Pool, Rows
from tests.models.small_models import random_weights, tokens
from tests.models.test_native_decoder import kv_cache, small_config


@pytest.fixture(autouse=True)
def three_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "usable_processors", lambda: 3)


def test_one_thread_less_while_any_borrows_and_no_processor_is_free() -> None:
    assert [threads_left(n) for n in (1, 2, 3)] == [1, 2, 3]
    with borrowed_processor():
        with borrowed_processor():
            assert [threads_left(n) for n in (1, 2, 3, 4)] == [1, 2, 2, 3]
        assert threads_left(3) == 2
    assert threads_left(3) == 3


def test_a_pass_has_a_thread_even_on_one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "usable_processors", lambda: 1)
    with borrowed_processor():
        assert threads_left(1) == 1


def test_what_borrows_gives_back_where_it_fails() -> None:
    with pytest.raises(ZeroDivisionError), borrowed_processor():
        _ = 1 / 0
    assert threads_left(3) == 3


def test_pytorch_has_one_thread_and_afterwards_as_many_as_before(request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    torch.set_num_threads(3)
    assert with_one_torch_thread(torch.get_num_threads) == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(ZeroDivisionError):
        with_one_torch_thread(lambda: 1 / 0)
    assert torch.get_num_threads() == 3


@pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))
def test_passes_run_on_one_thread_less_meanwhile_with_the_same_bits(request: pytest.FixtureRequest) -> None:
    config = small_config("llama")
    decoder = NativeDecoder(config, random_weights(config), num_threads=3)
    pool = Pool(1, 24)
    batch, cache = pool.batch(Rows(0, 0, tokens(config, 20))), kv_cache(decoder, pool.num_slots)

    def run() -> tuple[torch.Tensor, list[bool]]:
        with profiled_steps(decoder.handle, 3) as seconds:
            logits = decoder.forward(batch, cache).logits
            return logits, [bool(thread.any()) for thread in seconds]

    set_waiting("spin")  # all threads, however busy the machine is
    request.addfinalizer(lambda: set_waiting("auto"))
    usual, threads = run()
    assert threads == [True, True, True]
    with borrowed_processor():
        meanwhile, threads = run()
    assert threads == [True, True, False] and decoder.num_threads == 3
    assert torch.equal(meanwhile, usual)
    assert run()[1] == [True, True, True]
