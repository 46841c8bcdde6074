"""The stored tensors of one quantized matrix, and the checks that they are what they should be."""

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor

from paceline.core.weights import QuantizedTensor
from paceline.errors import ModelLoadError
from paceline.models.quantized.scheme import WHOLE_ROW, Scheme


class Parts:
    def __init__(self, module: str, stored: Mapping[str, Tensor | QuantizedTensor], scheme: Scheme) -> None:
        self._module, self._stored, self._scheme = module, stored, scheme

    def find(self, name: str) -> Tensor | None:
        tensor = self._stored.get(f"{self._module}.{name}")
        assert not isinstance(tensor, QuantizedTensor)  # those come from GGUF files
        return tensor

    def take(self, name: str) -> Tensor:
        tensor = self.find(name)
        if tensor is None:
            self.fail(name, f"is missing, though config.json describes {self._scheme} weights")
        return tensor

    def num_groups(self, scheme: Scheme, inputs: int) -> int:
        size = inputs if scheme.group_size == WHOLE_ROW else scheme.group_size
        if inputs % size:
            raise ModelLoadError(
                f"config.json says group_size {size}, but {self._module} has {inputs} inputs, which do not divide into "
                "such groups. Check that config.json belongs to these weights."
            )
        return inputs // size

    def check_dtype(self, name: str, dtype: torch.dtype) -> None:
        found = self.take(name).dtype
        if found != dtype:
            self.fail(name, f"is {found}, but {self._scheme} weights store {dtype} there")

    def check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        found = tuple(self.take(name).shape)
        if found != expected:
            self.fail(name, f"has shape {found}, but config.json and the other tensors call for {expected}")

    def check_finite(self, name: str) -> None:
        if not bool(self.take(name).float().isfinite().all()):
            self.fail(name, "holds values that are not finite numbers: the file is damaged")

    def fail(self, name: str, problem: str) -> NoReturn:
        raise ModelLoadError(
            f"{self._module}.{name} {problem}. Check that config.json belongs to these weights, or fetch the model "
            "again."
        )
