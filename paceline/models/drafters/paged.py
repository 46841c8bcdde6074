"""A drafter's matrices and layers as the engine runs them: ragged rows over a paged KV cache.

On a CPU the native kernels do the work, with int8 weights, or int4 where a proposer asks for it (`storage`), as those
of EAGLE do for the head. Everywhere else, and as the plain twin that the native ones are tested against, PyTorch does.
Which keys a row may see is said with slots (`KeyRows`), so a chain, a tree and a DFlash block are the same to a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.core.kv_tensor import allocate_kv
from paceline.core.model_config import ModelConfig
from paceline.models.drafters.layers import Attention, Mlp
from paceline.models.rope import rope_frequencies, rope_tables
from paceline.ops.native import default_num_threads
from paceline.ops.native.layers import KeyRows, NativeLayers, NativeLinear, layers_available

Linear = Callable[[Tensor], Tensor]  # [rows, in] -> [rows, out]


class Layers(Protocol):
    kv_cache: Tensor  # [layers, 2, slots, kv heads, head_dim]

    def store(self, layer: int, inputs: Tensor, rows: KeyRows) -> None: ...

    def forward(self, layer: int, inputs: Tensor, stream: Tensor, rows: KeyRows) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a drafter runs."""

    device: torch.device
    num_threads: int | None = None
    native: bool | None = None  # None: wherever it can be

    @property
    def is_native(self) -> bool:
        return self.device.type == "cpu" and (layers_available() if self.native is None else self.native)

    @property
    def threads(self) -> int:
        return self.num_threads or default_num_threads()


def make_linear(linear: nn.Linear, place: Placement, storage: str = "int8") -> Linear:
    """`storage`: of native weights, as in `NativeLinear`."""
    if place.is_native:
        return NativeLinear(linear.weight, linear.bias, num_threads=place.threads, storage=storage)
    return linear.to(place.device)


def make_layers(
    config: ModelConfig, modules: list[nn.Module], num_slots: int, place: Placement, storage: str = "int8"
) -> Layers:
    """`modules`: one per layer, each with `self_attn`, `mlp` and `post_attention_layernorm`."""
    if not place.is_native:
        return TorchLayers(config, modules, num_slots, place.device)
    weights = {f"{i}.{name}": value for i, module in enumerate(modules) for name, value in module.state_dict().items()}
    frequencies, scale = rope_frequencies(config)
    return NativeLayers(config, weights, frequencies, scale, num_slots, num_threads=place.threads, storage=storage)


class TorchLayers:
    """The twin of `NativeLayers`."""

    def __init__(self, config: ModelConfig, modules: list[nn.Module], num_slots: int, device: torch.device) -> None:
        self._modules = [module.to(device) for module in modules]
        self.kv_cache = allocate_kv(config, num_slots, torch.float32, device)
        cos, sin = rope_tables(config)
        self._cos, self._sin = cos.to(device), sin.to(device)  # [max_position, head_dim / 2]
        self._share = config.num_heads // config.num_kv_heads

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        """cos and sin, [max_position, head_dim / 2]"""
        return self._cos, self._sin

    @torch.no_grad()
    def store(self, layer: int, inputs: Tensor, rows: KeyRows) -> None:
        self._store(self._attention(layer), layer, inputs, rows)

    @torch.no_grad()
    def forward(self, layer: int, inputs: Tensor, stream: Tensor, rows: KeyRows) -> Tensor:
        attention = self._attention(layer)
        self._store(attention, layer, inputs, rows)
        module = self._modules[layer]
        mlp, norm = module.mlp, module.post_attention_layernorm
        assert isinstance(mlp, Mlp) and isinstance(norm, nn.Module)
        mixed = self._attend(layer, attention.query(inputs, *self._angles(rows)), rows)
        x = stream + attention.output(mixed)
        updated: Tensor = x + mlp(norm(x))
        return updated

    def _attention(self, layer: int) -> Attention:
        attention = self._modules[layer].self_attn
        assert isinstance(attention, Attention)
        return attention

    def _angles(self, rows: KeyRows) -> tuple[Tensor, Tensor]:
        positions = on_device(rows.positions, self._cos.device).long()
        return self._cos[positions], self._sin[positions]

    def _store(self, attention: Attention, layer: int, inputs: Tensor, rows: KeyRows) -> None:
        key, value = attention.key_value(inputs, *self._angles(rows))
        slots = on_device(rows.slots, self.kv_cache.device).long()
        self.kv_cache[layer, 0, slots], self.kv_cache[layer, 1, slots] = key, value

    def _attend(self, layer: int, query: Tensor, rows: KeyRows) -> Tensor:
        slots, visible = padded_slots(rows)  # [rows, keys]
        index = on_device(slots, query.device).long()
        mask = on_device(visible, query.device)[:, None, None]  # [rows, 1, 1, keys]
        keys, values = (part[index].transpose(1, 2) for part in self.kv_cache[layer])  # [rows, kv heads, keys, dim]
        grouped = query.view(len(query), -1, self._share, query.shape[-1])  # [rows, kv heads, heads that share, dim]
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).flatten(1, 2)


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Without waiting for what the device does before: memory that is not pinned has been read when this returns."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def padded_slots(rows: KeyRows) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Each row's key slots side by side, [rows, longest], and which of them are really there."""
    lengths = rows.context_lens + rows.tail_lens
    slots = np.zeros((len(lengths), int(lengths.max(initial=0))), dtype=np.int32)
    for i, line in enumerate(slots):
        begin, count, tail = rows.key_begins[i], rows.context_lens[i], rows.tail_begins[i]
        line[:count] = rows.key_slots[begin : begin + count]
        line[count : lengths[i]] = rows.tail_slots[tail : tail + rows.tail_lens[i]]
    return slots, np.arange(slots.shape[1]) < lengths[:, None]


__all__ = ["KeyRows", "Layers", "Linear", "Placement", "make_layers", "make_linear"]
