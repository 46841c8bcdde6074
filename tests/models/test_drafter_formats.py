"""Small checkpoints in every published layout, with the mistakes that their readers have made."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.drafters.eagle3 import Eagle3, Eagle3Config
from paceline.models.drafters.export import export_eagle3
from paceline.models.drafters.load import load_network, untrained

N, HIDDEN, VOCAB, DRAFT = 12, 16, 40, 10
TARGET = ModelConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_layers=N,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position=128,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
LAYER = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
}
OFFSETS = torch.tensor([0, 0, 3, 3, 3, 10, 10, 20, 20, 30])  # target ids 0 1 5 6 7 15 16 27 28 39


class Target:
    config = TARGET
    device = torch.device("cpu")

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.head = torch.randn(VOCAB, HIDDEN, generator=generator)

    def vocabulary_rows(self, ids: Tensor, *, head: bool = False) -> Tensor:
        return (self.head if head else self.embedding)[ids]


def eagle3_tensors(prefix: str) -> dict[str, Tensor]:
    config = Eagle3Config(untrained("eagle3", Target()).config.layer, HIDDEN, DRAFT, (2, 6, 9))
    torch.manual_seed(1)
    state = {name.replace("midlayer.", prefix): tensor for name, tensor in Eagle3(config).state_dict().items()}
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[torch.arange(DRAFT) + OFFSETS] = True
    return state | {"d2t": OFFSETS, "t2d": t2d}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], pickled: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def specforge(folder: Path, layers: list[int] | None = None, pickled: bool = False, **more: Any) -> Path:
    config: dict[str, Any] = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT} | more
    if layers is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    return write(folder, config, eagle3_tensors("midlayer."), pickled)


def speculators(folder: Path, **more: Any) -> Path:
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT,
        "transformer_layer_config": LAYER,
        "target_hidden_size": HIDDEN,
        "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
    }
    return write(folder, config | more, eagle3_tensors("layers.0."))


@pytest.mark.parametrize("pickled", [False, True])
def test_draft_ids_are_offsets(pickled: bool, tmp_path: Path) -> None:
    network = load_network("eagle3", str(specforge(tmp_path, pickled=pickled)), Target())
    assert network.d2t.tolist() == [0, 1, 5, 6, 7, 15, 16, 27, 28, 39]
    assert torch.equal(network.midlayer.mlp.up_proj.weight, eagle3_tensors("midlayer.")["midlayer.mlp.up_proj.weight"])


@pytest.mark.parametrize("layers", [None, [1, 5, 8], [2, 6, 9]], ids=["unsaid", "outputs", "inputs"])
def test_layer_ids_of_all_formats_mean_the_same_states(layers: list[int] | None, tmp_path: Path) -> None:
    assert load_network("eagle3", str(specforge(tmp_path, layers)), Target()).config.hidden_layers == (2, 6, 9)


def test_speculators_counts_inputs_and_has_other_defaults(tmp_path: Path) -> None:
    network = load_network("eagle3", str(speculators(tmp_path)), Target())
    assert network.config.hidden_layers == (2, 6, 9) and network.config.norm_before_residual
    assert not load_network("eagle3", str(specforge(tmp_path)), Target()).config.norm_before_residual
    said = load_network("eagle3", str(speculators(tmp_path, norm_before_residual=False)), Target())
    assert not said.config.norm_before_residual


def test_both_layouts_hold_the_same_network(tmp_path: Path) -> None:
    one = load_network("eagle3", str(specforge(tmp_path / "a")), Target())
    other = load_network("eagle3", str(speculators(tmp_path / "b", norm_before_residual=False)), Target())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("layout", ["speculators", "eagle3"])
def test_the_norm_before_fc_has_its_published_name(layout: str, tmp_path: Path) -> None:
    tensors = eagle3_tensors("layers.0.") | {"input_norm.weight": torch.linspace(0.5, 1.5, 3 * HIDDEN)}
    config = json.loads((speculators(tmp_path / "a") / "config.json").read_text()) | {"norm_before_fc": True}
    network = load_network("eagle3", str(write(tmp_path / "a", config, tensors)), Target())
    assert torch.equal(network.fc_norm.weight, tensors["input_norm.weight"])
    export_eagle3(network, TARGET, "some-model", tmp_path / "b", layout)
    assert "input_norm.weight" in load_file(tmp_path / "b" / "model.safetensors")
    again = load_network("eagle3", str(tmp_path / "b"), Target())
    assert again.config.norm_before_fc
    torch.testing.assert_close(again.fc_norm.weight, network.fc_norm.weight, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("variant", ["fc_norm", "norm_output"])
def test_a_variant_that_is_not_built_is_refused(variant: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=variant):
        load_network("eagle3", str(speculators(tmp_path, **{variant: True})), Target())


def test_a_head_over_the_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    tensors = eagle3_tensors("midlayer.")
    del tensors["d2t"], tensors["t2d"]
    with pytest.raises(ModelLoadError, match="no d2t"):
        load_network("eagle3", str(write(tmp_path, LAYER, tensors)), Target())
    tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    assert load_network("eagle3", str(write(tmp_path, LAYER, tensors)), Target()).d2t.tolist() == list(range(VOCAB))


def test_an_embedding_must_be_the_targets(tmp_path: Path) -> None:
    target = Target()
    tensors = eagle3_tensors("midlayer.")
    load_network("eagle3", str(write(tmp_path, LAYER, tensors | {"embed_tokens.weight": target.embedding})), target)
    other = {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
    with pytest.raises(UnsupportedModelError, match="embedding of its own"):
        load_network("eagle3", str(write(tmp_path, LAYER, tensors | other)), target)


def test_what_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"size 20.*have 16"):
        load_network("eagle3", str(specforge(tmp_path, target_hidden_size=20)), Target())
    tensors = eagle3_tensors("midlayer.")
    tensors["fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN)
    with pytest.raises(ModelLoadError, match=r"fc.weight has the shape \[16, 32\].*\[16, 48\]"):
        load_network("eagle3", str(write(tmp_path, LAYER, tensors)), Target())
    beyond = eagle3_tensors("midlayer.") | {"d2t": OFFSETS + 5}
    with pytest.raises(ModelLoadError, match="another target"):
        load_network("eagle3", str(write(tmp_path, LAYER, beyond)), Target())
    missing = eagle3_tensors("midlayer.")
    del missing["norm.weight"]
    with pytest.raises(ModelLoadError, match=r"norm\.weight"):
        load_network("eagle3", str(write(tmp_path, LAYER, missing)), Target())
    with pytest.raises(ModelLoadError, match="no drafter at"):
        load_network("eagle3", str(tmp_path / "nowhere"), Target())
    with pytest.raises(ModelLoadError, match="paceline train eagle3"):
        load_network("eagle3", None, Target())


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusa_heads(prefix: str, tmp_path: Path) -> None:
    stored = {}
    for head in range(3):
        stored[f"{prefix}{head}.0.linear.weight"] = torch.randn(HIDDEN, HIDDEN)
        stored[f"{prefix}{head}.0.linear.bias"] = torch.randn(HIDDEN)
        stored[f"{prefix}{head}.1.weight"] = torch.randn(VOCAB, HIDDEN)
    torch.save(stored, tmp_path / "medusa_lm_head.pt")
    network = load_network("medusa", str(tmp_path), Target())
    hidden = torch.randn(HIDDEN)
    block = hidden + torch.nn.functional.silu(
        stored[f"{prefix}2.0.linear.weight"] @ hidden + stored[f"{prefix}2.0.linear.bias"]
    )
    torch.testing.assert_close(network.logits(hidden)[2], stored[f"{prefix}2.1.weight"] @ block)


@pytest.mark.parametrize("of_speculators", [False, True])
def test_dflash_layers_are_outputs(of_speculators: bool, tmp_path: Path) -> None:
    target = Target()
    shape = untrained("dflash", target)
    ids = [2, 7] if of_speculators else [1, 6]
    config = LAYER | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 5,
        "num_target_layers": N,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": ids},
    }
    if of_speculators:
        config["speculators_model_type"] = "dflash"
    tensors = {name: tensor for name, tensor in shape.state_dict().items() if name != "lm_head.weight"}
    for part in ("q_norm", "k_norm"):
        tensors[f"layers.0.self_attn.{part}.weight"] = torch.ones(4)
    network = load_network("dflash", str(write(tmp_path, config, tensors)), target)
    assert network.config.hidden_layers == (2, 7) and network.config.mask_token_id == 3
    assert torch.equal(network.lm_head.weight, target.head)
    with pytest.raises(ModelLoadError, match="20 layers"):
        load_network("dflash", str(write(tmp_path, config | {"num_target_layers": 20}, tensors)), target)


@pytest.mark.parametrize("layout", ["speculators", "eagle3"])
def test_an_exported_drafter_reads_back(layout: str, tmp_path: Path) -> None:
    target = Target()
    network = load_network("eagle3", str(specforge(tmp_path / "in")), target)
    export_eagle3(network, TARGET, "some-model", tmp_path / "out", layout)
    again = load_network("eagle3", str(tmp_path / "out"), target)
    assert again.config.hidden_layers == network.config.hidden_layers
    assert again.config.norm_before_residual == network.config.norm_before_residual
    assert torch.equal(again.d2t, network.d2t)
    for found, expected in zip(again.state_dict().values(), network.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
