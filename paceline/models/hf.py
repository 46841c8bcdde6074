"""Weights of a Hugging Face model folder: safetensors in one file or in shards, or an old `pytorch_model.bin`."""

import pickle
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import ModelLoadError
from paceline.models.config import read_json


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder by name, as stored."""
    for index_name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index_name).is_file():
            return _read_shards(folder, folder / index_name)
    for file_name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / file_name).is_file():
            return _read_files(folder, [file_name])
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    hint = f" It has {', '.join(others)} without an index." if others else ""
    raise ModelLoadError(
        f"{folder} holds no weights: neither model.safetensors, nor model.safetensors.index.json with its shards, nor "
        f"pytorch_model.bin.{hint} Fetch the model again."
    )


def _read_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    weight_map = _weight_map(index)
    tensors = _read_files(folder, sorted(set(weight_map.values())))
    lost, extra = sorted(weight_map.keys() - tensors.keys()), sorted(tensors.keys() - weight_map.keys())
    if lost or extra:
        what = f"{lost[0]} is in none of them" if lost else f"{extra[0]} is in one of them, but not in the index"
        raise ModelLoadError(
            f"{index} and the shards that it names do not belong together: {what}. Shards of different downloads may "
            "have been mixed: fetch the model again."
        )
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no `weight_map` from tensors to files. Fetch the model again.")
    return {str(name): str(file) for name, file in weight_map.items()}


def _read_files(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise ModelLoadError(f"{path} is missing, though the index names it. Fetch the model again.")
        found = read_tensors(path)
        if twice := sorted(tensors.keys() & found.keys()):
            raise ModelLoadError(
                f"{path} holds {twice[0]}, which another shard holds too. Shards of different downloads may have been "
                "mixed: fetch the model again."
            )
        tensors.update(found)
    return tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one file, safetensors or an old pickle of plain tensors."""
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{path} is not a whole safetensors file ({error}). The download was probably cut short: "
            "delete the file and fetch the model again."
        ) from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ModelLoadError(
            f"{path} cannot be read as plain tensors ({error}). It is damaged, or holds Python objects, which are "
            "never executed here: fetch it again, or convert the model to safetensors."
        ) from error
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
