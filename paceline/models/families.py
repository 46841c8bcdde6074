"""What sets one family apart from the others in `config.json`: defaults of keys left out, and parts beyond Llama's.

The defaults are transformers': a config.json need not say what is the default of its family.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.model_config import RopeScaling
from paceline.errors import ModelLoadError, UnsupportedModelError

logger = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class Family:
    max_position: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tied: bool = False
    activations: tuple[str, ...] = ("silu", "swish")
    head_dim: int | None = None  # None: hidden_size / heads


FAMILIES = {
    "llama": Family(2048),
    "mistral": Family(131_072),
    "qwen2": Family(32_768),
    "qwen3": Family(32_768),
    "gemma3": Family(131_072, 1e6, tied=True, activations=("gelu_pytorch_tanh",), head_dim=256),
    "phi3": Family(4096, rms_norm_eps=1e-5),
    "smollm3": Family(32_768, 2e6, tied=True),
}
GEMMA3_WINDOW, GEMMA3_PATTERN, GEMMA3_LOCAL_THETA, GEMMA3_QUERY_SCALAR = 4096, 6, 10_000.0, 256
SMOLLM3_INTERVAL = 4


def special_fields(config: Mapping[str, Any], family: str, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """Fields of `ModelConfig` that only some families have."""
    if family == "gemma3":
        return _gemma3_fields(config, hidden_size)
    if family == "smollm3":
        return {"no_rope_layers": _no_rope_layers(config, num_layers)}
    return {}


def _gemma3_fields(config: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    nested = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    local = nested.get("rope_theta") or config.get("rope_local_base_freq") or GEMMA3_LOCAL_THETA
    return {
        "activation": "gelu_tanh",
        "qk_norm": True,
        "output_norms": True,
        "embedding_scale": math.sqrt(hidden_size),
        "attention_scale": float(config.get("query_pre_attn_scalar") or GEMMA3_QUERY_SCALAR) ** -0.5,
        "local_rope_theta": float(local),
    }


def _no_rope_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """config.json has a 1 for each layer with rotary embedding and a 0 for each without."""
    flags = config.get("no_rope_layers")
    if flags is None:
        interval = config.get("no_rope_layer_interval") or SMOLLM3_INTERVAL
        flags = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if len(flags) != num_layers:
        raise ModelLoadError(f"`no_rope_layers` speaks of {len(flags)} layers, but the model has {num_layers}.")
    return tuple(layer for layer, rotates in enumerate(flags) if not rotates)


def layer_kinds(config: Mapping[str, Any], family: str, num_layers: int) -> list[str] | None:
    """`layer_types`, or what they are where they are left out."""
    kinds = config.get("layer_types")
    if kinds is None and family == "gemma3":
        pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or GEMMA3_PATTERN
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    if kinds is None and family == "smollm3":
        blind = _no_rope_layers(config, num_layers)
        kinds = ["sliding_attention" if i in blind else "full_attention" for i in range(num_layers)]
    if kinds is not None and len(kinds) != num_layers:
        raise ModelLoadError(f"`layer_types` names {len(kinds)} layers, but the model has {num_layers}.")
    return kinds


def refuse_unsupported(config: Mapping[str, Any], family: str, source: str) -> None:
    known = FAMILIES[family].activations
    activation = config.get("hidden_activation") or config.get("hidden_act") or known[0]
    if activation not in known:
        raise UnsupportedModelError(f"{source} has hidden_act {activation!r}; only {known[0]} is supported.")
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if config.get(key):
            raise UnsupportedModelError(f"{source} bounds its logits ({key}); not supported.")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError(f"{source} attends in both directions (it is an encoder); not supported.")
    rotary_share = {**config, **(config.get("rope_parameters") or {})}.get("partial_rotary_factor", 1.0)
    if rotary_share != 1.0:
        raise UnsupportedModelError(
            f"{source} rotates only a part of each head (partial_rotary_factor {rotary_share}); not supported."
        )


def longrope(rope: Mapping[str, Any], max_position: int, original: int, source: str) -> RopeScaling:
    """Phi-3's long context: other factors for every position once a text is longer than the original context.

    A token's key would then depend on how long the text becomes, so no cache of keys could be exact. We run the short
    factors, within the original context."""
    factors = rope.get("short_factor")
    if not isinstance(factors, list) or not all(isinstance(factor, int | float) for factor in factors):
        raise ModelLoadError(f"{source} asks for 'longrope' scaling without a list `short_factor`.")
    growth = rope.get("factor") or max_position / original
    attention = rope.get("attention_factor")
    if attention is None:
        attention = 1.0 if growth <= 1.0 else math.sqrt(1.0 + math.log(growth) / math.log(original))
    if max_position > original:
        logger.warning(
            "%s has 'longrope' scaling beyond %d tokens, where keys change with the length of the text: the context is "
            "limited to %d tokens",
            source,
            original,
            original,
        )
    return RopeScaling(
        "longrope", float(growth), original, attention_factor=float(attention), factors=tuple(map(float, factors))
    )
