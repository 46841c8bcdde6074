"""Weights of 4 and 8 bits as the fused kernels read them: what is packed is what comes out again."""

import pytest
import torch

from paceline.ops.packed import GroupedValues, joined, pack, with_minima
from paceline.ops.triton.tiles import PACKED_WASTE, packed_tile
from tests.ops.packed_values import FORMATS, random_packed, random_values, values_in


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_in", [96, 160, 256])
def test_packed_values_come_out_exactly_where_float16_holds_their_scales(form: str, num_in: int) -> None:
    grouped, packed = values_in(form, 24, num_in), random_packed(form, 24, num_in, torch.float32)
    assert torch.allclose(packed.widened(), grouped.dequantized(), rtol=0, atol=1e-6)
    assert torch.equal(packed.rows(torch.tensor([5, 0])), packed.widened()[[5, 0]])


@pytest.mark.parametrize("form", FORMATS)
def test_each_weight_is_rounded_once_to_the_type_of_the_activations(form: str) -> None:
    exact, packed = values_in(form, 24, 96).dequantized(), random_packed(form, 24, 96, torch.bfloat16)
    assert ((packed.widened() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-5).all()
    if packed.scales_sums or (packed.group == 96 and packed.kind == "fp8"):  # scales come after the sum, in float32
        assert torch.allclose(packed.widened(), exact, rtol=1e-6, atol=0)


def test_only_values_that_are_whole_numbers_less_their_zero_leave_scales_to_the_sum() -> None:
    assert random_packed("int4, whole zeros", 8, 64, torch.bfloat16).scales_sums
    assert not random_packed("int4, group 32", 8, 64, torch.bfloat16).scales_sums
    assert not random_packed("int8, group 16", 8, 64, torch.bfloat16).scales_sums
    far = random_values("int4", 8, 64, 32)
    far.zeros[3, 1] = 128.0  # 128 + zero would be rounded
    assert not pack(far, 32, torch.bfloat16).scales_sums


@pytest.mark.parametrize("factor", [1e-9, 1e6])
def test_scales_outside_the_range_of_float16_keep_their_precision(factor: float) -> None:
    grouped = random_values("int4", 8, 64, 32)
    far = GroupedValues("int4", grouped.values, grouped.scales * factor, grouped.zeros)
    exact = far.dequantized()
    assert ((pack(far, 32, torch.float32).widened() - exact).abs() <= exact.abs().max() * 2.0**-10).all()


def test_a_group_with_a_minimum_and_no_scale_has_the_minimum() -> None:
    values = torch.randint(0, 16, (4, 64), dtype=torch.uint8)
    scales = torch.tensor([[0.0, 1.0], [1e-9, 1.0], [0.0, 0.0], [0.5, 0.25]])
    minima = torch.tensor([[2.0, 3.0], [2.0, 3.0], [0.0, 0.0], [0.125, 0.0]])
    expected = values.float().view(4, 2, 32) * scales[..., None] - minima[..., None]
    found = pack(with_minima("int4", values, scales, minima), 32, torch.float32).widened().view(4, 2, 32)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-6)


def test_groups_that_say_the_same_become_one() -> None:
    coarse = random_values("int4", 8, 192, 96)
    fine = coarse.with_group(32)
    assert fine.group == 32 and fine.coarsest().group == 96
    assert torch.equal(fine.coarsest().dequantized(), coarse.dequantized())
    fine.zeros[3, 4] += 1
    assert fine.coarsest().group == 32


def test_matrices_of_different_formats_are_joined_without_loss_or_not_at_all() -> None:
    parts = [random_values("int4", 8, 96, 32), random_values("int8", 4, 96, 16), random_values("int4", 4, 96, 96)]
    whole = joined(parts)
    assert whole is not None and (whole.kind, whole.group) == ("int8", 16)
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))
    assert joined([parts[0], random_values("fp8", 4, 96, 32)]) is None


def test_a_part_that_would_straddle_two_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="groups of 32 inputs cannot be read 64 at a time"):
        pack(random_values("int4", 8, 256, 32), 64, torch.float32)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("group", [16, 32, 48, 64, 128, 0])
@pytest.mark.parametrize("num_in", [48, 576, 1536, 8960])
def test_a_tile_suits_its_groups_and_wastes_little(kind: str, group: int, num_in: int) -> None:
    if num_in % (group or 1):
        return
    tile = packed_tile(kind, 2048, num_in, group or num_in)
    assert not group or group >= num_in or group % tile.into == 0
    step = tile.into * (4 if kind == "int4" else 2)
    assert tile.into == 16 or -(-num_in // step) * step <= PACKED_WASTE * num_in
