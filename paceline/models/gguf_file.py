"""GGUF files: config and weights of the Llama family, under Hugging Face names.

gguf_header.py parses the container; this file says what the content means. Two things need care. Files of the
`llama` architecture store the rows of q and k in another order (rotary pairs side by side), which is undone here, on
whole rows, so it works on quantized blocks just as well. And Llama 3's rotary scaling is stored as a tensor of finished
factors instead of the numbers that made them; the numbers are recognised and put back.

>>> GgufFile(Path("model.gguf")).config_dict()["architectures"]
['LlamaForCausalLM']
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig, RopeScaling
from paceline.core.weights import QuantizedTensor, ShapedWeights
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.config import config_from_dict
from paceline.models.dequantize import dequantize
from paceline.models.gguf_header import Header, StoredTensor
from paceline.models.gguf_names import (
    CONFIG_TENSORS,
    GGUF_ARCHITECTURES,
    PERMUTED,
    PLAIN_TYPES,
    QUANTIZED_TYPES,
    ROPE_FACTORS,
    SHORT_FACTORS,
    hf_name,
)
from paceline.models.rope import llama3_slowdown

GEMMA3_27B_LAYERS = 62
LLAMA3_ORIGINAL_CONTEXT = 8192  # of every published Llama 3.x


class GgufFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            header = Header(path)
        except (ValueError, OSError) as error:
            raise ModelLoadError(
                f"{path} is not a whole GGUF file: {error}. The download was probably cut short: "
                "delete the file and fetch it again."
            ) from error
        self._header, self._fields, self._tensors = header, header.fields, header.tensors
        self.architecture = str(self.field("general.architecture", "?"))
        if self.architecture not in GGUF_ARCHITECTURES:
            raise UnsupportedModelError(
                f"{path} holds the architecture {self.architecture!r}, which is not supported. "
                f"Known in GGUF files: {', '.join(GGUF_ARCHITECTURES)}."
            )

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value; {arch} in the key stands for the architecture."""
        if "{arch}" in key:
            key = key.replace("{arch}", self.architecture)
        return self._fields.get(key, default)

    def config(self) -> ModelConfig:
        return config_from_dict(self.config_dict(), source=str(self.path))

    def config_dict(self) -> dict[str, Any]:
        """The file's metadata as a Hugging Face config.json."""
        if self.field("{arch}.expert_count", 0):
            raise UnsupportedModelError(f"{self.path} is a mixture of experts, which is not supported.")
        num_heads = self._number("{arch}.attention.head_count")
        head_dim = self.field("{arch}.attention.key_length") or self._number("{arch}.embedding_length") // num_heads
        rotated = self.field("{arch}.rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise UnsupportedModelError(f"{self.path} rotates {rotated} of {head_dim} dimensions of each head.")
        window = self.field("{arch}.attention.sliding_window") or None
        return {
            "architectures": [GGUF_ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": int(self._tensor("token_embd.weight").shape[0]),
            "hidden_size": self._number("{arch}.embedding_length"),
            "intermediate_size": self._number("{arch}.feed_forward_length"),
            "num_hidden_layers": self._number("{arch}.block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._number("{arch}.attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._number("{arch}.context_length"),
            "rms_norm_eps": _short_float(self.field("{arch}.attention.layer_norm_rms_epsilon", 1e-6)),
            "rope_theta": self._rope_theta,
            "rope_scaling": self._rope_scaling(head_dim),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "max_window_layers": 0,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.eos_token_ids,
        } | self._special_fields(head_dim, window)

    def _special_fields(self, head_dim: int, window: int | None) -> dict[str, Any]:
        """What GGUF leaves to whoever runs a family, and what it says for that family only."""
        if self.architecture == "gemma3":
            return {
                "hidden_activation": "gelu_pytorch_tanh",
                "sliding_window": window,
                "query_pre_attn_scalar": self._gemma3_query_scalar(head_dim),
                "rope_local_base_freq": _short_float(self.field("{arch}.rope.freq_base_swa", 10_000.0)),
            }
        if self.architecture == "smollm3":
            return {"no_rope_layer_interval": 4, "use_sliding_window": False}
        return {"hidden_act": "silu"}

    def _gemma3_query_scalar(self, head_dim: int) -> int:
        """Not in the file: the head's size in all published models but the largest."""
        if self._number("{arch}.block_count") != GEMMA3_27B_LAYERS:
            return head_dim
        return self._number("{arch}.embedding_length") // self._number("{arch}.attention.head_count")

    @property
    def is_quantized(self) -> bool:
        return any(tensor.kind in QUANTIZED_TYPES for tensor in self._tensors.values())

    @property
    def eos_token_ids(self) -> list[int]:
        """Whatever ends an answer: the end token, and the end of a turn or message where the file names them."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        found = [self.field(f"tokenizer.ggml.{key}") for key in keys]
        return list(dict.fromkeys(int(token) for token in found if token is not None))

    def weights(self, *, keep_quantized: bool = False) -> "GgufWeights":
        """All weights by Hugging Face name. Quantized ones are widened to float32, exactly, unless kept."""
        for name, stored in self._tensors.items():
            self._check_storage(name, stored)
        return GgufWeights(self, keep_quantized)

    def tensor_names(self) -> dict[str, str]:
        """Hugging Face name -> the file's, of all weights."""
        return {hf_name(name, self.architecture): name for name in self._tensors if name not in CONFIG_TENSORS}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def tensor(self, name: str, *, keep_quantized: bool) -> Tensor | QuantizedTensor:
        tensor = self._unpermuted(name)
        self._header.release(self._tensor(name))
        return dequantize(tensor) if isinstance(tensor, QuantizedTensor) and not keep_quantized else tensor

    def _unpermuted(self, name: str) -> Tensor | QuantizedTensor:
        stored = self._tensor(name)
        num_rows = stored.shape[0]
        data = stored.data.reshape(num_rows, -1)  # [rows, bytes of a row]
        if self.architecture in PERMUTED and (match := re.search(r"\.attn_([qk])\.(weight|bias)$", name)):
            key = "{arch}.attention.head_count" + ("_kv" if match[1] == "k" else "")
            data = data[_rope_row_order(num_rows, self._number(key))]
        copy = torch.from_numpy(np.array(data))  # the file may go away
        if stored.kind in PLAIN_TYPES:
            return copy.view(PLAIN_TYPES[stored.kind]).view(stored.shape)
        return QuantizedTensor(copy, stored.kind, (stored.shape[0], stored.shape[1]))

    def _check_storage(self, name: str, stored: StoredTensor) -> None:
        if stored.kind not in PLAIN_TYPES and not (stored.kind in QUANTIZED_TYPES and len(stored.shape) == 2):
            raise UnsupportedModelError(
                f"{self.path}: {name} is stored as {stored.kind}, which is not supported. "
                f"Known: {', '.join((*PLAIN_TYPES, *QUANTIZED_TYPES))}."
            )

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise ModelLoadError(f"{self.path} lacks the tensor {name}. Fetch the file again.")
        return self._tensors[name]

    def _number(self, key: str, default: int | None = None) -> int:
        value = self.field(key, default)
        if isinstance(value, list):  # one number per layer
            if len(set(value)) != 1:
                key = key.replace("{arch}", self.architecture)
                raise UnsupportedModelError(f"{self.path} has {key} that differs between layers; not supported.")
            value = value[0]
        if value is None:
            key = key.replace("{arch}", self.architecture)
            raise ModelLoadError(f"{self.path} does not say {key}. Fetch the file again, or convert the model anew.")
        return int(value)

    @property
    def _rope_theta(self) -> float:
        return _short_float(self.field("{arch}.rope.freq_base", 10_000.0))

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        if ROPE_FACTORS in self._tensors:
            return self._llama3_scaling(head_dim)
        if SHORT_FACTORS in self._tensors:
            return self._longrope()
        kind = self.field("{arch}.rope.scaling.type", "none")
        factor = float(self.field("{arch}.rope.scaling.factor", 1.0))
        if kind == "none" or factor == 1.0:
            return None
        scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
        if original := self.field("{arch}.rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = original
        if (attention := self.field("{arch}.rope.scaling.attn_factor")) is not None:
            # GGUF multiplies YaRN's own factor; Hugging Face replaces it.
            scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
        return scaling

    def _longrope(self) -> dict[str, Any]:
        factors = self._tensor(SHORT_FACTORS).data.view(np.float32).tolist()
        scaling = {"rope_type": "longrope", "short_factor": factors}
        if (attention := self.field("{arch}.rope.scaling.attn_factor")) is not None:
            scaling["attention_factor"] = attention
        scaling["original_max_position_embeddings"] = self._number("{arch}.rope.scaling.original_context_length")
        return scaling

    def _llama3_scaling(self, head_dim: int) -> dict[str, Any] | None:
        factors = torch.from_numpy(np.array(self._tensor(ROPE_FACTORS).data.view(np.float32)))
        if bool((factors == 1.0).all()):
            return None
        scaling = RopeScaling("llama3", float(factors.max()), LLAMA3_ORIGINAL_CONTEXT)
        inv_freq = self._rope_theta ** -(torch.arange(0, head_dim, 2) / head_dim)
        made = llama3_slowdown(inv_freq, scaling)
        if made.shape != factors.shape or not torch.allclose(made, factors, rtol=1e-3):
            raise UnsupportedModelError(
                f"{self.path} scales its rotary embedding by factors that are not Llama 3's; not supported."
            )
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }


class GgufWeights(ShapedWeights):
    """The file's weights, each read when it is asked for, so that no more than one need be in memory."""

    def __init__(self, file: GgufFile, keep_quantized: bool) -> None:
        self._file, self._names, self._keep_quantized = file, file.tensor_names(), keep_quantized

    def __getitem__(self, name: str) -> Tensor | QuantizedTensor:
        return self._file.tensor(self._names[name], keep_quantized=self._keep_quantized)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self._names[name])


def _short_float(value: float) -> float:
    """The shortest decimal that the file's float32 stands for: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_row_order(num_rows: int, num_heads: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """GGUF row of each Hugging Face row: [head, pair, half] there, [head, half, pair] here."""
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
