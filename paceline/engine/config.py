"""The engine's options, as given and as resolved for one model on one machine."""

from dataclasses import dataclass

import torch

from paceline.core.kv_tensor import TILE_SLOTS
from paceline.core.model_config import ModelConfig
from paceline.errors import InvalidOptionError
from paceline.kv.offload import OffloadOption, parse_offload
from paceline.kv.storage import kv_bytes_per_token

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """None means: choose what fits. `resolve_config` turns it into a `ResolvedConfig`."""

    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    max_token_delay_s: float | None = None  # see engine/scheduler.py
    kv_offload: str | int | None = None  # see kv/offload.py


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int
    enable_prefix_caching: bool
    max_token_delay_s: float | None
    kv_offload: OffloadOption | None = None


def resolve_config(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, free_memory_bytes: int
) -> ResolvedConfig:
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise InvalidOptionError(f"{name} must be at least 1, got {value}")
    if config.max_token_delay_s is not None and not config.max_token_delay_s > 0:
        raise InvalidOptionError(f"max_token_delay_s must be above 0, or None; got {config.max_token_delay_s}")
    if config.num_kv_blocks is not None and config.kv_cache_memory_bytes is not None:
        raise InvalidOptionError("give num_kv_blocks or kv_cache_memory_bytes, not both")
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise InvalidOptionError(
            f"max_model_len {config.max_model_len} is above the model's own context of {model.max_position} tokens"
        )
    if dtype == torch.int16 and config.block_size % TILE_SLOTS:
        raise InvalidOptionError(
            f"block_size {config.block_size} is no multiple of {TILE_SLOTS}, as int16 keys and values need it (the "
            "default beside quantized weights on AVX-512): use one that is, or kv_cache_dtype='float16'"
        )
    block_bytes = kv_bytes_per_token(model, dtype) * config.block_size
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        pool_bytes = config.kv_cache_memory_bytes
        if pool_bytes is None:
            pool_bytes = _default_pool_bytes(config, model, block_bytes, device, free_memory_bytes)
        num_blocks = pool_bytes // block_bytes
    capacity = num_blocks * config.block_size
    max_model_len = config.max_model_len or min(model.max_position, capacity)
    if max_model_len > capacity or capacity < 2:
        raise InvalidOptionError(
            f"the KV pool holds {capacity} tokens ({num_blocks} blocks of {config.block_size}), too few for one "
            f"request of {max(2, max_model_len)}: raise kv_cache_memory_bytes ({block_bytes} bytes a block) or "
            "lower max_model_len"
        )
    batched = config.max_num_batched_tokens or (512 if device.type == "cpu" else 2048)
    if batched < config.max_num_seqs:
        raise InvalidOptionError(
            f"max_num_batched_tokens {batched} is below max_num_seqs {config.max_num_seqs}: "
            "every running request needs a row"
        )
    return ResolvedConfig(
        max_model_len,
        config.max_num_seqs,
        batched,
        config.block_size,
        num_blocks,
        config.enable_prefix_caching,
        config.max_token_delay_s,
        _offload(config),
    )


def _offload(config: EngineConfig) -> OffloadOption | None:
    if config.kv_offload is None:
        return None
    if not config.enable_prefix_caching:
        raise InvalidOptionError("kv_offload keeps cached prefixes: it needs enable_prefix_caching")
    return parse_offload(config.kv_offload)


def _default_pool_bytes(
    config: EngineConfig, model: ModelConfig, block_bytes: int, device: torch.device, free_memory_bytes: int
) -> int:
    """All running requests at a quarter of the context, but at most the memory that can be spared."""
    max_len = config.max_model_len or model.max_position
    blocks_per_request = -(-max_len // config.block_size)
    wanted = block_bytes * max(2 * blocks_per_request, config.max_num_seqs * blocks_per_request // 4)
    share = 0.25 if device.type == "cpu" else 0.85
    limit = min(int(free_memory_bytes * share), 4 * GIB if device.type == "cpu" else free_memory_bytes)
    return min(wanted, limit)
