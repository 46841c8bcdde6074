"""How many threads a pass gets beside other programs, and that it does not show in its bits."""

from collections.abc import Iterator
from ctypes import c_int32, c_void_p

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.core.tree import EMPTY_TREE
from paceline.errors import InvalidOptionError
from paceline.ops import native
from paceline.ops.native.library import declare, library
from paceline.ops.native.team import last_num_threads, set_waiting
from tests.forward_batches import Pool, Rows
from tests.models.small_models import tokens
from tests.models.test_native_decoder import bit_decoder, kv_cache

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))

Shares = NDArray[np.float64]


@pytest.fixture
def spinning() -> Iterator[None]:
    set_waiting("spin")  # all threads, however busy the machine is
    yield
    set_waiting("auto")


def threads_used(all_s: float, fewer_s: float, lost: Shares, rows: int = 1) -> NDArray[np.int32]:
    """Of 4 threads, for jobs that take so long and lose that share of their time."""
    crowd = library()
    declare(crowd, {"pl_test_crowd": (None, [c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_void_p])})
    times = [np.full(len(lost), seconds) for seconds in (all_s, fewer_s)]
    lost, used = np.ascontiguousarray(lost), np.zeros(len(lost), dtype=np.int32)
    arrays = [array.ctypes.data for array in (*times, lost)]
    crowd.pl_test_crowd(4, rows, *arrays, len(lost), used.ctypes.data)
    return used


def test_on_a_quiet_machine_all_threads_always_run() -> None:
    assert (threads_used(0.004, 0.001, np.full(500, 0.01)) == 4).all()


@pytest.mark.parametrize("rows", [1, 300])
def test_beside_others_the_faster_choice_is_made(rows: int) -> None:
    busy = np.full(1000, 0.3)
    assert (threads_used(0.010, 0.005, busy, rows)[100:] == 3).mean() > 0.9
    assert (threads_used(0.005, 0.010, busy, rows)[100:] == 4).mean() > 0.9


def test_the_other_choice_is_tried_now_and_then() -> None:
    used = threads_used(0.010, 0.005, np.full(1000, 0.3))[100:]
    assert 0.02 < (used == 4).mean() < 0.1


def test_threads_come_back_when_the_others_are_gone() -> None:
    crowd = library()
    lost = np.concatenate([np.full(300, 0.3), np.zeros(600)])
    all_s = np.where(lost > 0, 0.010, 0.004)
    fewer_s, used = np.full(len(lost), 0.005), np.zeros(len(lost), dtype=np.int32)
    threads_used(1.0, 1.0, lost[:1])  # declares the function
    crowd.pl_test_crowd(4, 1, all_s.ctypes.data, fewer_s.ctypes.data, lost.ctypes.data, len(lost), used.ctypes.data)
    assert (used[200:300] == 3).mean() > 0.9
    assert (used[-100:] == 4).all()


@pytest.mark.parametrize(
    "path", [("float32", None), ("float32", "int8"), ("float16", "gguf"), ("int16", "gguf")], ids=str
)
@pytest.mark.usefixtures("spinning")
def test_a_prompt_shared_by_rows_has_the_bits_of_its_chunks(path: tuple[str, str | None]) -> None:
    decoder = bit_decoder(path, num_threads=1)
    pool = Pool(1, 208)
    prompt = tokens(decoder.config, 200)
    chunked = kv_cache(decoder, pool.num_slots)
    for begin in range(0, 200, 20):  # too few rows to be shared
        last = decoder.forward(pool.batch(Rows(0, begin, prompt[begin : begin + 20], EMPTY_TREE)), chunked).logits[-1]
    for num_threads in (1, 2, 3):
        decoder.set_num_threads(num_threads)
        whole = kv_cache(decoder, pool.num_slots)
        logits = decoder.forward(pool.batch(Rows(0, 0, prompt, EMPTY_TREE)), whole).logits[-1]
        assert last_num_threads() == num_threads
        assert torch.equal(logits, last) and torch.equal(whole, chunked), num_threads


def test_an_unknown_way_to_wait_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="auto, spin, sleep"):
        set_waiting("doze")
