"""A Hugging Face `config.json`, read into the one `ModelConfig` that every decoder takes.

The same fact has had several spellings over the years: rotary settings were `rope_theta` and `rope_scaling` before
transformers 5 put them into `rope_parameters`; Qwen says which layers have a sliding window by `layer_types`, or by
`use_sliding_window` and `max_window_layers`; the end token is a number or a list, in `config.json` or in
`generation_config.json`. All of that ends here. What we cannot run is refused by name, never run wrongly.

>>> model_config(Path("my-model")).family
'llama'
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.model_config import ARCHITECTURES, ModelConfig, RopeScaling
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.families import (
    FAMILIES,
    GEMMA3_WINDOW,
    layer_kinds,
    longrope,
    refuse_unsupported,
    special_fields,
)
from paceline.models.quantized.config import quantization_scheme

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")

DEFAULT_QWEN_MAX_WINDOW_LAYERS = 28


def model_config(folder: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json`, where there is one) of a model folder."""
    generation = folder / "generation_config.json"
    return config_from_dict(
        read_json(folder / "config.json"),
        read_json(generation) if generation.is_file() else None,
        source=str(folder / "config.json"),
    )


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing. A model folder needs it: fetch the model again.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON ({error}). Fetch the model again.") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a {type(content).__name__}, not a JSON object. Fetch the model again.")
    return content


def config_from_dict(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, source: str = "config.json"
) -> ModelConfig:
    """Turn the content of `config.json` into a `ModelConfig`; `source` names the file in errors."""
    family = _family(config, source)
    defaults = FAMILIES[family]
    refuse_unsupported(config, family, source)
    quantization_scheme(config, source)  # refuses what we cannot read
    hidden_size = _positive(config, "hidden_size", source)
    num_heads = _positive(config, "num_attention_heads", source)
    num_layers = _positive(config, "num_hidden_layers", source)
    max_position = _positive(config, "max_position_embeddings", source, defaults.max_position)
    theta, scaling = _rope(config, family, max_position, source)
    if scaling.kind == "longrope":
        max_position = min(max_position, scaling.original_max_position)
    window, windowed_layers = _sliding_window(config, family, num_layers)
    attention_bias = bool(config.get("attention_bias", False)) and family not in ("mistral", "phi3")
    special = special_fields(config, family, hidden_size, num_layers)
    result = ModelConfig(
        family=family,
        vocab_size=_positive(config, "vocab_size", source),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size", source),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_positive(config, "num_key_value_heads", source, num_heads),
        head_dim=_positive(config, "head_dim", source, defaults.head_dim or hidden_size // num_heads),
        max_position=max_position,
        rms_norm_eps=float(config.get("rms_norm_eps", defaults.rms_norm_eps)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", defaults.tied)),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        mlp_bias=family in ("llama", "smollm3") and bool(config.get("mlp_bias", False)),
        sliding_window=window,
        sliding_layers=windowed_layers,
        bos_token_id=_bos_token_id(config, generation or {}),
        eos_token_ids=eos_token_ids(config, generation or {}),
        **({"qk_norm": family == "qwen3"} | special),
    )
    _check_heads(result, source)
    return result


def _family(config: Mapping[str, Any], source: str) -> str:
    architectures = config.get("architectures") or []
    for architecture in architectures:
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture]
    given = ", ".join(map(str, architectures)) or f"none (model_type {config.get('model_type')!r})"
    raise UnsupportedModelError(
        f"{source} asks for the architecture {given}, which is not supported. Known: {', '.join(ARCHITECTURES)}."
    )


def _rope(config: Mapping[str, Any], family: str, max_position: int, source: str) -> tuple[float, RopeScaling]:
    """The rotary base and its scaling, from the new spelling, else the old one."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if family == "gemma3" and "full_attention" in rope:
        if (rope.get("sliding_attention") or {}).get("rope_type", "default") != "default":
            raise UnsupportedModelError(f"{source} scales the rotary embedding of its sliding layers; not supported.")
        rope = rope["full_attention"]
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModelError(
            f"{source} has rotary settings per kind of layer ({', '.join(rope)}); not supported."
        )
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or FAMILIES[family].rope_theta)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its first name
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"{source} asks for {kind!r} rotary scaling, which is not supported. Known: {', '.join(ROPE_KINDS)}."
        )
    if kind == "default":
        return theta, RopeScaling()
    original = int(
        config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or max_position
    )
    if kind == "longrope":
        return theta, longrope(rope, max_position, original, source)
    factor = rope.get("factor")
    if factor is None and kind == "yarn":
        factor = max_position / original
    if factor is None:
        raise ModelLoadError(f"{source} asks for {kind!r} rotary scaling without a `factor`. Fetch the model again.")
    return theta, RopeScaling(
        kind=kind,
        factor=float(factor),
        original_max_position=original,
        low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=_optional_float(rope.get("attention_factor")),
        mscale=_optional_float(rope.get("mscale")),
        mscale_all_dim=_optional_float(rope.get("mscale_all_dim")),
        truncate=bool(rope.get("truncate", True)),
    )


def _sliding_window(
    config: Mapping[str, Any], family: str, num_layers: int
) -> tuple[int | None, tuple[int, ...] | None]:
    """(window, layers that have it); layers None means all of them."""
    window = config.get("sliding_window", GEMMA3_WINDOW if family == "gemma3" else None)
    qwen = family.startswith("qwen")
    is_optional = qwen or family == "smollm3"  # then a window alone says nothing
    if family == "llama" or window is None or (is_optional and not config.get("use_sliding_window", False)):
        return None, None
    kinds = layer_kinds(config, family, num_layers)
    if kinds is not None:
        layers = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    elif qwen:
        layers = tuple(range(config.get("max_window_layers", DEFAULT_QWEN_MAX_WINDOW_LAYERS), num_layers))
    else:
        return int(window), None
    return (int(window), layers) if layers else (None, None)


def eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json wins, as it does in transformers' generate()."""
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(int(token) for token in eos) if isinstance(eos, list) else (int(eos),)


def _bos_token_id(config: Mapping[str, Any], generation: Mapping[str, Any]) -> int | None:
    bos = config.get("bos_token_id")
    if bos is None:
        bos = generation.get("bos_token_id")
    return None if bos is None else int(bos)


def _check_heads(config: ModelConfig, source: str) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"{source}: {config.num_heads} query heads cannot share {config.num_kv_heads} key/value heads evenly."
        )
    if config.head_dim % 2:
        raise ModelLoadError(f"{source}: head_dim is {config.head_dim}; rotary embedding needs an even number.")


def _positive(config: Mapping[str, Any], key: str, source: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{source}: `{key}` must be a positive whole number, but is {value!r}.")
    return value


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)
