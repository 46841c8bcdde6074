"""Plain matrices as int8 with a scale per 32 weights, each made when it is asked for: `quantization="int8"` on CUDA."""

from collections.abc import Iterator

from torch import Tensor

from paceline.core.weights import QuantizedTensor, ShapedWeights, Weights
from paceline.models.dequantize import dequantize
from paceline.models.quantized.linear import int8_blocks


class Int8Weights(ShapedWeights):
    def __init__(self, stored: Weights) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Tensor | QuantizedTensor:
        tensor = self._stored[name]
        wide = dequantize(tensor) if isinstance(tensor, QuantizedTensor) else tensor
        blocks = int8_blocks(wide) if wide.dim() == 2 else None
        return wide if blocks is None else blocks

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored
        return stored.shape(name) if isinstance(stored, ShapedWeights) else tuple(stored[name].shape)
