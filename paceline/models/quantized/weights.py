"""A folder's quantized tensors in the place of plain weights: under the usual names, unpacked when asked for."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.core.weights import QuantizedTensor, ShapedWeights, Weights
from paceline.errors import ModelLoadError
from paceline.models.layout import EMBEDDING, HEAD, expected_shapes
from paceline.models.quantized import awq, compressed_tensors, fp8, gptq
from paceline.models.quantized.fp8 import Float8Linear
from paceline.models.quantized.grouped import LEAST_GROUP, float8_groups, integer_groups, rows_of
from paceline.models.quantized.linear import QuantizedLinear, int8_blocks
from paceline.models.quantized.parts import Parts
from paceline.models.quantized.scheme import Scheme

PLAIN = (torch.float32, torch.bfloat16, torch.float16)
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale")  # for a quantized KV cache; ours has a finer type
LARGEST_HALF = 65504.0
HEAD_ROWS = 8192  # of a head that are rounded at a time, to save memory


@dataclass(frozen=True, slots=True)
class Layout:
    unpack: Callable[[Parts, Scheme], QuantizedLinear | Float8Linear]
    shape: Callable[[Parts, Scheme], tuple[int, int]]
    marker: str  # the tensor by which a quantized matrix is known
    dtype: torch.dtype | None  # where the marker could also be a plain weight: its type
    names: tuple[str, ...]  # of all its tensors


_GPTQ = Layout(gptq.unpack, gptq.shape, "qweight", None, (*gptq.NAMES, *gptq.OPTIONAL_NAMES))
LAYOUTS = {
    "awq": Layout(awq.unpack, awq.shape, "qweight", None, awq.NAMES),
    "gptq": _GPTQ,
    "gptq_v2": _GPTQ,
    "packed": Layout(
        compressed_tensors.unpack_packed,
        compressed_tensors.packed_shape,
        "weight_packed",
        None,
        (*compressed_tensors.PACKED_NAMES, *compressed_tensors.PACKED_OPTIONAL_NAMES),
    ),
    "int8": Layout(
        compressed_tensors.unpack_int8,
        compressed_tensors.int8_shape,
        "weight",
        torch.int8,
        (*compressed_tensors.INT8_NAMES, *compressed_tensors.INT8_OPTIONAL_NAMES),
    ),
    "float8": Layout(
        fp8.unpack, fp8.shape, "weight", torch.float8_e4m3fn, ("weight", *fp8.SCALE_NAMES, *fp8.OPTIONAL_NAMES)
    ),
}


class QuantizedWeights(ShapedWeights):
    """`keep`: as blocks of the native kernels, or `for_cuda` as groups for the fused ones; else widened to float32."""

    def __init__(
        self, stored: Weights, scheme: Scheme, config: ModelConfig, *, keep: bool, for_cuda: bool = False
    ) -> None:
        self._stored, self._scheme, self._keep, self._for_cuda = stored, scheme, keep, for_cuda
        self._layout = LAYOUTS[scheme.layout]
        self._head = EMBEDDING if config.tie_word_embeddings else HEAD
        self._modules = {name: self._module(name) for name in stored if self._is_quantized(name)}
        consumed = {f"{module}.{name}" for module in self._modules.values() for name in self._layout.names}
        self._names = {f"{module}.weight": module for module in self._modules.values()}
        unused = consumed | self._empty_biases(expected_shapes(config).keys())
        self._plain = [name for name in stored if name not in unused and not name.endswith(CACHE_SCALES)]
        self.held: Counter[str] = Counter()  # how the matrices that were read so far are held
        self._check_against_config(config)

    def __getitem__(self, name: str) -> Tensor | QuantizedTensor:
        if name not in self._names:
            return self._int8_head() if name == self._head else self._stored[name]
        unpacked = self._layout.unpack(Parts(self._names[name], self._stored, self._scheme), self._scheme)
        if not self._keep:
            return unpacked.dequantized()
        if self._for_cuda:
            return self._groups(unpacked)
        return self._blocks(unpacked) if isinstance(unpacked, QuantizedLinear) else self._halves(unpacked.dequantized())

    def __iter__(self) -> Iterator[str]:
        return iter([*self._names, *self._plain])

    def __len__(self) -> int:
        return len(self._names) + len(self._plain)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._names:
            return self._layout.shape(Parts(self._names[name], self._stored, self._scheme), self._scheme)
        return tuple(self._stored[name].shape)

    def _blocks(self, linear: QuantizedLinear) -> Tensor | QuantizedTensor:
        exact = linear.exact_blocks()
        if exact is not None:
            self.held["their own values, exactly"] += 1
            return exact
        wide = linear.dequantized()
        finer = int8_blocks(wide)
        self.held["float32, widened" if finer is None else "int8, quantized again"] += 1
        return wide if finer is None else finer

    def _int8_head(self) -> Tensor | QuantizedTensor:
        """On the native kernels the plain head of 4-bit layers, int8 as in GGUF files: in 16 bits it would be a third
        of what a pass reads."""
        head = self._stored[self._head]
        if not self._keep or self._for_cuda or self._scheme.bits > 4 or isinstance(head, QuantizedTensor):
            return head
        parts = [int8_blocks(head[begin : begin + HEAD_ROWS]) for begin in range(0, len(head), HEAD_ROWS)]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return head  # its rows do not divide into blocks
        return QuantizedTensor(torch.cat([part.data for part in found]), found[0].kind, (len(head), head.shape[1]))

    def _groups(self, linear: QuantizedLinear | Float8Linear) -> Tensor | QuantizedTensor:
        grouped = integer_groups(linear) if isinstance(linear, QuantizedLinear) else float8_groups(linear)
        if grouped is None:
            self.held["plain weights, because groups of act-order are no runs of inputs"] += 1
            return linear.dequantized()
        if grouped.group % LEAST_GROUP:
            self.held[f"plain weights, because groups are no multiple of {LEAST_GROUP} inputs"] += 1
            return linear.dequantized()
        self.held["their own values, exactly"] += 1
        return rows_of(grouped)

    def _halves(self, wide: Tensor) -> Tensor:
        fits = float(wide.abs().max()) <= LARGEST_HALF
        self.held[f"{'float16' if fits else 'bfloat16'}, widened"] += 1
        return wide.half() if fits else wide.bfloat16()

    def notes(self) -> str:
        if all("exactly" in how for how in self.held):
            return ""
        parts = ", ".join(f"{count} as {how}" for how, count in self.held.most_common())
        kernels = "fused" if self._for_cuda else "native"
        return f"not every {self._scheme} matrix fits the {kernels} kernels' formats exactly; they are held: {parts}"

    def _is_quantized(self, name: str) -> bool:
        if not name.endswith("." + self._layout.marker):
            return False
        tensor = self._stored[name]
        return self._layout.dtype is None or (isinstance(tensor, Tensor) and tensor.dtype == self._layout.dtype)

    def _empty_biases(self, expected: Collection[str]) -> set[str]:
        """Old GPTQ writers store a bias of zeros with every matrix, whether the model has one or not."""
        names = {f"{module}.bias" for module in self._modules.values()} - set(expected)
        return {name for name in names if name in self._stored and not _any(self._stored[name])}

    def _module(self, name: str) -> str:
        return name.removesuffix("." + self._layout.marker)

    def _check_against_config(self, config: ModelConfig) -> None:
        """Which matrices are quantized must be what config.json says."""
        if not self._modules:
            raise ModelLoadError(
                f"config.json describes {self._scheme} weights, but no tensor is stored that way "
                f"(none ends in {self._layout.marker!r} as {self._scheme.layout} has it). Check that config.json "
                "belongs to these weights."
            )
        for module in self._modules.values():
            if self._scheme.skips(module):
                raise ModelLoadError(f"{module} is quantized, but config.json says that it is not. {_MIXED}")
        ignored = {EMBEDDING, HEAD} if config.tie_word_embeddings else {EMBEDDING}
        for name in self._plain:
            module, is_weight = name.removesuffix(".weight"), name.endswith(".weight")
            if not is_weight or name in ignored or len(self._stored[name].shape) != 2 or self._scheme.skips(module):
                continue
            raise ModelLoadError(f"{name} is stored plainly, but config.json describes it as {self._scheme}. {_MIXED}")


def _any(tensor: Tensor | QuantizedTensor) -> bool:
    return isinstance(tensor, QuantizedTensor) or bool(tensor.any())


_MIXED = "Shards of different models may have been mixed: check that config.json and all shards belong together."


def quantized_weights(
    stored: Weights, scheme: Scheme | None, config: ModelConfig, *, keep: bool, for_cuda: bool = False
) -> Weights:
    return stored if scheme is None else QuantizedWeights(stored, scheme, config, keep=keep, for_cuda=for_cuda)
