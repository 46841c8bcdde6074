"""Which tensors a model has, by Hugging Face name and shape, and the check that a file holds exactly those."""

from collections.abc import Iterator

from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.core.weights import QuantizedTensor, ShapedWeights, Weights
from paceline.errors import ModelLoadError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

# Buffers that old checkpoints carry along; they are computed, not trained.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attention.masked_bias", "attention.bias")


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model must have -> its shape."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config):
            shapes[layer_prefix(layer) + name] = shape
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.q_size, config.kv_size
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.output_norms:
        yield "pre_feedforward_layernorm.weight", (hidden,)
        yield "post_feedforward_layernorm.weight", (hidden,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    for name, rows, columns, bias in (
        ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, config.o_bias),
        ("mlp.gate_proj", intermediate, hidden, config.mlp_bias),
        ("mlp.up_proj", intermediate, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, intermediate, config.mlp_bias),
    ):
        yield name + ".weight", (rows, columns)
        if bias:
            yield name + ".bias", (rows,)


def check_weights(weights: Weights, config: ModelConfig, source: str) -> dict[str, Tensor | QuantizedTensor]:
    """The model's tensors out of `weights`; raise when one is missing, extra or of another shape."""
    check_shapes(weights, config, source)
    return {name: weights[name] for name in expected_shapes(config)}


def check_shapes(weights: Weights, config: ModelConfig, source: str) -> None:
    """The same check, without reading weights that can say their shapes."""
    expected = expected_shapes(config)
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise ModelLoadError(
            f"{source} lacks {_some(missing)}. The file is incomplete or belongs to another config.json: "
            "fetch the model again."
        )
    extra = sorted(name for name in weights if name not in expected and not _ignorable(name, config))
    if extra:
        raise ModelLoadError(
            f"{source} holds {_some(extra)}, which this architecture does not use: running without them would give "
            "wrong text. Check that config.json belongs to these weights."
        )
    for name, shape in expected.items():
        found = weights.shape(name) if isinstance(weights, ShapedWeights) else tuple(weights[name].shape)
        if found != shape:
            raise ModelLoadError(
                f"{source}: {name} has shape {found}, but config.json calls for {shape}. "
                "Check that config.json belongs to these weights."
            )


def _ignorable(name: str, config: ModelConfig) -> bool:
    # A tied model may still store its head: the same numbers a second time.
    return name.endswith(IGNORED_SUFFIXES) or (name == HEAD and config.tie_word_embeddings)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
