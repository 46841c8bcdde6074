"""Room for keys and values: where it begins, and that its memory can be taken at once."""

import sys
from pathlib import Path

import pytest
import torch

from paceline.core.kv_tensor import CACHE_LINE, allocate_kv, populate, touch
from tests.toy import ToyDecoder


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_pool_begins_with_a_cache_line_and_is_zero() -> None:
    pool = allocate_kv(ToyDecoder.config, 1000, torch.float32, torch.device("cpu"))
    assert pool.shape == (1, 2, 1000, 1, 1) and not pool.any()
    assert pool.data_ptr() % CACHE_LINE == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_populating_takes_the_memory_and_leaves_what_is_in_it() -> None:
    pool = allocate_kv(ToyDecoder.config, 16 << 20, torch.float32, torch.device("cpu"))  # 128 MiB
    pool[0, 1, 12_345] = 7.0
    before = resident_bytes()
    if not populate(pool):
        pytest.skip("this kernel cannot")
    assert resident_bytes() - before > 96 << 20
    assert pool[0, 1, 12_345] == 7.0 and pool.sum() == 7.0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_touching_takes_the_memory_of_these_slots_and_no_other() -> None:
    pool = allocate_kv(ToyDecoder.config, 16 << 20, torch.float32, torch.device("cpu"))  # 128 MiB
    before = resident_bytes()
    touch(pool, slice(0, 4 << 20), slice(15 << 20, None))  # 5 of 16 parts
    assert 36 << 20 < resident_bytes() - before < 56 << 20
    assert not pool.any()
