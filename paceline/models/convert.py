"""A GGUF file turned into a Hugging Face folder: the same numbers, in the files that other tools read as well."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from paceline.core.weights import QuantizedTensor
from paceline.models.gguf_file import GgufFile
from paceline.models.gguf_tokenizer import build_tokenizer, tokenizer_config
from paceline.models.layout import check_weights


def convert_gguf(source: Path, folder: Path, *, widen: bool = True) -> None:
    """Write config and tokenizer of `source` into `folder`, and where asked float32 weights (widened exactly)."""
    file = GgufFile(source)
    config = file.config_dict() | {"dtype": "float32"}
    if widen:
        _write_widened(file, folder)
    build_tokenizer(file).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(file))
    _write_json(folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})
    _write_json(folder / "config.json", config)


def _write_widened(file: GgufFile, folder: Path) -> None:
    weights = check_weights(file.weights(), file.config(), str(file.path))
    widened = {name: _widened(tensor) for name, tensor in weights.items()}
    save_file(widened, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the library makes it private; a cache may be shared


def _widened(tensor: Tensor | QuantizedTensor) -> Tensor:
    assert isinstance(tensor, Tensor)  # weights() widens unless told otherwise
    return tensor.float().contiguous()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
