"""EAGLE-1 drafters in SafeAILab's and speculators' layouts, with the mistakes that their readers have made."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.errors import ModelLoadError, PacelineError, UnsupportedModelError
from paceline.models.drafters.eagle import Eagle
from paceline.models.drafters.load import SHIPPED, load_network
from paceline.models.drafters.store import read_header, save_drafter
from tests.models.test_drafter_formats import HIDDEN, LAYER, TARGET, VOCAB, Target, specforge, write


def eagle_tensors(bias: bool = True) -> dict[str, Tensor]:
    """SafeAILab's names: no head, no final norm, no norm before attention."""
    generator = torch.Generator().manual_seed(3)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    tensors = {
        "embed_tokens.weight": Target().embedding,
        "fc.weight": matrix(HIDDEN, 2 * HIDDEN),
        "layers.0.post_attention_layernorm.weight": 1 + 0.1 * matrix(HIDDEN),
        "layers.0.mlp.gate_proj.weight": matrix(24, HIDDEN),
        "layers.0.mlp.up_proj.weight": matrix(24, HIDDEN),
        "layers.0.mlp.down_proj.weight": matrix(HIDDEN, 24),
    }
    for part, size in (("q", 16), ("k", 8), ("v", 8), ("o", 16)):
        tensors[f"layers.0.self_attn.{part}_proj.weight"] = matrix(size, HIDDEN)
    return tensors | ({"fc.bias": matrix(HIDDEN)} if bias else {})


def safeailab(folder: Path, tensors: dict[str, Tensor] | None = None, pickled: bool = False, **more: Any) -> Path:
    return write(folder, LAYER | more, eagle_tensors() if tensors is None else tensors, pickled)


def speculators(folder: Path, tensors: dict[str, Tensor], **more: Any) -> Path:
    renamed = {
        name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): tensor
        for name, tensor in tensors.items()
        if name != "embed_tokens.weight"
    }
    config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "speculators_model_type": "eagle",
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": LAYER,
    }
    return write(folder, config | more, renamed)


def load(folder: Path, target: Target | None = None) -> Eagle:
    network = load_network("eagle", str(folder), target or Target())
    assert isinstance(network, Eagle)
    return network


@pytest.mark.parametrize("pickled", [False, True])
def test_the_head_and_the_last_normed_state_are_the_targets(pickled: bool, tmp_path: Path) -> None:
    network = load(safeailab(tmp_path, pickled=pickled))
    assert torch.equal(network.lm_head.weight, Target().head)
    assert network.config.hidden_layers == (TARGET.num_layers + 1,)
    assert network.d2t.tolist() == list(range(VOCAB))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + TARGET.rms_norm_eps).sqrt() * weight


