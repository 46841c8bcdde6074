"""Weights from model folders: every layout that works, and every way a folder can be broken."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.errors import ModelLoadError
from paceline.models.config import config_from_dict
from paceline.models.hf import read_folder
from paceline.models.layout import check_weights, expected_shapes
from tests.models.small_models import SMALL, hf_config_dict, hf_model

CONFIG = config_from_dict(hf_config_dict("llama"))
TIED = config_from_dict(SMALL | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True})


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(CONFIG).items()}


def write_shards(folder: Path) -> list[str]:
    names = sorted(weights())
    shards = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: weights()[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return list(shards)


def write(folder: Path, layout: str) -> None:
    if layout == "single":
        save_file(weights(), folder / "model.safetensors")
    elif layout == "sharded":
        write_shards(folder)
    else:
        torch.save(weights(), folder / "pytorch_model.bin")


@pytest.mark.parametrize("layout", ["single", "sharded", "pickle"])
def test_every_layout_gives_the_same_tensors(layout: str, tmp_path: Path) -> None:
    write(tmp_path, layout)
    found = check_weights(read_folder(tmp_path), CONFIG, "here")
    assert found.keys() == weights().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights().items())


@pytest.mark.parametrize("variant", ["llama-biases", "qwen2", "qwen3", "llama-tied"])
def test_the_expected_tensors_are_transformers_own(variant: str) -> None:
    hf = hf_model(variant)
    shapes = {name: tuple(tensor.shape) for name, tensor in hf.named_parameters()}
    assert expected_shapes(config_from_dict(hf_config_dict(variant))) == shapes


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="holds no weights"):
        read_folder(tmp_path)
    save_file(weights(), tmp_path / "other.safetensors")
    with pytest.raises(ModelLoadError, match=r"other\.safetensors without an index"):
        read_folder(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    first, _ = write_shards(tmp_path)
    (tmp_path / first).unlink()
    with pytest.raises(ModelLoadError, match=f"{first} is missing"):
        read_folder(tmp_path)


def test_an_index_without_a_map_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="weight_map"):
        read_folder(tmp_path)


@pytest.mark.parametrize("layout", ["single", "pickle"])
@pytest.mark.parametrize("keep", [0, 5, 0.5, 0.999])
def test_a_truncated_file_is_named(layout: str, keep: float, tmp_path: Path) -> None:
    write(tmp_path, layout)
    path = next(tmp_path.iterdir())
    content = path.read_bytes()
    path.write_bytes(content[: int(keep) if keep >= 1 else int(keep * len(content))])
    with pytest.raises(ModelLoadError, match=f"{path.name}.*fetch"):
        read_folder(tmp_path)


def test_a_pickle_with_code_is_not_executed(tmp_path: Path) -> None:
    torch.save({"model.norm.weight": Bomb()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="never executed"):
        read_folder(tmp_path)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('executed')",)


def test_missing_extra_and_misshapen_tensors_are_named() -> None:
    broken = weights()
    del broken["model.norm.weight"]
    with pytest.raises(ModelLoadError, match=r"here lacks model\.norm\.weight"):
        check_weights(broken, CONFIG, "here")
    broken = weights() | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)}
    with pytest.raises(ModelLoadError, match=r"here holds .*q_proj\.bias, which this architecture does not use"):
        check_weights(broken, CONFIG, "here")
    broken = weights() | {"model.norm.weight": torch.zeros(47)}
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \(47,\).*\(48,\)"):
        check_weights(broken, CONFIG, "here")
    with pytest.raises(ModelLoadError, match="and 27 more tensors"):
        check_weights({}, CONFIG, "here")


def test_computed_buffers_and_a_tied_models_second_head_are_accepted() -> None:
    extra = weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    assert check_weights(extra, TIED, "here").keys() == expected_shapes(TIED).keys()
