"""EAGLE-3 in whole drafts: one native call takes in the target's features, one grows the trees of several requests.

`src/drafter.cpp` has the other side. The parts (layer, matrices, the target's embedding) stay what they are and can be
called one by one as well (`layers.py`); here nothing comes back to Python between two levels of a tree.
"""

import ctypes
import math
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import InvalidOptionError
from paceline.ops.native.layers import IntArray, NativeLayers, NativeLinear
from paceline.ops.native.library import STATUS, Signatures, load_with
from paceline.ops.random import BitRow

KeyArray = NDArray[np.uint64]


class _Parts(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("target", "layers", "fc", "head")),
        *((name, c_void_p) for name in ("fc_norm", "hidden_norm", "embedding_norm", "final_norm")),
        *((name, c_void_p) for name in ("target_ids", "id_constants")),
        ("eps", c_float),
        ("norm_before_residual", c_int32),
    ]


class _Context(ctypes.Structure):
    _fields_ = [
        ("num_rows", c_int32),
        ("num_slots", c_int64),
        *((name, c_void_p) for name in ("next_tokens", "positions", "slots", "hidden", "features", "kv_cache")),
    ]


class _Draft(ctypes.Structure):
    _fields_ = [
        ("num_requests", c_int32),
        ("num_slots", c_int64),
        ("first_scratch", c_int64),
        *((name, c_void_p) for name in ("tokens", "positions", "key_begins", "context_lens")),
        *((name, c_void_p) for name in ("num_nodes", "max_depths", "widths", "key_slots")),
        *((name, c_void_p) for name in ("features", "scales", "noise_keys")),
        ("lowest", c_double),
        ("followed", c_double),
        *((name, c_void_p) for name in ("kv_cache", "num_drafted", "token_ids", "parents", "log_probs")),
    ]


_SIGNATURES: Signatures = {
    "pl_eagle_new": (c_void_p, [POINTER(_Parts)]),
    "pl_eagle_free": (None, [c_void_p]),
    "pl_eagle_take_in": (c_int32, [c_void_p, POINTER(_Context)]),
    "pl_eagle_grow": (c_int32, [c_void_p, POINTER(_Draft)]),
}


@cache
def _library() -> ctypes.CDLL | None:
    return load_with(_SIGNATURES)


def drafter_available() -> bool:
    return _library() is not None


@dataclass(frozen=True, slots=True)
class Drafting:
    """A request to draft for."""

    token_id: int  # its last token
    position: int  # of its newest pair
    context: IntArray  # slots of all its pairs, the newest last
    feature: Tensor  # [hidden] of the newest pair
    num_nodes: int
    max_depth: int
    width: int  # children of a node, and paths extended at each depth
    scale: float = 1.0  # the logits are multiplied with it before noise is added
    noise_keys: KeyArray | None = None  # [max_depth]: names of the noise (ops/random.py)


@dataclass(frozen=True, slots=True)
class Drafted:
    token_ids: list[int]  # the target's ids
    parents: list[int]
    log_probs: list[float]  # [nodes]: of each node, given its parent


