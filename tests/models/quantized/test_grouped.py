"""Quantized blocks as values under scales and zeros, for CUDA: the numbers that the file means."""

import pytest
import torch
from torch import Tensor

from paceline.core.weights import QuantizedTensor
from paceline.errors import ModelLoadError
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from paceline.models.dequantize import dequantize
from paceline.models.quantized.fp8 import rounded
from paceline.models.quantized.grouped import BLOCK_BYTES, float8_groups, grouped_values, packed_weight, rows_of
from paceline.models.quantized.int8 import Int8Weights
from paceline.ops.packed import GroupedValues, PackedWeight
from tests.models.small_models import hf_config_dict, random_weights
from tests.ops.packed_values import FORMATS, random_values

CPU = torch.device("cpu")
HALVES = {
    "Q4_0": (0,),
    "Q5_0": (0,),
    "Q8_0": (0,),
    "Q6_K": (208,),
}  # where a block's float16 numbers are, if not 0 and 2
VALUES = {"Q4_K": 256, "Q5_K": 256, "Q6_K": 256}  # of a block, if not 32


def random_blocks(kind: str, num_out: int = 6, num_in: int = 512, seed: int = 0) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(seed)
    count = num_in // VALUES.get(kind, 32)
    blocks = torch.randint(0, 256, (num_out, count, BLOCK_BYTES[kind]), generator=generator, dtype=torch.uint8)
    for at in HALVES.get(kind, (0, 2)):
        numbers = (0.001 + torch.rand(num_out, count, 1, generator=generator)).half()
        numbers = (numbers * 8).round() if kind in ("U4Z", "U8Z") and at == 2 else numbers
        blocks[..., at : at + 2] = numbers.view(torch.uint8)
    return QuantizedTensor(blocks.flatten(1), kind, (num_out, num_in))


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_groups_mean_what_the_blocks_mean(kind: str) -> None:
    stored = random_blocks(kind)
    meant, grouped = dequantize(stored), grouped_values(stored, CPU)
    assert grouped.group == (16 if kind == "Q6_K" else 32)
    torch.testing.assert_close(grouped.dequantized(), meant, rtol=1e-5, atol=1e-5 * float(meant.abs().max()))
    packed = packed_weight([stored], torch.float32, CPU)
    assert packed is not None and packed.kind == ("int4" if "4" in kind else "int8")
    assert (packed.widened() - meant).abs().max() <= 2.0**-10 * meant.abs().max()


@pytest.mark.parametrize("form", FORMATS)
def test_rows_hold_any_group_and_can_be_cut(form: str) -> None:
    kind, group, _ = FORMATS[form]
    grouped = random_values(kind, 12, 96, group)
    stored = rows_of(grouped)
    assert torch.equal(dequantize(stored), grouped.dequantized())
    assert torch.equal(dequantize(stored.rows(slice(3, 7))), grouped.dequantized()[3:7])


def test_matrices_of_one_product_are_packed_together_or_not_at_all() -> None:
    q, v = random_blocks("Q4_K"), random_blocks("Q6_K", num_out=2, seed=1)
    packed = packed_weight([q, v], torch.float32, CPU)
    meant = torch.cat([dequantize(q), dequantize(v)])
    assert packed is not None and (packed.kind, packed.group) == ("int8", 16)
    assert (packed.widened() - meant).abs().max() <= 2.0**-10 * meant.abs().max()
    assert packed_weight([q, torch.zeros(4, 512)], torch.float32, CPU) is None
    assert packed_weight([rows_of(random_values("int4", 4, 72, 24))], torch.float32, CPU) is None, "no run of 16"


@pytest.mark.parametrize("shape", [(40, 96), (64, 128), (33, 80)])
def test_blocks_of_float8_scales_are_spread_over_their_outputs(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stored = rounded(weight, (32, 32))
    assert torch.equal(float8_groups(stored).dequantized(), stored.dequantized())


def test_int8_weights_leave_vectors_and_odd_rows_as_they_are() -> None:
    stored: dict[str, Tensor | QuantizedTensor] = {
        "norm": torch.ones(64), "odd": torch.ones(4, 40), "linear": torch.randn(4, 64), "file": random_blocks("Q4_0"),
    }  # fmt: skip
    made = Int8Weights(stored)
    assert {name for name in made if isinstance(made[name], QuantizedTensor)} == {"linear", "file"}
    assert all(made.shape(name) == tuple(stored[name].shape) for name in stored)


def test_values_of_a_packed_weight_are_those_of_its_format_alone() -> None:
    """A scale of nothing with a minimum, as Q4_K files have them, among ordinary groups."""
    stored = random_blocks("Q4_K", num_out=2)
    blocks = stored.data.view(2, 2, 144)
    blocks[0, 0, 4:8] &= 0xC0  # scales of the first four groups
    blocks[0, 0, 8:12] |= 7  # and minima
    packed, meant = packed_weight([stored], torch.float32, CPU), dequantize(stored)
    assert packed is not None
    assert bool((meant[0, :32] == meant[0, 0]).all()) and meant[0, 0] != 0
    assert (packed.widened() - meant).abs().max() <= 2.0**-10 * meant.abs().max()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_of_a_file_that_are_no_numbers_are_refused_by_name(value: float) -> None:
    config = config_from_dict(hf_config_dict("llama", hidden_size=64, intermediate_size=64, num_hidden_layers=1))
    weights: dict[str, Tensor | QuantizedTensor] = dict(random_weights(config))
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = random_blocks("Q4_0", num_out=64, num_in=64)
    assert isinstance(Decoder(config, weights, packs=True).layers[0].down.weight, PackedWeight)
    weights[name].data[3, 18:20] = torch.tensor([value]).half().view(torch.uint8)
    with pytest.raises(ModelLoadError, match=r"down_proj\.weight has scales that are not finite"):
        Decoder(config, weights, packs=True)


def test_a_group_is_a_run_of_inputs() -> None:
    grouped = GroupedValues("int4", torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 4), torch.zeros(2, 4))
    grouped.scales[0, 1] = 3.0
    grouped.values[0, 16:32] = 2
    assert grouped.dequantized()[0].tolist() == [0.0] * 16 + [6.0] * 16 + [0.0] * 32
