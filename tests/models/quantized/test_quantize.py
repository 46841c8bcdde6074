"""`quantize_model` on small random models: folders that load, reports that are true, the same bytes again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.core.agreement import Agreement, Passage
from paceline.core.packing import RequestRows, pack
from paceline.errors import InvalidOptionError, ModelLoadError
from paceline.models.loader import load_model
from paceline.models.quantized import folder_writer, layer_methods, quantize
from paceline.models.quantized.quantize import quantize_model
from paceline.models.quantized.recipe import Recipe
from tests.models.quantized.quantized_folder import SHAPE, write_plain_folder
from tests.models.small_models import tokens

RECIPES = {
    "awq": Recipe("awq"),
    "awq-packed": Recipe("awq", layout="compressed-tensors"),
    "gptq": Recipe("gptq"),
    "gptq-8-zeros": Recipe("gptq", bits=8, symmetric=False, group_size=-1),
    "gptq-act-order": Recipe("gptq", act_order=True, group_size=32),
    "gptq-packed": Recipe("gptq", symmetric=False, layout="compressed-tensors"),
    "fp8": Recipe("fp8"),
    "fp8-block": Recipe("fp8", block=32),
    "int8": Recipe("int8"),
}


def text(config: Any, count: int, length: int, seed: int) -> list[Passage]:
    return [Passage(tokens(config, length, seed=seed + i), length // 2) for i in range(count)]


def make(folder: Path, recipe: Recipe, variant: str = "qwen3", out: str = "made", **overrides: Any) -> quantize.Report:
    config = write_plain_folder(folder / "plain", variant, **overrides)
    return quantize_model(
        folder / "plain", folder / out, recipe, text(config, 6, 24, seed=0), text(config, 3, 20, seed=50)
    )


def agreement_of(first: Path, second: Path) -> Agreement:
    """By decoders that read the two folders."""
    decoders = [
        load_model(str(folder), dtype="float32", kernels="torch", device="cpu", quiet=True).decoder
        for folder in (first, second)
    ]
    found, config = Agreement(), decoders[0].config
    for passage in text(config, 3, 20, seed=50):
        batch = pack([RequestRows([0, 1], passage.token_ids, 0, num_wanted=20)], block_size=16)
        cache = torch.zeros(config.num_layers, 2, 32, config.num_kv_heads, config.head_dim)
        found.add(*(decoder.forward(batch, cache).logits for decoder in decoders), passage.next_ids())
    return found


@pytest.mark.parametrize("form", RECIPES)
def test_the_folder_loads_and_is_as_near_as_the_report_says(form: str, tmp_path: Path) -> None:
    report = make(tmp_path, RECIPES[form])
    found = agreement_of(tmp_path / "plain", tmp_path / "made").to_dict()
    assert found == pytest.approx(report.agreement, rel=2e-3)
    assert report.agreement["kl"] < (0.05 if "8" in form else 0.8)  # random weights: nothing averages out
    assert len(report.layer_errors) == 2 and all(0 < error < 0.3 for error in report.layer_errors)
    stored = sum(path.stat().st_size for path in (tmp_path / "made").glob("*.safetensors"))
    assert report.bytes_stored <= stored < report.bytes_stored + 20_000  # a header
    assert json.loads((tmp_path / "made" / "quantization_report.json").read_text()) == report.to_dict()


@pytest.mark.parametrize("variant", ["phi3", "gemma3", "qwen2", "smollm3", "llama-biases"])
@pytest.mark.parametrize("method", ["awq", "gptq", "fp8"])
def test_every_family_keeps_its_own_storage(variant: str, method: str, tmp_path: Path) -> None:
    report = make(tmp_path, Recipe(method), variant, num_hidden_layers=3)  # as many as these families' kinds of layers
    assert agreement_of(tmp_path / "plain", tmp_path / "made").divergence == pytest.approx(
        report.agreement["kl"], rel=5e-3
    )


def test_bfloat16_weights_stay_bfloat16(tmp_path: Path) -> None:
    make(tmp_path, Recipe("int8"), dtype=torch.bfloat16)
    assert json.loads((tmp_path / "made" / "config.json").read_text())["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    plain = {tensor.dtype for name, tensor in tensors.items() if "norm" in name or "embed" in name}
    assert plain == {torch.bfloat16}


@pytest.mark.parametrize("form", ["awq", "gptq"])
def test_the_same_seed_gives_the_same_bytes(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_methods, "SEARCH_ROWS", 16)  # of 144: which ones hangs on the seed

    def made(name: str, seed: int) -> dict[str, bytes]:
        make(tmp_path, replace(RECIPES[form], seed=seed), out=name)
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    first = made("first", 1)
    assert made("second", 1) == first
    assert set(first) == {"config.json", "model.safetensors", "quantization_report.json", "tokenizer.json"}
    assert (made("third", 2)["model.safetensors"] != first["model.safetensors"]) == (form == "awq")


def test_a_large_model_is_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, Recipe("int8"), out="whole")
    monkeypatch.setattr(folder_writer, "SHARD_BYTES", 100_000)
    make(tmp_path, Recipe("int8"), out="shards")
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 1
    assert agreement_of(tmp_path / "whole", tmp_path / "shards").divergence == pytest.approx(0, abs=1e-9)


def test_a_group_size_that_divides_is_found_and_recorded(tmp_path: Path) -> None:
    report = make(tmp_path, Recipe("awq"), "llama", hidden_size=96, intermediate_size=192, num_attention_heads=6)
    assert report.recipe["group_size"] == 32
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["quantization_config"]["group_size"] == 32


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe("hqq"), "must be one of awq, gptq, fp8, int8"),
        (Recipe("awq", group_size=48), "has 64 inputs, which do not divide into groups of 48"),
        (Recipe("awq", group_size=-1), "awq needs groups"),
        (Recipe("awq", bits=8), "only gptq takes 4 or 8"),
        (Recipe("gptq", group_size=0), "1 weight or more"),
        (Recipe("gptq", damping=1.5), "between 0 and 1"),
        (Recipe("int8", block=64), "--block is for fp8"),
        (Recipe("fp8", layout="compressed-tensors"), "has only one"),
        (Recipe("awq", act_order=True), "--act-order is for gptq"),
        (Recipe("gptq", act_order=True, layout="compressed-tensors"), "no groups in another order"),
    ],
)
def test_what_cannot_be_made_is_refused_and_nothing_is_left_behind(
    recipe: Recipe, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        make(tmp_path, recipe)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_width_that_no_group_divides_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=r"down_proj has 120 inputs.*int8 or fp8"):
        make(tmp_path, Recipe("awq"), intermediate_size=120)


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(quantize, "quantized_layer", broken)
    with pytest.raises(RuntimeError, match="broken"):
        make(tmp_path, Recipe("int8"))
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine.txt").write_text("mine")
    with pytest.raises(InvalidOptionError, match="exists already"):
        make(tmp_path, Recipe("int8"))
    assert (tmp_path / "made" / "mine.txt").read_text() == "mine"


def test_too_little_memory_is_seen_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "available_bytes", lambda device: 1_000_000)
    with pytest.raises(ModelLoadError, match=r"quantizing takes about .* GB of memory, but 0\.0 GB"):
        make(tmp_path, Recipe("int8"))


def test_text_of_no_length_is_refused(tmp_path: Path) -> None:
    config = write_plain_folder(tmp_path / "plain")
    with pytest.raises(InvalidOptionError, match="calibration text is empty"):
        quantize_model(tmp_path / "plain", tmp_path / "made", Recipe("awq"), [], text(config, 1, 5, 0))
    with pytest.raises(InvalidOptionError, match="held-out text is empty"):
        quantize_model(tmp_path / "plain", tmp_path / "made", Recipe("int8"), [], [])


def test_a_quantized_source_is_widened_first_and_the_report_says_so(tmp_path: Path) -> None:
    config = write_plain_folder(tmp_path / "plain")
    passages = text(config, 4, 24, 0)
    first = quantize_model(tmp_path / "plain", tmp_path / "int8", Recipe("int8"), passages, passages)
    second = quantize_model(tmp_path / "int8", tmp_path / "fp8", Recipe("fp8"), passages, passages)
    assert (first.source_is_quantized, second.source_is_quantized) == (False, True)
    assert SHAPE["hidden_size"] == load_model(str(tmp_path / "fp8"), device="cpu", quiet=True).config.hidden_size
