"""Small GGUF files, written with the gguf package: a random model of any family in any storage type, and tokenizers.

The writer does what converters do to a `llama` model: it reorders the rows of q and k for the other rotary layout.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from paceline.models.gguf_names import GGUF_ARCHITECTURES, LAYER_NAMES, OTHER_NAMES, PERMUTED, TOP_NAMES

TEXTS = [
    "",
    "Hello world",
    "  two leading spaces, trailing too  ",
    "def f(x):\n    return x**2  # 12345\n\n\n\tpass",
    "naïve café, 你好世界, здравствуй, 🎉👩‍👩‍👧, e\u0301 \u200d",
    "<|im_start|>user\nHi there<|im_end|>\n",
    "It's we'll I'D THEY'RE 1234567890 ½ ²",
    "a\r\n\r\nb \n \n c\u00a0d\u3000e",
]
CORPUS = [*TEXTS, "the cat sat on the mat 12 123 1234", "ThE CAT's hats", "über straße", "x  y   z"] * 3


FAMILIES = {  # variant of small_models -> architecture in GGUF
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
}
BLOCK_CONFIG: dict[str, Any] = {  # rows of 256, so that every block format divides them
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}


def stored(tensor: torch.Tensor, kind: str) -> np.ndarray:
    """The tensor in a storage type. The package cannot make K-blocks: those get random contents, mild scales."""
    values = tensor.float().numpy()
    quantization = gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16"):
        return values.astype(np.float32 if kind == "F32" else np.float16)
    if not kind.endswith("_K"):
        return gguf.quants.quantize(values, quantization)
    rows, columns = values.shape
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    blocks = np.random.default_rng(0).integers(0, 256, (rows * columns // block, block_bytes), dtype=np.uint8)
    scales = np.full((len(blocks), 2), 0.002, dtype=np.float16).view(np.uint8)
    if kind == "Q6_K":
        blocks[:, -2:] = scales[:, :2]  # one scale at the end
    else:
        blocks[:, :4] = scales  # scale and minimum in front
    return blocks.reshape(rows, -1)


def permuted(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Hugging Face's row order of q and k -> GGUF's."""
    return tensor.reshape(num_heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write_model(path: Path, hf: Any, kind: str = "F32", extra: dict[str, Any] | None = None) -> None:
    """`extra` adds metadata fields, or tensors where the value is an array."""
    config = hf.config
    arch = FAMILIES[type(hf).__name__]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    for key, value in (extra or {}).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        else:
            add_field(writer, key.replace("{arch}", arch), value)
    add_tokenizer(writer, byte_level_vocabulary(config.vocab_size), pre="gpt-2")
    for name, tensor in hf.named_parameters():
        weight = tensor.detach()
        if arch in PERMUTED and ".q_proj." in name:
            weight = permuted(weight, config.num_attention_heads)
        if arch in PERMUTED and ".k_proj." in name:
            weight = permuted(weight, config.num_key_value_heads)
        if arch == "gemma3" and "norm" in name:
            weight = weight + 1.0
        used = kind if weight.dim() == 2 else "F32"
        raw = None if used in ("F32", "F16") else gguf.GGMLQuantizationType[used]
        writer.add_tensor(gguf_name(name, arch), stored(weight, used), raw_dtype=raw)
    finish(writer)


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_float32(key, value)


def add_tokenizer(
    writer: gguf.GGUFWriter, tokens: list[str], merges: list[str] | None = None, *, pre: str, types: Any = None
) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [1] * len(tokens))
    writer.add_token_merges(merges or ["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def byte_level_vocabulary(size: int) -> list[str]:
    alphabet = ["a", "b", "ab"]
    return alphabet + [f"token{i}" for i in range(size - len(alphabet))]


def gguf_name(name: str, arch: str = "llama") -> str:
    for ours, theirs in TOP_NAMES.items():
        if theirs == name:
            return ours
    _, _, layer, rest = name.split(".", 3)
    module, suffix = rest.rsplit(".", 1)
    inverse = {theirs: ours for ours, theirs in (LAYER_NAMES | OTHER_NAMES.get(arch, {})).items()}
    return f"blk.{layer}.{inverse[module]}.{suffix}"


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def trained(pre_tokenizer: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    """A small byte-level BPE tokenizer, cut by `pre_tokenizer`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_byte_level(path: Path, tokenizer: tokenizers.Tokenizer, pre: str, **fields: bool) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer = gguf.GGUFWriter(path, "llama")
    types = [3, 3] + [1] * (len(tokens) - 2)
    add_tokenizer(writer, tokens, [" ".join(pair) for pair in model["merges"]], pre=pre, types=types)
    for name, value in fields.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    finish(writer)


assert set(FAMILIES.values()) == set(GGUF_ARCHITECTURES)
