"""A drafter is found by its folder: ours, and those of others, without naming a method."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.cli.export import public_name
from paceline.errors import InvalidOptionError, ModelLoadError, UnsupportedModelError
from paceline.models.drafters.detect import Found, find_method
from paceline.models.drafters.export import export_eagle3
from paceline.models.drafters.load import SHIPPED, load_network, untrained
from paceline.spec.config.speculative_config import SpeculativeConfig
from tests.models.test_drafter_formats import HIDDEN, TARGET, Target


def folder(path: Path, config: dict[str, Any] | None = None, *tensors: str, file: str = "model.safetensors") -> Path:
    path.mkdir(exist_ok=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file({name: torch.zeros(1) for name in tensors}, path / file)
    return path


def speculators(method: str) -> dict[str, Any]:
    proposals = [{"proposal_type": "greedy", "speculative_tokens": 5}]
    return {"speculators_model_type": method, "speculators_config": {"proposal_methods": proposals}}


@pytest.mark.parametrize(
    ("config", "tensors", "found"),
    [
        (speculators("eagle3"), (), Found("eagle3", 5)),
        (speculators("eagle"), (), Found("eagle", 5)),
        ({"speculators_config": {"algorithm": "dflash"}}, (), Found("dflash")),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, (), Found("eagle3")),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, (), Found("dflash")),
        ({"architectures": ["MedusaModel"]}, (), Found("medusa")),
        ({"medusa_num_heads": 4}, (), Found("medusa")),
        ({"num_hidden_layers": 1}, ("fc.weight", "layers.0.mlp.up_proj.weight"), Found("eagle")),
        ({"num_hidden_layers": 1}, ("fc.weight", "midlayer.hidden_norm.weight", "d2t"), Found("eagle3")),
        ({"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}, ("model.norm.weight",), None),
        ({"num_hidden_layers": 30, "architectures": ["LlamaForCausalLM"]}, (), None),
    ],
)
def test_a_folder_says_what_it_is(
    tmp_path: Path, config: dict[str, Any], tensors: tuple[str, ...], found: Found | None
) -> None:
    assert find_method(str(folder(tmp_path / "drafter", config, *tensors))) == found


def test_medusas_heads_are_known_by_their_name(tmp_path: Path) -> None:
    path = folder(tmp_path / "heads", None, "0.0.linear.weight", file="medusa_lm_head.safetensors")
    assert find_method(str(path)) == find_method(str(path / "medusa_lm_head.safetensors")) == Found("medusa")


@pytest.mark.parametrize(("kind", "method"), [("draft", "draft_model"), ("eagle3", "eagle3"), ("dflash", "dflash")])
def test_our_own_files_say_what_they_are(kind: str, method: str) -> None:
    (path,) = SHIPPED.glob(f"*/{kind}.safetensors")
    assert find_method(str(path)) == Found(method)
    config = SpeculativeConfig.parse({"model": str(path)})
    assert config is not None and (config.method, config.options["model"]) == (method, str(path))


def test_what_is_no_drafter_is_a_draft_model_and_what_is_not_read_is_refused(tmp_path: Path) -> None:
    config = SpeculativeConfig.parse({"model": "some/model-on-the-hub"})
    assert config is not None and config.method == "draft_model"
    with pytest.raises(UnsupportedModelError, match="mtp"):
        SpeculativeConfig.parse({"model": str(folder(tmp_path / "mtp", speculators("mtp")))})
    (both,) = {path.parent for path in SHIPPED.glob("*/*.safetensors")}
    with pytest.raises(ModelLoadError, match="several drafters"):
        SpeculativeConfig.parse({"model": str(both)})


@pytest.mark.parametrize("layout", ["speculators", "eagle3"])
def test_an_export_reads_back_by_itself_and_names_no_path(tmp_path: Path, layout: str) -> None:
    target = tmp_path / "private" / "my-model"
    target.mkdir(parents=True)
    network = untrained("eagle3", Target())
    network.config = type(network.config)(**{**vars_of(network.config), "hidden_layers": (2, 6, 9)})
    out = tmp_path / "out"
    export_eagle3(network, TARGET, public_name(str(target)), out, layout, 3)
    assert "private" not in (out / "config.json").read_text()
    if layout == "speculators":
        assert (
            json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]["name_or_path"]
            == "my-model"
        )
    config = SpeculativeConfig.parse({"model": str(out)})
    assert config is not None and config.method == "eagle3"
    assert config.num_speculative_tokens == (3 if layout == "speculators" else 6)
    again = load_network(config.method, config.options["model"], Target())
    assert again.config.target_hidden_size == HIDDEN
    assert public_name("smollm2-135m") == "smollm2-135m" and public_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def vars_of(config: Any) -> dict[str, Any]:
    import dataclasses

    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def test_keys_of_vllm_that_ask_for_nothing_are_taken_and_others_refused() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1, "enforce_eager": True}
    assert SpeculativeConfig.parse(given | {"rejection_sample_method": "standard"}) == SpeculativeConfig.parse(
        {"method": "ngram", "num_speculative_tokens": 3}
    )
    with pytest.raises(InvalidOptionError, match="auto"):
        SpeculativeConfig.parse({"method": "ngram", "disable_by_batch_size": 4})
