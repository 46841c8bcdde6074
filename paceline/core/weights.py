"""Weights as they lie in a file: plain tensors, or rows of quantized blocks that are not widened yet."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix in GGUF's block format, one row after the other."""

    data: Tensor  # [rows, bytes per row] uint8
    kind: str  # GGUF's name for the format: "Q4_1", "Q8_0", ...
    shape: tuple[int, int]  # (rows, columns) of the widened matrix

    def rows(self, which: slice) -> "QuantizedTensor":
        data = self.data[which]
        return QuantizedTensor(data, self.kind, (data.shape[0], self.shape[1]))


# Hugging Face names ("model.layers.0.self_attn.q_proj.weight") -> weights
Weights = Mapping[str, Tensor | QuantizedTensor]


class ShapedWeights(Mapping[str, Tensor | QuantizedTensor]):
    """Weights that know their shapes before they are read."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    def notes(self) -> str:
        """What a user should know of how the weights read so far are held; often nothing."""
        return ""
