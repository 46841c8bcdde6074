"""The compiled kernels as Python sees them: found, loaded and declared once.

The structures and constants here repeat `src/api.h`, `src/kernels.h` and `src/pack.h`; a test holds them together by
calling through them.
"""

import ctypes
import hashlib
import os
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from paceline.errors import InvalidOptionError

LIBRARY_VARIABLE = "PACELINE_NATIVE_LIBRARY"  # another build of the library, for example with sanitizers
INSTRUCTION_SET_VARIABLE = "PACELINE_INSTRUCTION_SET"  # one of these instead of the best, so that machines agree
INSTRUCTION_SETS = ("avx512-vnni", "avx-vnni", "avx2", "neon-i8mm", "neon-dotprod", "portable")

# Panel formats that float weights may be asked for
FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 5}
KV_INTEGERS = {"int8": 16, "int16": 17}  # `KV_I8`, `KV_I16` of src/kernels.h
# What a matrix is made from: torch dtypes and GGUF's block names
SOURCES = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "Q4_0": 10,
    "Q4_1": 11,
    "Q5_0": 12,
    "Q5_1": 13,
    "Q8_0": 14,
    "Q4_K": 15,
    "Q5_K": 16,
    "Q6_K": 17,  # quantized again, as int8
    "U4Z": 20,  # not GGUF's: a scale, a zero and 32 unsigned values
    "U8Z": 21,
}
MATRICES = {"embed": 0, "head": 1, "q": 2, "k": 3, "v": 4, "o": 5, "gate": 6, "up": 7, "down": 8}
VECTORS = {"final_norm": 9, "input_norm": 10, "post_norm": 11, "q_norm": 12, "k_norm": 13}

STATUS = {
    1: "a token id lies outside the vocabulary",
    2: "a KV slot or block lies outside the cache",
    3: "rows, requests and parents do not fit together",
    4: "this weight format is not supported for this matrix",
    5: "out of memory",
    6: "weights are missing",
    7: "int16 keys and values lie in tiles: the cache and its blocks must be a multiple of 16 slots",
}


class Config(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers")),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "kv_format", "num_threads")),
        ("rms_norm_eps", c_float),
        ("rope_scale", c_float),
        ("inv_freq", c_void_p),
        ("windows", c_void_p),
        ("rotates", c_void_p),
    ]


class Batch(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("num_rows", "num_requests", "max_blocks", "block_size")),
        *((name, c_int32) for name in ("num_logits", "num_hidden", "num_run_layers")),
        ("num_slots", c_int64),
        *((name, c_void_p) for name in ("token_ids", "positions", "slot_mapping", "context_lens", "parents")),
        *((name, c_void_p) for name in ("req_ids", "block_tables", "cu_query", "logits_rows", "is_node")),
        *((name, c_void_p) for name in ("hidden_layers", "run_layers", "kv_cache", "logits", "hidden")),
        *((name, c_void_p) for name in ("temperatures", "seeds", "draw_positions", "id_constants", "tokens")),
    ]


class Packed(ctypes.Structure):
    """A matrix as it lies in the model's memory."""

    _fields_ = [
        *((name, c_int32) for name in ("format", "rows", "columns")),
        ("num_bytes", c_int64),
        ("data", c_void_p),
        ("bias", c_void_p),
    ]


# function -> (result, arguments)
Signatures = dict[str, tuple[Any, list[Any]]]  # function -> result, arguments
SIGNATURES: Signatures = {
    "pl_model_new": (c_void_p, [POINTER(Config)]),
    "pl_model_free": (None, [c_void_p]),
    "pl_model_set_matrix": (c_int32, [c_void_p, *[c_int32] * 6, c_void_p, c_void_p]),
    "pl_model_map_matrix": (c_int32, [c_void_p, *[c_int32] * 5, c_void_p, c_void_p]),
    "pl_model_packed": (c_int32, [c_void_p, c_int32, c_int32, POINTER(Packed)]),
    "pl_model_set_vector": (c_int32, [c_void_p, c_int32, c_int32, c_int32, c_void_p]),
    "pl_model_tie_head": (None, [c_void_p]),
    "pl_model_weight_bytes": (c_int64, [c_void_p]),
    "pl_model_set_threads": (None, [c_void_p, c_int32]),
    "pl_forward": (c_int32, [c_void_p, POINTER(Batch)]),
    "pl_move_slots": (c_int32, [c_void_p, c_int32, c_int64, *[c_int32] * 3, *[c_void_p] * 2]),
    "pl_natural_format": (c_int32, [c_int32]),
    "pl_instruction_set": (c_char_p, []),
    "pl_select_instruction_set": (c_int32, [c_char_p]),
    "pl_measure_bandwidth": (c_double, [c_int64, c_int32, c_int32]),
    "pl_argmax": (None, [c_void_p, c_int32, c_int32, c_int64, c_int32, c_void_p]),
    "pl_test_matmul": (c_int32, [*[c_int32] * 4, c_void_p, c_int32, c_int32, *[c_void_p] * 3]),
    "pl_test_rms_norm": (None, [c_void_p, c_void_p, c_float, c_int32, c_void_p]),
    "pl_test_silu_mul": (None, [c_void_p, c_void_p, c_int32, c_void_p]),
    "pl_test_rope": (None, [c_void_p, c_void_p, c_void_p, c_int32]),
    "pl_test_attention": (None, [*[c_void_p] * 5, *[c_int32] * 7, c_float, c_void_p]),
}


def _path() -> Path:
    from paceline.ops.native.build import library_path  # here, so that `python -m ...build` finds itself unloaded

    return Path(os.environ.get(LIBRARY_VARIABLE) or library_path())


@cache
def library_sha256() -> str:
    """Which build of the kernels this is."""
    return hashlib.sha256(_path().read_bytes()).hexdigest()


@cache
def load() -> tuple[ctypes.CDLL | None, str | None]:
    """(library, None), or (None, why there is none)."""
    path = _path()
    if not path.exists():
        return None, (
            f"the native CPU kernels are not built ({path.name} is missing): install a C++ compiler and run "
            "`python -m paceline.ops.native.build`"
        )
    try:
        library = ctypes.CDLL(str(path))
        declare(library, SIGNATURES)
    except (OSError, AttributeError) as error:
        return None, (
            f"the native CPU kernels do not load ({error}): rebuild them with `python -m paceline.ops.native.build`"
        )
    if wanted := os.environ.get(INSTRUCTION_SET_VARIABLE):
        select(library, wanted, f" (asked for by {INSTRUCTION_SET_VARIABLE})")
    return library, None


def select(library: ctypes.CDLL, name: str, asked_by: str = "") -> None:
    """Use the kernels of this instruction set from now on."""
    if library.pl_select_instruction_set(name.encode()):
        raise InvalidOptionError(
            f"instruction set {name!r}{asked_by} is not available here; known are {', '.join(INSTRUCTION_SETS)}, "
            f"and this machine's best is {library.pl_instruction_set().decode()}"
        )


def load_with(signatures: Signatures) -> ctypes.CDLL | None:
    """The library with these functions declared too; None without one, or with one that was built before them."""
    loaded, _ = load()
    try:
        declare(loaded, signatures)
    except AttributeError:
        return None
    return loaded


def declare(library: ctypes.CDLL | None, signatures: Signatures) -> None:
    """Say what the library's functions take and return; AttributeError where it lacks one."""
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def library() -> ctypes.CDLL:
    loaded, reason = load()
    if loaded is None:
        raise RuntimeError(reason)
    return loaded
