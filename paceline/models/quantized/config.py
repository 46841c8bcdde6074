"""`quantization_config` of a config.json, read into a `Scheme`. What we cannot run is refused by name."""

from collections.abc import Mapping
from typing import Any

from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.quantized.scheme import WHOLE_ROW, Scheme

METHODS = ("awq", "gptq", "fp8", "compressed-tensors")
GPTQ_BITS = (4, 8)
HEAD = "lm_head"


def quantization_scheme(config: Mapping[str, Any], source: str = "config.json") -> Scheme | None:
    """How the folder's weights are quantized; None where they are plain."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise ModelLoadError(f"{source}: `quantization_config` must be an object, but is {given!r}.")
    method = given.get("quant_method", "unknown")
    readers = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed_tensors}
    if method not in readers:
        raise UnsupportedModelError(
            f"{source} describes weights quantized with {method!r}, which is not supported. "
            f"Known: {', '.join(METHODS)}. Use the unquantized model, or a GGUF file of it."
        )
    return readers[method](given, source)


def _awq(given: Mapping[str, Any], source: str) -> Scheme:
    _require(given, source, "awq", "bits", (4,), aliases=("w_bit",))
    version = str(given.get("version", "gemm")).lower()
    if version != "gemm":
        raise UnsupportedModelError(f"{source}: AWQ's layout {version!r} is not supported, only 'gemm'.")
    if not given.get("zero_point", True):
        raise UnsupportedModelError(f"{source}: AWQ without zero points (zero_point false) is not supported.")
    group_size = _group_size(given.get("group_size", given.get("q_group_size", 128)), source)
    skipped = _names(given.get("modules_to_not_convert"), "modules_to_not_convert", source)
    return Scheme("awq", "awq", 4, group_size, symmetric=False, not_quantized=(*skipped, HEAD))


def _gptq(given: Mapping[str, Any], source: str) -> Scheme:
    bits = _require(given, source, "gptq", "bits", GPTQ_BITS)
    layout = str(given.get("checkpoint_format") or "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(
            f"{source}: GPTQ's checkpoint_format {layout!r} is not supported, only 'gptq' and 'gptq_v2'."
        )
    if given.get("dynamic"):
        raise UnsupportedModelError(f"{source}: GPTQ with other settings per module (`dynamic`) is not supported.")
    group_size = _group_size(given.get("group_size", 128), source)
    skipped = _names(given.get("modules_to_not_convert"), "modules_to_not_convert", source)
    head = () if given.get("lm_head") else (HEAD,)
    return Scheme("gptq", layout, bits, group_size, bool(given.get("sym", True)), not_quantized=(*skipped, *head))


def _fp8(given: Mapping[str, Any], source: str) -> Scheme:
    kind = given.get("fmt", "e4m3")
    if kind != "e4m3":
        raise UnsupportedModelError(f"{source}: FP8 weights of the kind {kind!r} are not supported, only 'e4m3'.")
    activations = given.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise UnsupportedModelError(f"{source}: FP8's activation_scheme {activations!r} is not known.")
    skipped = _names(given.get("modules_to_not_convert"), "modules_to_not_convert", source)
    skipped += _names(given.get("ignored_layers"), "ignored_layers", source)
    block = _block(given.get("weight_block_size"), source)
    return Scheme("fp8", "float8", block=block, not_quantized=(*skipped, HEAD))


def _compressed_tensors(given: Mapping[str, Any], source: str) -> Scheme:
    groups = given.get("config_groups") or {}
    if len(groups) != 1:
        raise UnsupportedModelError(
            f"{source}: compressed-tensors with {len(groups)} config_groups is not supported, only with one."
        )
    (group,) = groups.values()
    _check_compressed_group(given, group, source)
    weights = group["weights"]
    layout, bits = _compressed_layout(given, group, source)
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    known = ("tensor", "channel", "group") if layout != "float8" else ("tensor", "channel", "block")
    if strategy not in known:
        raise UnsupportedModelError(
            f"{source}: compressed-tensors' strategy {strategy!r} is not supported for {layout} weights; "
            f"known: {', '.join(known)}."
        )
    return Scheme(
        "compressed-tensors",
        layout,
        bits,
        _group_size(weights.get("group_size"), source) if strategy == "group" else WHOLE_ROW,
        bool(weights.get("symmetric", True)),
        _block(weights.get("block_structure"), source) if strategy == "block" else None,
        _names(given.get("ignore"), "ignore", source),
        exact_names=True,
    )


def _check_compressed_group(given: Mapping[str, Any], group: Mapping[str, Any], source: str) -> None:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ModelLoadError(f"{source}: compressed-tensors' config_groups name no `weights`.")
    if group.get("targets", ["Linear"]) != ["Linear"]:
        raise UnsupportedModelError(
            f"{source}: compressed-tensors' targets {group['targets']} are not supported, only ['Linear']."
        )
    sparsity = (given.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise UnsupportedModelError(f"{source}: compressed-tensors' sparsity {sparsity!r} is not supported.")
    if given.get("transform_config"):
        raise UnsupportedModelError(f"{source}: compressed-tensors' transforms (`transform_config`) are not supported.")


def _compressed_layout(given: Mapping[str, Any], group: Mapping[str, Any], source: str) -> tuple[str, int]:
    weights, form = group["weights"], group.get("format") or given.get("format")
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    known = {
        ("pack-quantized", "int", 4): "packed",
        ("pack-quantized", "int", 8): "packed",
        ("int-quantized", "int", 8): "int8",
        ("naive-quantized", "int", 8): "int8",
        ("float-quantized", "float", 8): "float8",
        ("naive-quantized", "float", 8): "float8",
    }
    if form is None or (form, kind, bits) not in known:
        raise UnsupportedModelError(
            f"{source}: compressed-tensors' format {form!r} of {bits}-bit {kind} weights is not supported. Known: "
            "pack-quantized int of 4 or 8 bits, int-quantized of 8 bits, float-quantized of 8 bits."
        )
    return known[form, kind, bits], bits


def _require(
    given: Mapping[str, Any], source: str, method: str, key: str, known: tuple[int, ...], aliases: tuple[str, ...] = ()
) -> int:
    value = next((given[name] for name in (key, *aliases) if name in given), None)
    if value not in known or isinstance(value, bool):
        allowed = " or ".join(map(str, known))
        raise UnsupportedModelError(
            f"{source}: {method} weights of {value!r} bits are not supported, only of {allowed}."
        )
    return int(value)


def _group_size(value: Any, source: str) -> int:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or (value != WHOLE_ROW and value < 1):
        raise ModelLoadError(f"{source}: group_size {value!r} is unknown; it must be a positive number, or -1.")
    return int(value)


def _block(value: Any, source: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelLoadError(f"{source}: a block of weights must be like [128, 128], but is {value!r}.")
    return sizes[0], sizes[1]


def _names(value: Any, key: str, source: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ModelLoadError(f"{source}: `{key}` must be a list of names, but is {value!r}.")
    return tuple(value)
