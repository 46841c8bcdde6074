"""The keys and values that a drafter made of the target's hidden states, on their way with the target's KV blocks.

Without them a drafter that gets a prompt's KV from elsewhere knows nothing of the prompt, and far fewer of its drafts
are accepted. They are exact: whoever computed the same tokens with the same network has the same rows. As with a prefix
from the cache, the last row of a block was made with the token that came next there.
"""

import hashlib
from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.kv_tensor import touch
from paceline.spec.engine_parts import EngineParts
from paceline.spec.feature.feature_queue import FeatureQueue


class FeatureBlockRows:
    def __init__(
        self,
        kind: str,
        network: nn.Module,
        kv_cache: Tensor,  # [layers, 2, slots and scratch, kv heads, head dim]
        queue: FeatureQueue,
        services: EngineParts,
        flush: Callable[[], None],  # takes in what is queued
    ) -> None:
        self._kind, self._network, self._kv_cache = kind, network, kv_cache
        self._queue, self._block_size, self._flush = queue, services.block_size, flush
        touch(kv_cache, slice(0, services.first_slots), slice(services.num_slots, None))

    @cached_property
    def name(self) -> str:
        found = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self._network.state_dict().items()):
            found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            found.update(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
        layout = list(self._kv_cache[:, :, : self._block_size].shape)
        return f"{self._kind} {found.hexdigest()} {self._kv_cache.dtype} {layout}"

    def read(self, block: int, use: int) -> bytes | None:
        self._flush()
        slots = self._slots(block)
        known = self._queue.known(slots, use)
        if not known.any():
            return None
        rows = self._kv_cache[:, :, slots].contiguous().cpu()
        return known.tobytes() + rows.view(torch.uint8).numpy().tobytes()

    def write(self, block: int, use: int, data: bytes) -> bool:
        slots = self._slots(block)
        place = self._kv_cache[:, :, slots]
        if len(data) != self._block_size + place.numel() * place.element_size():
            return False
        self._flush()  # rows of the block's last owner, which would be written over these later
        flags = np.frombuffer(data, dtype=np.uint8, count=self._block_size) != 0
        rows = torch.frombuffer(bytearray(data[self._block_size :]), dtype=torch.uint8)
        place.copy_(rows.view(place.dtype).view(place.shape))
        self._queue.mark_known(slots, use, flags)
        return True

    def _slots(self, block: int) -> slice:
        return slice(block * self._block_size, (block + 1) * self._block_size)