@pytest.mark.parametrize("input_norm", [False, True])
def test_one_step_by_hand(input_norm: bool, tmp_path: Path) -> None:
    """At position 0 rotary embedding does nothing, and a lone row's attention is its own value."""
    tensors = eagle_tensors()
    if input_norm:
        tensors["layers.0.input_layernorm.weight"] = torch.linspace(0.5, 1.5, HIDDEN)
    network = load(safeailab(tmp_path, tensors))
    embedding, feature = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(5))
    x = tensors["fc.weight"] @ torch.cat([embedding, feature]) + tensors["fc.bias"]  # the embedding comes first
    read = rms_norm(x, tensors["layers.0.input_layernorm.weight"]) if input_norm else x
    value = (tensors["layers.0.self_attn.v_proj.weight"] @ read).view(2, 4).repeat_interleave(2, 0)
    x = x + tensors["layers.0.self_attn.o_proj.weight"] @ value.flatten()
    inner = rms_norm(x, tensors["layers.0.post_attention_layernorm.weight"])
    gate, up = (tensors[f"layers.0.mlp.{part}_proj.weight"] @ inner for part in ("gate", "up"))
    x = x + tensors["layers.0.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
    one, zero = torch.ones(2), torch.zeros(2)
    found = network(embedding, feature, one, zero, lambda query, key, value: value.repeat_interleave(2, 0))
    torch.testing.assert_close(found, x)
    torch.testing.assert_close(network.logits(found), Target().head @ x)


def test_both_layouts_hold_the_same_network(tmp_path: Path) -> None:
    one = load(safeailab(tmp_path / "a"))
    other = load(speculators(tmp_path / "b", eagle_tensors(), fusion_bias=True))
    assert one.config == other.config
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_missing_bias_key_means_opposite_things(tmp_path: Path) -> None:
    with_bias, without = eagle_tensors(), eagle_tensors(bias=False)
    assert load(safeailab(tmp_path, with_bias)).config.fc_bias
    assert not load(speculators(tmp_path, without)).config.fc_bias
    assert not load(safeailab(tmp_path, without, bias=False)).config.fc_bias
    with pytest.raises(ModelLoadError, match=r"'bias' is missing, which means True.*no fc\.bias.*to false"):
        load(safeailab(tmp_path, without))
    with pytest.raises(ModelLoadError, match=r"'bias' is False.*have fc\.bias.*to true"):
        load(safeailab(tmp_path, with_bias, bias=False))
    with pytest.raises(ModelLoadError, match=r"'fusion_bias' is missing.*have fc\.bias"):
        load(speculators(tmp_path, with_bias))


def test_a_head_of_its_own_is_used(tmp_path: Path) -> None:
    head = torch.randn(VOCAB, HIDDEN)
    assert torch.equal(load(safeailab(tmp_path, eagle_tensors() | {"lm_head.weight": head})).lm_head.weight, head)


def test_old_files_carry_rotary_tables(tmp_path: Path) -> None:
    old = eagle_tensors() | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert torch.equal(load(safeailab(tmp_path, old)).fc.weight, old["fc.weight"])


@pytest.mark.parametrize(
    ("more", "tensors", "error", "message"),
    [
        ({"hidden_size": 20}, {}, ModelLoadError, r"hidden_size 20, but this one has 16"),
        ({"vocab_size": 50}, {}, ModelLoadError, r"vocab_size 50, but this one has 40"),
        ({}, {"fc.weight": torch.ones(16, 48)}, ModelLoadError, r"fc\.weight has the shape \[16, 48\].*\[16, 32\]"),
        ({}, {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}, UnsupportedModelError, "embedding of its own"),
        ({}, {"layers.1.mlp.up_proj.weight": torch.ones(24, 16)}, UnsupportedModelError, "2 decoder layers"),
        ({}, {"norm.weight": torch.ones(16)}, UnsupportedModelError, r"does not use: norm\.weight"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    more: dict[str, Any], tensors: dict[str, Tensor], error: type[PacelineError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        load(safeailab(tmp_path, eagle_tensors() | tensors, **more))


def test_extra_norms_that_readers_place_differently_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="before the head, vLLM before fc"):
        load(speculators(tmp_path, eagle_tensors(bias=False), layernorms=True))


def test_a_drafter_of_another_generation_is_refused_and_its_method_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="ask for 'eagle3'"):
        load(specforge(tmp_path / "third"))
    for folder in (safeailab(tmp_path / "a"), speculators(tmp_path / "b", eagle_tensors(bias=False))):
        with pytest.raises(UnsupportedModelError, match="ask for 'eagle'"):
            load_network("eagle3", str(folder), Target())


def test_our_own_file_reads_back(tmp_path: Path) -> None:
    network = load(safeailab(tmp_path / "in"))
    path = tmp_path / "eagle.safetensors"
    save_drafter(path, "eagle", network, head_is_target=True, target=TARGET, card={})
    again = load_network("eagle", str(path), Target())
    assert again.config == network.config
    assert torch.equal(again.lm_head.weight, network.lm_head.weight)
    torch.testing.assert_close(again.fc.weight, network.fc.weight, rtol=0, atol=0.01)


def test_none_is_shipped_and_the_error_names_what_is() -> None:
    class Default:
        config: ModelConfig

    described = read_header(next(SHIPPED.glob("*/eagle3.safetensors")))["target"]
    target = Default()
    target.config = ModelConfig(**({name: getattr(TARGET, name) for name in ModelConfig.__slots__} | described))
    with pytest.raises(ModelLoadError, match=r"no eagle drafter is shipped.*draft_model, eagle3, medusa"):
        load_network("eagle", None, target)  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match=r"no eagle drafter is shipped.*paceline train eagle`$"):
        load_network("eagle", None, Target())