class NativeEagle:
    def __init__(
        self,
        target: Any,  # a native decoder, whose embedding is read
        layers: NativeLayers,
        fc: NativeLinear,
        head: NativeLinear,
        *,
        fc_norm: Tensor | None,
        hidden_norm: Tensor,
        embedding_norm: Tensor,
        final_norm: Tensor,
        target_ids: Tensor,  # [draft vocab]
        id_constants: BitRow,  # [draft vocab]: of the target's ids
        eps: float,
        norm_before_residual: bool,
    ) -> None:
        library = _library()
        if library is None:
            raise RuntimeError("the native kernels lack whole drafts: run `python -m paceline.ops.native.build`")
        self._keep = target, layers, fc, head  # the native side points into them
        self._hidden_size = hidden_norm.numel()
        self._num_slots, self._kv_address = layers.kv_cache.shape[2], layers.kv_cache.data_ptr()
        norms = {"hidden_norm": hidden_norm, "embedding_norm": embedding_norm, "final_norm": final_norm}
        if fc_norm is not None:
            norms["fc_norm"] = fc_norm
        floats = {name: norm.detach().float().cpu().contiguous() for name, norm in norms.items()}
        ids = target_ids.to(torch.int32).cpu().contiguous()
        constants = np.ascontiguousarray(id_constants)
        parts = _Parts(
            target=target.handle,
            layers=layers.handle,
            fc=fc.handle,
            head=head.handle,
            target_ids=ids.data_ptr(),
            id_constants=constants.ctypes.data,
            eps=eps,
            norm_before_residual=norm_before_residual,
            **{name: norm.data_ptr() for name, norm in floats.items()},
        )
        self._take_in, self._draft = library.pl_eagle_take_in, library.pl_eagle_grow
        self._eagle = library.pl_eagle_new(ctypes.byref(parts))
        if not self._eagle:
            raise InvalidOptionError("no memory for a native drafter, or its sizes or vocabulary are not the target's")
        weakref.finalize(self, library.pl_eagle_free, self._eagle)

    def take_in(self, hidden: Tensor, next_tokens: IntArray, positions: IntArray, slots: IntArray) -> Tensor:
        """Features [rows, hidden] of true pairs, their keys and values stored. hidden: [rows, ...] float32, as many
        numbers in a row as fc takes."""
        hidden = hidden.contiguous()
        features = torch.empty(len(slots), self._hidden_size)
        ints = [torch.from_numpy(part) for part in (next_tokens, positions, slots)]
        for part in ints:
            assert part.dtype == torch.int32 and part.is_contiguous()
        context = _Context(
            len(slots),
            self._num_slots,
            *[part.data_ptr() for part in ints],
            hidden.data_ptr(),
            features.data_ptr(),
            self._kv_address,
        )
        _check(self._take_in(self._eagle, ctypes.byref(context)))
        return features

    def draft(
        self, requests: Sequence[Drafting], first_scratch: int, lowest: float, followed: float = -math.inf
    ) -> list[Drafted]:
        """Trees; paths with a log-probability below `lowest` are left out, those below `followed` not extended."""
        # Plain ctypes, no arrays: right after a pass nothing is in the caches, and each call of a library costs most.
        count = len(requests)
        lengths = [len(r.context) for r in requests]
        sizes = [r.num_nodes for r in requests]
        ints = (c_int32 * (7 * count))(
            *[r.token_id for r in requests],
            *[r.position for r in requests],
            *accumulate(lengths[:-1], initial=0),
            *lengths,
            *sizes,
            *[r.max_depth for r in requests],
            *[r.width for r in requests],
        )
        contexts = requests[0].context if count == 1 else np.concatenate([r.context for r in requests])
        key_slots = torch.from_numpy(contexts)  # whose address is had sooner than an array's
        features = requests[0].feature if count == 1 else torch.stack([r.feature for r in requests])
        scales = (c_float * count)(*[r.scale for r in requests])
        keys = (c_void_p * count)(*[None if r.noise_keys is None else r.noise_keys.ctypes.data for r in requests])
        room = sum(sizes)
        drafted = (c_int32 * (count + 2 * room))()  # of each request how many nodes, their tokens, their parents
        log_probs = (c_float * room)()
        of_ints, of_drafted = ctypes.addressof(ints), ctypes.addressof(drafted)
        call = _Draft(
            count,
            self._num_slots,
            first_scratch,
            *[of_ints + 4 * count * i for i in range(7)],
            key_slots.data_ptr(),
            features.data_ptr(),
            ctypes.addressof(scales),
            ctypes.addressof(keys),
            lowest,
            max(lowest, followed),
            self._kv_address,
            of_drafted,
            of_drafted + 4 * count,
            of_drafted + 4 * (count + room),
            ctypes.addressof(log_probs),
        )
        _check(self._draft(self._eagle, ctypes.byref(call)))
        found: list[Drafted] = []
        begin = 0
        for num_nodes in drafted[:count]:
            end = begin + num_nodes
            tokens, parents = drafted[count + begin : count + end], drafted[count + room + begin : count + room + end]
            found.append(Drafted(tokens, parents, log_probs[begin:end]))
            begin = end
        return found


def _check(status: int) -> None:
    if status:
        raise InvalidOptionError(f"a drafter was not run: {STATUS[status]}")
