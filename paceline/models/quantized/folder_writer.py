"""A model folder on its way to the disk: tensors in shards as they come, the rest at the end; whole or not at all."""

import json
import os
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import InvalidOptionError
from paceline.models.config import read_json
from paceline.models.convert import convert_gguf

SHARD_BYTES = 2_000_000_000  # held until it is written
LARGEST_HALF = 65504.0
COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
)
INDEX = "model.safetensors.index.json"


class FolderWriter:
    def __init__(self, out: Path) -> None:
        check_free(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._folder = Path(mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        self._held: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []  # names of each one's tensors
        self.num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self._held[name] = tensor.contiguous()
        self.num_bytes += tensor.nbytes
        if sum(held.nbytes for held in self._held.values()) > SHARD_BYTES:
            self._flush()

    def finish(
        self, source: Path, quantization_config: dict[str, Any], dtype: torch.dtype, report: dict[str, Any]
    ) -> None:
        """`source`: the folder or GGUF file whose tokenizer and settings the new folder takes over."""
        self._flush()
        self._name_shards()
        if source.is_dir():
            for path in {path for pattern in COPIED for path in source.glob(pattern)}:
                shutil.copyfile(path, self._folder / path.name)
        else:
            convert_gguf(source, self._folder, widen=False)
        config = read_json(self._folder / "config.json")
        config.pop("compression_config", None)
        config.pop("torch_dtype", None)
        config |= {"dtype": str(dtype).removeprefix("torch."), "quantization_config": quantization_config}
        _write_json(self._folder / "config.json", config)
        _write_json(self._folder / "quantization_report.json", report)
        self._folder.chmod(0o755)
        if self._out.exists():
            self._out.rmdir()  # it is empty
        os.replace(self._folder, self._out)

    def discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _flush(self) -> None:
        if not self._held:
            return
        path = self._folder / f"shard-{len(self._shards)}"
        save_file(self._held, path, metadata={"format": "pt"})
        path.chmod(0o644)  # the library makes it private
        self._shards.append(list(self._held))
        self._held = {}

    def _name_shards(self) -> None:
        total = len(self._shards)
        if total == 1:
            (self._folder / "shard-0").rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05}-of-{total:05}.safetensors"
            (self._folder / f"shard-{number}").rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        metadata = {"total_size": self.num_bytes}
        _write_json(self._folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidOptionError(f"{out} exists already: give a folder that does not, or an empty one")


def plain_dtype(embedding: Tensor) -> torch.dtype:
    """The one type of a folder's plain weights: the source's own, or half of float32."""
    return torch.float16 if embedding.dtype == torch.float32 else embedding.dtype


def as_stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A plain weight in that type; in its own, where it does not fit."""
    too_large = dtype == torch.float16 and float(tensor.abs().max()) > LARGEST_HALF
    return tensor if too_large else tensor.to(dtype)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
