"""How the products of a model on the fused kernels are cut into programs (ops/triton/tiles.py)."""

from dataclasses import dataclass

from paceline.models.decoder import Decoder
from paceline.ops.triton.tiles import Cut, cut_of


@dataclass(frozen=True, slots=True)
class Cuts:
    """How the products of a pass are cut into programs. It does not show in the bits."""

    qkv: Cut
    output: Cut
    gate_up: Cut
    down: Cut
    head: Cut


def model_cuts(decoder: Decoder, layer: int, num_rows: int) -> Cuts:
    """Of a layer, and of the head: the layers of a quantized file may have different formats."""
    own = decoder.layers[layer]
    linears = (own.qkv, own.output, own.gate_up, own.down, decoder.head)
    return Cuts(*(cut_of(linear.weight, num_rows) for linear in linears))


SCALES_FROM = 64  # rows of a program: finding the scales inside a product then takes as long as the product
