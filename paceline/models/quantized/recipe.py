"""How a model is to be quantized, checked against the model, and what config.json then says of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.errors import InvalidOptionError
from paceline.models.layout import expected_shapes, layer_prefix
from paceline.models.quantized import awq, compressed_tensors, fp8, gptq
from paceline.models.quantized.config import GPTQ_BITS, HEAD
from paceline.models.quantized.layer_pass import LINEARS
from paceline.models.quantized.linear import QuantizedLinear
from paceline.models.quantized.scheme import WHOLE_ROW

METHODS = ("awq", "gptq", "fp8", "int8")
LAYOUTS = ("own", "compressed-tensors")  # own: as the method's first tools have it
GROUP_SIZES = (128, 64, 32)  # the usual one first; the others for widths that it does not divide
AnyLinear = QuantizedLinear | fp8.Float8Linear


@dataclass(frozen=True, slots=True)
class Recipe:
    method: str
    bits: int = 4  # gptq: 4 or 8
    group_size: int | None = None  # awq, gptq; None: the first of `GROUP_SIZES` that divides every matrix
    symmetric: bool = True  # gptq; awq always has zero points
    act_order: bool = False  # gptq: groups in the order of the rounding
    damping: float = 0.05  # gptq
    block: int | None = None  # fp8: a scale for each square of so many outputs and inputs; None: for each output
    layout: str = "own"
    seed: int = 0

    def checked(self, config: ModelConfig) -> "Recipe":
        """The same with its group size, or an error that says what does not go."""
        self._check_options()
        if self.method not in ("awq", "gptq"):
            return self
        matrices = linear_shapes(config)
        size = self.group_size
        if size is None:
            size = next((size for size in GROUP_SIZES if _divides(size, matrices)), None)
        if size is None or (size != WHOLE_ROW and not _divides(size, matrices)):
            name, (_, inputs) = next(
                (name, shape) for name, shape in matrices.items() if shape[1] % (size or GROUP_SIZES[-1])
            )
            raise InvalidOptionError(
                f"{name} has {inputs} inputs, which do not divide into groups of {size or GROUP_SIZES[-1]}: give "
                "another --group-size, or the method int8 or fp8, which have none"
            )
        per_int = 32 // self.bits
        for name, (outputs, inputs) in matrices.items():
            if outputs % per_int or inputs % per_int:
                raise InvalidOptionError(
                    f"{name} is {outputs} x {inputs}, but {self.method} packs {per_int} outputs or inputs into one "
                    "number: this model needs int8 or fp8"
                )
        return replace(self, group_size=size)

    def _check_options(self) -> None:
        if self.method not in METHODS:
            raise InvalidOptionError(f"the method must be one of {', '.join(METHODS)}, but is {self.method!r}")
        if self.layout not in LAYOUTS:
            raise InvalidOptionError(f"the layout must be one of {', '.join(LAYOUTS)}, but is {self.layout!r}")
        if self.bits not in (GPTQ_BITS if self.method == "gptq" else (4,)):
            raise InvalidOptionError(f"{self.method} with {self.bits} bits cannot be made: only gptq takes 4 or 8")
        if self.group_size is not None and self.group_size != WHOLE_ROW and self.group_size < 1:
            raise InvalidOptionError(f"a group must have 1 weight or more (or be -1, a whole row): {self.group_size}")
        if self.method == "awq" and self.group_size == WHOLE_ROW:
            raise InvalidOptionError("awq needs groups: give a --group-size such as 128")
        if not 0 < self.damping < 1:
            raise InvalidOptionError(f"damping must be between 0 and 1, but is {self.damping}")
        if self.block is not None and (self.method != "fp8" or self.block < 1):
            raise InvalidOptionError(f"--block is for fp8, and 1 or more; it is {self.block} for {self.method}")
        if self.layout != "own" and self.method in ("fp8", "int8"):
            raise InvalidOptionError(f"--layout is for awq and gptq: {self.method} has only one")
        if self.act_order and (self.method != "gptq" or self.layout != "own"):
            raise InvalidOptionError(
                f"--act-order is for gptq in its own layout, not for {self.method} as {self.layout}: in "
                "compressed-tensors there are no groups in another order any more"
            )

    @property
    def is_symmetric(self) -> bool:
        return self.method != "awq" and self.symmetric

    @property
    def needs_inputs(self) -> bool:
        """Whether calibration text decides anything; else it is only judged by."""
        return self.method in ("awq", "gptq")

    def pack(self, linear: AnyLinear) -> dict[str, Tensor]:
        """The tensors that a folder stores for it."""
        if isinstance(linear, fp8.Float8Linear):
            return fp8.pack(linear)
        if self.method == "int8":
            return compressed_tensors.pack_int8(linear)
        if self.layout == "compressed-tensors":
            return compressed_tensors.pack_packed(linear, symmetric=self.is_symmetric)
        return awq.pack(linear) if self.method == "awq" else gptq.pack(linear)

    def quantization_config(self) -> dict[str, Any]:
        """For config.json."""
        if self.method == "fp8" and self.block is not None:
            dynamic = {"activation_scheme": "dynamic", "fmt": "e4m3"}
            return {"quant_method": "fp8", "weight_block_size": [self.block, self.block]} | dynamic
        if self.method == "fp8":
            return _compressed("float-quantized", _numbers("float", 8, "channel"), _numbers("float", 8, "token"))
        if self.method == "int8":
            return _compressed("int-quantized", _numbers("int", 8, "channel"), _numbers("int", 8, "token"))
        if self.layout == "compressed-tensors":
            strategy = "channel" if self.group_size == WHOLE_ROW else "group"
            weights = _numbers("int", self.bits, strategy) | {"symmetric": self.is_symmetric}
            weights |= {"group_size": self.group_size} if strategy == "group" else {}
            return _compressed("pack-quantized", weights, None)
        common = {"quant_method": self.method, "bits": self.bits, "group_size": self.group_size}
        if self.method == "awq":
            return common | {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}
        order = {"sym": self.symmetric, "desc_act": self.act_order, "damp_percent": self.damping}
        return common | order | {"checkpoint_format": "gptq", "lm_head": False, "true_sequential": False}


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The matrices of a layer: name -> (outputs, inputs)"""
    shapes = expected_shapes(config)
    found = {name: shapes[f"{layer_prefix(0)}{name}.weight"] for name in LINEARS}
    return {name: (shape[0], shape[1]) for name, shape in found.items()}


def _divides(size: int, matrices: Mapping[str, tuple[int, int]]) -> bool:
    return all(inputs % size == 0 for _, inputs in matrices.values())


def _numbers(kind: str, bits: int, strategy: str) -> dict[str, Any]:
    of_activations = {"dynamic": True} if strategy == "token" else {"dynamic": False}
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy} | of_activations


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": [HEAD],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
