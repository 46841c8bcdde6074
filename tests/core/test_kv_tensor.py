"""Room for keys and values."""

import pytest
import torch

from paceline.core.kv_tensor import CACHE_LINE, allocate_kv
from tests.toy import ToyDecoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_pool_is_zeroed_and_begins_with_a_cache_line(dtype: torch.dtype) -> None:
    config = ToyDecoder.config
    for num_slots in (1, 7, 64, 1_000_000):
        pool = allocate_kv(config, num_slots, dtype, torch.device("cpu"))
        assert pool.shape == (config.num_layers, 2, num_slots, config.num_kv_heads, config.head_dim)
        assert pool.dtype == dtype and pool.is_contiguous()
        assert pool.data_ptr() % CACHE_LINE == 0
        assert not pool.any()
