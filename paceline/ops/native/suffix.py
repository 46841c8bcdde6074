"""Drafts of the `suffix` method made natively: the same trees, to the bit, as those of `spec/lookup/suffix_trees.py`.

`src/suffix.cpp` has the other side: one call takes in what is new of a request's text, finds the places where its end
stood before and unfolds the tree.
"""

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_void_p
from functools import cache

from paceline.core.tree import DraftTree
from paceline.ops.native.library import Signatures, declare, load_with


class _Draft(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("max_match", "num_chunks")),
        *((name, c_double) for name in ("factor", "min_prob")),
        *((name, c_void_p) for name in ("hits", "guesses", "chunks")),
        *((name, c_void_p) for name in ("token_ids", "parents", "lengths", "confidence")),
    ]


_SIGNATURES: Signatures = {
    "pl_text_new": (c_void_p, [c_void_p, c_int32]),
    "pl_text_free": (None, [c_void_p]),
    "pl_text_extend": (c_int32, [c_void_p, c_void_p, c_int32]),
    "pl_suffix_draft": (c_int32, [c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32]),
}
_NO_PLACE, _NO_MEMORY = -1, -2


@cache
def _library() -> ctypes.CDLL | None:
    """It keeps the interpreter's lock: where other threads are busy, to get it back could take milliseconds."""
    loaded = load_with(_SIGNATURES)
    if loaded is None:
        return None
    library = ctypes.PyDLL(loaded._name, handle=loaded._handle)
    declare(library, _SIGNATURES)
    return library


def suffix_available() -> bool:
    return _library() is not None


class NativeText:
    """A text that only grows, with an index of its n-grams."""

    def __init__(self, sizes: Sequence[int]) -> None:
        library = _library()
        if library is None:
            raise RuntimeError("the native kernels lack suffix drafts: run `python -m paceline.ops.native.build`")
        self.num_tokens = 0
        self.handle: int | None = library.pl_text_new((c_int32 * len(sizes))(*sizes), len(sizes))
        if self.handle is None:
            raise MemoryError("no memory for a text")
        self._extend = library.pl_text_extend
        weakref.finalize(self, library.pl_text_free, self.handle)

    def extend(self, text: Sequence[int]) -> None:
        """Take in text[num_tokens:]."""
        added = array("i", text[self.num_tokens :])
        if self._extend(self.handle, added.buffer_info()[0], len(added)):
            raise MemoryError("no memory for a text")
        self.num_tokens += len(added)


class NativeSuffix:
    def __init__(
        self,
        *,
        max_match: int,
        factor: float,
        min_prob: float,
        hits: "array[float]",  # [> max_match]: read in each call
        guesses: "array[float]",
    ) -> None:
        library = _library()
        assert library is not None
        self._run = library.pl_suffix_draft
        self._counters = hits, guesses  # the native side points into them
        self._call = _Draft(max_match, 0, factor, min_prob, hits.buffer_info()[0], guesses.buffer_info()[0])
        self._address = ctypes.addressof(self._call)
        self._chunks: tuple[Sequence[NativeText], object] = (), None
        self._make_room(64)

    def set_chunks(self, chunks: Sequence[NativeText]) -> None:
        """Past outputs to look into, from now on."""
        handles = (c_void_p * len(chunks))(*(chunk.handle for chunk in chunks))
        self._call.num_chunks, self._call.chunks = len(chunks), ctypes.addressof(handles)
        self._chunks = chunks, handles

    def draft(
        self, own: NativeText, tokens: Sequence[int], num_nodes: int, max_depth: int
    ) -> tuple[DraftTree, list[int]] | None:
        """Take in what is new of `tokens`, then draft: the tree and, by node, the length of the match it comes from.

        None where the end of the text stood nowhere before."""
        if num_nodes > len(self._token_ids):
            self._make_room(num_nodes)
        added = array("i", tokens[own.num_tokens :])
        count = self._run(self._address, own.handle, added.buffer_info()[0], len(added), num_nodes, max_depth)
        if count == _NO_MEMORY:
            raise MemoryError("no memory for a text")
        own.num_tokens += len(added)
        if count == _NO_PLACE:
            return None
        tree = DraftTree(
            self._token_ids[:count].tolist(),
            self._parents[:count].tolist(),
            confidence=self._confidence[:count].tolist(),
        )
        return tree, self._lengths[:count].tolist()

    def _make_room(self, num_nodes: int) -> None:
        self._token_ids, self._parents, self._lengths = (array("i", bytes(4 * num_nodes)) for _ in range(3))
        self._confidence = array("d", bytes(8 * num_nodes))
        self._call.token_ids = self._token_ids.buffer_info()[0]
        self._call.parents = self._parents.buffer_info()[0]
        self._call.lengths = self._lengths.buffer_info()[0]
        self._call.confidence = self._confidence.buffer_info()[0]
