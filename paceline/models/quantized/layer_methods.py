"""One layer, quantized by a recipe: its matrices, and the rest of its weights where the method changes them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.models.quantized import awq_search, fp8
from paceline.models.quantized.gptq_solve import solved
from paceline.models.quantized.layer_pass import INPUTS, LINEARS
from paceline.models.quantized.recipe import AnyLinear, Recipe
from paceline.models.quantized.rounding import rounded
from paceline.models.quantized.scheme import WHOLE_ROW

SEARCH_ROWS = 512  # tokens by which AWQ judges a scale: the time of a search grows with them, its choice hardly changes


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    linears: dict[str, AnyLinear]
    plain: dict[str, Tensor]  # norms and biases, float32

    def widened(self) -> dict[str, Tensor]:
        """The layer's weights as they are meant, float32."""
        return self.plain | {f"{name}.weight": linear.dequantized() for name, linear in self.linears.items()}


def quantized_layer(
    recipe: Recipe,
    config: ModelConfig,
    weights: Mapping[str, Tensor],  # of this layer, float32
    inputs: Mapping[str, Tensor],  # what each of `INPUTS` multiplies on the calibration text: [tokens, in]
    generator: torch.Generator,
) -> QuantizedLayer:
    if recipe.method == "awq":
        assert recipe.group_size is not None
        weights, rows = awq_search.scaled(weights, _sample(inputs, generator), config, recipe.group_size)
        linears: dict[str, AnyLinear] = {**awq_search.quantized(weights, rows, recipe.group_size)}
    elif recipe.method == "gptq":
        linears = _solved(recipe, weights, inputs)
    else:
        linears = {name: _rounded(recipe, weights[f"{name}.weight"]) for name in LINEARS}
    matrices = {f"{name}.weight" for name in LINEARS}
    return QuantizedLayer(linears, {name: weight for name, weight in weights.items() if name not in matrices})


def _solved(recipe: Recipe, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, AnyLinear]:
    assert recipe.group_size is not None
    linears: dict[str, AnyLinear] = {}
    for source, names in INPUTS.items():
        matrices = [weights[f"{name}.weight"] for name in names]
        made = solved(
            torch.cat(matrices),  # rows do not touch each other: what has the same inputs is solved together
            inputs[source].T @ inputs[source],
            recipe.bits,
            recipe.group_size,
            symmetric=recipe.symmetric,
            act_order=recipe.act_order,
            damping=recipe.damping,
            name=" and ".join(names),
        )
        linears.update(zip(names, made.split([len(matrix) for matrix in matrices]), strict=True))
    return linears


def _rounded(recipe: Recipe, weight: Tensor) -> AnyLinear:
    if recipe.method == "int8":
        return rounded(weight, 8, WHOLE_ROW, symmetric=True)
    return fp8.rounded(weight, None if recipe.block is None else (recipe.block, recipe.block))


def _sample(inputs: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """The same rows of each."""
    num_rows = len(next(iter(inputs.values())))
    chosen = torch.randperm(num_rows, generator=generator)[:SEARCH_ROWS]
    return {source: rows[chosen] for source, rows in inputs.items()}
