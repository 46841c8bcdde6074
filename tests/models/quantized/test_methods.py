"""The parts of `paceline quantize`: a layer's pass, rounding, AWQ's scales, GPTQ's solution, packing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.errors import InvalidOptionError
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from paceline.models.layout import layer_prefix
from paceline.models.quantized import awq, awq_search, compressed_tensors, fp8, gptq
from paceline.models.quantized.gptq_solve import solved
from paceline.models.quantized.layer_pass import LayerPass
from paceline.models.quantized.linear import QuantizedLinear
from paceline.models.quantized.parts import Parts
from paceline.models.quantized.rounding import rounded
from paceline.models.quantized.scheme import WHOLE_ROW, Scheme
from tests.forward_batches import Pool, Rows
from tests.models.quantized.quantized_folder import random_linear
from tests.models.small_models import hf_config_dict, random_weights, tokens


def layer_weights(weights: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    prefix = layer_prefix(layer)
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    "variant", ["llama", "llama-biases", "llama-yarn", "mistral-window", "qwen2", "qwen3", "gemma3", "smollm3-window"]
)
def test_a_layers_pass_is_the_decoders(variant: str) -> None:
    config = config_from_dict(hf_config_dict(variant))
    weights = random_weights(config)
    decoder, pool = Decoder(config, weights), Pool(2, 24)
    texts = [tokens(config, 20, seed=1), tokens(config, 13, seed=2)]
    cache = torch.zeros(config.num_layers, 2, pool.num_slots, config.num_kv_heads, config.head_dim)
    every = range(config.num_layers + 1)
    batch = pool.batch(Rows(0, 0, texts[0]), Rows(1, 0, texts[1]))
    expected = decoder.forward(batch, cache, hidden_layers=every).hidden
    assert expected is not None
    walk, hidden = LayerPass(config, [20, 13]), expected[:, 0]
    for layer in range(config.num_layers):
        hidden = walk.run(layer, layer_weights(weights, layer), hidden)
        torch.testing.assert_close(hidden, expected[:, layer + 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_off_by_half_a_step_at_most(bits: int, symmetric: bool) -> None:
    weight = random_linear(16, 64)
    made = rounded(weight, bits, 32, symmetric=symmetric)
    steps = made.scales.repeat_interleave(32, dim=1)
    assert ((made.dequantized() - weight).abs() <= 0.502 * steps + 1e-3 * weight.abs()).all()
    assert torch.equal(made.scales.half().float(), made.scales)


def test_groups_of_zeros_stay_zeros() -> None:
    assert torch.equal(rounded(torch.zeros(8, 32), 4, 32, symmetric=False).dequantized(), torch.zeros(8, 32))
    assert torch.equal(fp8.rounded(torch.zeros(8, 32), None).dequantized(), torch.zeros(8, 32))


def outlier_inputs(rows: int, width: int) -> Tensor:
    """A few inputs are much larger than the others, as in language models; neighbours go together."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(rows, width, generator=generator)
    inputs = inputs + 0.7 * inputs.roll(1, dims=1)
    inputs[:, :: width // 8] *= 20
    return inputs


def loss(made: QuantizedLinear, weight: Tensor, inputs: Tensor) -> float:
    return float(((made.dequantized() - weight) @ inputs.T).square().sum())


def test_awqs_scales_lower_the_error_where_some_inputs_are_large() -> None:
    weight, inputs = random_linear(48, 128), outlier_inputs(200, 128)
    scales = awq_search.best_scales(weight, inputs, inputs.abs().mean(0), 32)
    plain = loss(rounded(weight, 4, 32, symmetric=False), weight, inputs)
    scaled = loss(rounded(weight * scales, 4, 32, symmetric=False), weight * scales, inputs / scales)
    assert scaled < 0.7 * plain
    again = loss(awq_search.shrunk(weight * scales, inputs / scales, 32), weight * scales, inputs / scales)
    assert again < scaled


@pytest.mark.parametrize("variant", ["llama", "llama-biases", "qwen2", "gemma3", "llama-no-gqa"])
def test_awqs_scales_leave_the_layer_the_same_function(variant: str) -> None:
    config = config_from_dict(hf_config_dict(variant))
    walk, inputs = LayerPass(config, [30]), {}
    weights = layer_weights(random_weights(config), 1)
    hidden = torch.randn(30, config.hidden_size, generator=torch.Generator().manual_seed(1))
    hidden[:, ::7] *= 10
    expected = walk.run(1, weights, hidden, inputs)
    changed, smaller = awq_search.scaled(weights, inputs, config, 16)
    found: dict[str, Tensor] = {}
    torch.testing.assert_close(walk.run(1, changed, hidden, found), expected, rtol=1e-3, atol=1e-3)
    for source, rows in smaller.items():
        torch.testing.assert_close(found[source], rows, rtol=1e-3, atol=1e-3)
    scaled = [name for name in weights if not torch.equal(changed[name], weights[name])]
    assert {"input_layernorm.weight", "mlp.up_proj.weight", "self_attn.v_proj.weight"} <= set(scaled)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [32, WHOLE_ROW])
