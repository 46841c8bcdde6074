"""Whatever is wrong with a quantized folder is said before anything is served, by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import InvalidOptionError, ModelLoadError, UnsupportedModelError
from paceline.models import memory
from paceline.models.loader import load_model
from paceline.models.quantized.config import quantization_scheme
from tests.models.quantized.quantized_folder import write_folder
from tests.models.quantized.quantizers import AWQ_CONFIG, FORMATS, FP8_CONFIG

UP = "model.layers.1.mlp.up_proj"


def load(folder: Path) -> None:
    load_model(str(folder), device="cpu", quiet=True)


def spoil(folder: Path, form: str, part: str, change: Any) -> None:
    def change_part(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[f"{UP}.{part}"] = change(tensors[f"{UP}.{part}"])

    write_folder(folder, form, change_part)


SCALES = [
    ("awq", "scales"),
    ("gptq", "scales"),
    ("w4a16", "weight_scale"),
    ("w8a8", "weight_scale"),
    ("fp8-block", "weight_scale_inv"),
    ("compressed-fp8", "weight_scale"),
]


@pytest.mark.parametrize("form, part", SCALES)
def test_scales_of_the_wrong_shape_are_named(form: str, part: str, tmp_path: Path) -> None:
    spoil(tmp_path, form, part, lambda scales: scales[:-1].clone())
    with pytest.raises(ModelLoadError, match=rf"{re.escape(UP)}\.{part} has shape"):
        load(tmp_path)


@pytest.mark.parametrize("form, part", SCALES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_named(form: str, part: str, value: float, tmp_path: Path) -> None:
    def poison(scales: Tensor) -> Tensor:
        scales = scales.clone()
        scales.view(-1)[0] = value
        return scales

    spoil(tmp_path, form, part, poison)
    with pytest.raises(ModelLoadError, match=rf"{re.escape(UP)}\.{part} holds values that are not finite"):
        load(tmp_path)


@pytest.mark.parametrize("form", ["awq", "gptq", "w4a16"])
def test_a_group_size_that_contradicts_the_tensors_is_refused(form: str, tmp_path: Path) -> None:
    def other(size: int) -> Any:
        def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
            found = config["quantization_config"]
            weights = found["config_groups"]["group_0"]["weights"] if form == "w4a16" else found
            weights["group_size"] = size

        return change

    write_folder(tmp_path, form, other(64))
    with pytest.raises(ModelLoadError, match=r"has shape .* call for"):
        load(tmp_path)
    write_folder(tmp_path, form, other(48))
    with pytest.raises(ModelLoadError, match=r"group_size 48, but .* has .* inputs, which do not divide"):
        load(tmp_path)


def test_bits_that_contradict_the_tensors_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "gptq", lambda tensors, config: config["quantization_config"].update(bits=8))
    with pytest.raises(ModelLoadError, match=r"config.json"):
        load(tmp_path)


def test_a_method_that_contradicts_the_tensors_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "awq", lambda tensors, config: config.update(quantization_config=FP8_CONFIG))
    with pytest.raises(ModelLoadError, match=r"describes fp8 8-bit weights, but no tensor is stored that way"):
        load(tmp_path)


def test_a_quantized_folder_without_its_config_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "gptq", lambda tensors, config: config.pop("quantization_config"))
    with pytest.raises(ModelLoadError, match=r"lacks model.layers.0.mlp"):
        load(tmp_path)


def test_a_module_that_the_config_leaves_out_must_be_plain_and_the_others_not(tmp_path: Path) -> None:
    def left_out(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["quantization_config"]["modules_to_not_convert"] = ["up_proj"]

    write_folder(tmp_path, "awq", left_out)
    with pytest.raises(ModelLoadError, match=r"is quantized, but config.json says that it is not.*mixed"):
        load(tmp_path)

    def made_plain(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for part in ("qweight", "qzeros", "scales"):
            del tensors[f"{UP}.{part}"]
        tensors[f"{UP}.weight"] = torch.zeros(128, 64)

    write_folder(tmp_path, "awq", made_plain)
    with pytest.raises(ModelLoadError, match=r"up_proj.weight is stored plainly, but config.json describes it as awq"):
        load(tmp_path)


def test_a_module_that_the_config_leaves_out_is_taken_as_it_is(tmp_path: Path) -> None:
    def plain(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for part in ("qweight", "qzeros", "scales"):
            del tensors[f"{UP}.{part}"]
        tensors[f"{UP}.weight"] = torch.zeros(128, 64)
        config["quantization_config"]["modules_to_not_convert"] = [UP]

    write_folder(tmp_path, "awq", plain)
    load(tmp_path)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_bias_that_the_model_does_not_have_may_only_be_zero(value: float, tmp_path: Path) -> None:
    """Old GPTQ writers store zeros."""

    def bias(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[f"{UP}.bias"] = torch.full((128,), value)

    write_folder(tmp_path, "gptq", bias)
    if value:
        with pytest.raises(ModelLoadError, match=r"holds .*up_proj\.bias, which this architecture does not use"):
            load(tmp_path)
    else:
        load(tmp_path)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, "awq", lambda tensors, config: tensors.pop(f"{UP}.qzeros"))
    with pytest.raises(ModelLoadError, match=rf"{re.escape(UP)}\.qzeros is missing"):
        load(tmp_path)


def test_act_order_that_names_no_group_is_refused(tmp_path: Path) -> None:
    spoil(tmp_path, "gptq-act-order", "g_idx", lambda groups: groups + 1)
    with pytest.raises(ModelLoadError, match=r"g_idx names groups 1 to 2, but there are 2"):
        load(tmp_path)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    spoil(tmp_path, "fp8", "weight", lambda weight: torch.full(weight.shape, float("nan")).to(torch.float8_e4m3fn))
    with pytest.raises(ModelLoadError, match=r"up_proj.weight has values that are not numbers"):
        load(tmp_path)


def shards(folder: Path, form: str = "gptq") -> tuple[Path, Path]:
    write_folder(folder, form)
    tensors = load_file(folder / "model.safetensors")
    names, files = sorted(tensors), (folder / "model-1-of-2.safetensors", folder / "model-2-of-2.safetensors")
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    for file, members in zip(files, halves, strict=True):
        save_file({name: tensors[name] for name in members}, file)
    weight_map = {name: file.name for file, members in zip(files, halves, strict=True) for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return files


def test_truncated_shards_are_named(tmp_path: Path) -> None:
    first, _ = shards(tmp_path)
    load(tmp_path)
    first.write_bytes(first.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"model-1-of-2\.safetensors is not a whole safetensors file"):
        load(tmp_path)


def test_mixed_shards_are_refused(tmp_path: Path) -> None:
    first, second = shards(tmp_path)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelLoadError, match=r"model-2-of-2\.safetensors holds .* another shard holds too.*mixed"):
        load(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    _, foreign = shards(other, "awq")
    second.write_bytes(foreign.read_bytes())
    with pytest.raises(ModelLoadError, match=r"do not belong together.*mixed"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes.*Known: awq, gptq, fp8, compressed-tensors"),
        (AWQ_CONFIG | {"bits": 3}, "awq weights of 3 bits.*only of 4"),
        (AWQ_CONFIG | {"version": "gemv"}, "layout 'gemv'"),
        (AWQ_CONFIG | {"zero_point": False}, "without zero points"),
        ({"quant_method": "gptq", "bits": 2}, "of 2 bits.*only of 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"x": {}}}, "`dynamic`"),
        (FP8_CONFIG | {"fmt": "e5m2"}, "'e5m2'"),
        (FP8_CONFIG | {"activation_scheme": "other"}, "'other'"),
        (FORMATS["w4a16"][0] | {"format": "marlin-24"}, "'marlin-24' of 4-bit int"),
        (FORMATS["w4a16"][0] | {"config_groups": {}}, "0 config_groups"),
        (FORMATS["w4a16"][0] | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        (FORMATS["w4a16"][0] | {"transform_config": {"x": 1}}, "transform_config"),
        (
            FORMATS["w4a16"][0] | {"config_groups": {"a": {"targets": ["re:.*q_proj"], "weights": {"num_bits": 4}}}},
            "targets",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        quantization_scheme({"quantization_config": given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (AWQ_CONFIG | {"group_size": 0}, "group_size 0 is unknown"),
        (AWQ_CONFIG | {"group_size": "all"}, "group_size 'all' is unknown"),
        (FP8_CONFIG | {"weight_block_size": [128]}, r"like \[128, 128\]"),
        (AWQ_CONFIG | {"modules_to_not_convert": "lm_head"}, "must be a list of names"),
        ("awq", "must be an object"),
    ],
)
def test_a_malformed_config_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        quantization_scheme({"quantization_config": given})


def test_too_little_memory_is_seen_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, "awq")
    monkeypatch.setattr(memory, "available_bytes", lambda device: 100_000)
    with pytest.raises(ModelLoadError, match=r"takes about 0\.\d GB of memory, but 0\.0 GB are available"):
        load(tmp_path)
    with pytest.raises(ModelLoadError, match=r"smaller dtype"):
        load_model(str(tmp_path), device="cpu", kernels="torch", quiet=True)


def test_a_containers_limit_is_what_is_available(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\nfile 150\n")
    assert memory._container_bytes(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container_bytes(tmp_path) is None


def test_checkpoint_quantization_needs_a_quantized_folder(tmp_path: Path) -> None:
    def plain(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del config["quantization_config"]

    write_folder(tmp_path, "awq", plain)
    with pytest.raises(InvalidOptionError, match=r"no quantization_config"):
        load_model(str(tmp_path), device="cpu", quantization="checkpoint", kernels="native", quiet=True)