def test_gptq_loses_less_than_rounding(group_size: int, act_order: bool) -> None:
    weight, inputs = random_linear(48, 128), outlier_inputs(200, 128)
    made = solved(
        weight, inputs.T @ inputs, 4, group_size, symmetric=True, act_order=act_order, damping=0.01, name="it"
    )
    assert loss(made, weight, inputs) < 0.6 * loss(rounded(weight, 4, group_size, symmetric=True), weight, inputs)
    assert (made.groups is not None) == act_order


def test_gptq_is_rounding_where_inputs_have_nothing_in_common() -> None:
    weight = random_linear(16, 64)
    made = solved(weight, torch.eye(64), 4, 32, symmetric=False, act_order=False, damping=0.01)
    assert torch.equal(made.dequantized(), rounded(weight, 4, 32, symmetric=False).dequantized())


def test_gptq_takes_inputs_that_are_always_zero_and_refuses_those_that_are_no_numbers() -> None:
    weight, gram = random_linear(16, 64), torch.eye(64)
    gram[5, 5] = 0
    assert solved(weight, gram, 4, 32, symmetric=True, act_order=True, damping=0.01).values.shape == (16, 64)
    with pytest.raises(InvalidOptionError, match=r"cannot solve for o_proj.*--damping"):
        solved(weight, gram * float("nan"), 4, 32, symmetric=True, act_order=False, damping=0.01, name="o_proj")


def _act_order(bits: int, symmetric: bool) -> QuantizedLinear:
    inputs = outlier_inputs(100, 64)
    return solved(random_linear(24, 64), inputs.T @ inputs, bits, 32, symmetric=symmetric, act_order=True, damping=0.01)


PACKINGS: dict[str, tuple[QuantizedLinear, Callable[..., dict[str, Tensor]], Callable[..., object], Scheme]] = {
    "awq": (
        rounded(random_linear(24, 64), 4, 32, symmetric=False),
        awq.pack,
        awq.unpack,
        Scheme("awq", "awq", 4, 32, symmetric=False),
    ),
    "gptq": (_act_order(4, False), gptq.pack, gptq.unpack, Scheme("gptq", "gptq", 4, 32)),
    "gptq-8": (_act_order(8, True), gptq.pack, gptq.unpack, Scheme("gptq", "gptq", 8, 32)),
    "packed": (
        rounded(random_linear(24, 64), 4, 32, symmetric=True),
        lambda linear: compressed_tensors.pack_packed(linear, symmetric=True),
        compressed_tensors.unpack_packed,
        Scheme("compressed-tensors", "packed", 4, 32),
    ),
    "packed-zeros": (
        rounded(random_linear(20, 64), 4, 32, symmetric=False),  # outputs that do not fill their last number
        lambda linear: compressed_tensors.pack_packed(linear, symmetric=False),
        compressed_tensors.unpack_packed,
        Scheme("compressed-tensors", "packed", 4, 32, symmetric=False),
    ),
    "int8": (
        rounded(random_linear(24, 64), 8, WHOLE_ROW, symmetric=True),
        compressed_tensors.pack_int8,
        compressed_tensors.unpack_int8,
        Scheme("compressed-tensors", "int8"),
    ),
}


@pytest.mark.parametrize("form", PACKINGS)
def test_what_is_packed_is_read_back_to_the_bit(form: str) -> None:
    linear, pack, unpack, scheme = PACKINGS[form]
    found = unpack(Parts("m", {f"m.{name}": tensor for name, tensor in pack(linear).items()}, scheme), scheme)
    assert isinstance(found, QuantizedLinear)
    assert torch.equal(found.values, linear.values) and torch.equal(found.zeros, linear.zeros)
    assert torch.equal(found.dequantized(), linear.dequantized())


@pytest.mark.parametrize("block", [None, (16, 16)])
def test_fp8_is_read_back_to_the_bit_and_is_off_by_a_sixteenth_at_most(block: tuple[int, int] | None) -> None:
    weight = random_linear(24, 40)  # neither divides into blocks
    made, scheme = fp8.rounded(weight, block), Scheme("fp8", "float8", block=block)
    found = fp8.unpack(Parts("m", {f"m.{name}": t for name, t in fp8.pack(made).items()}, scheme), scheme).dequantized()
    assert torch.equal(found, made.dequantized())
    smallest = 2.0**-9 * made.scales.max()  # where FP8 has no more digits
    assert ((found - weight).abs() <= weight.abs() / 16 + smallest).all()
