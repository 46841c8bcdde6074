"""MessagePack for what KV events are made of: None, bool, int, float, str, bytes, lists and dictionaries.

Written here so that events need no library. https://github.com/msgpack/msgpack/blob/master/spec.md

>>> unpack(pack({"type": "BlockStored", "block_size": 16}))
{'type': 'BlockStored', 'block_size': 16}
"""

import struct
from typing import Any

MAX_DEPTH = 16  # of what is read: events are four deep


class MessagePackError(ValueError):
    """Bytes that are not MessagePack, or not of the kinds that are known here."""


def pack(value: Any) -> bytes:
    out = bytearray()
    _pack(value, out)
    return bytes(out)


def _pack(value: Any, out: bytearray) -> None:
    if value is None:
        out.append(0xC0)
    elif value is True or value is False:
        out.append(0xC3 if value else 0xC2)
    elif isinstance(value, int):
        _pack_int(value, out)
    elif isinstance(value, float):
        out += b"\xcb" + struct.pack(">d", value)
    elif isinstance(value, str):
        data = value.encode()
        _pack_length(len(data), out, fixed=(0xA0, 32), wider=(0xD9, 0xDA, 0xDB))
        out += data
    elif isinstance(value, bytes):
        _pack_length(len(value), out, fixed=(0, 0), wider=(0xC4, 0xC5, 0xC6))
        out += value
    elif isinstance(value, list | tuple):
        _pack_length(len(value), out, fixed=(0x90, 16), wider=(0, 0xDC, 0xDD))
        for item in value:
            _pack(item, out)
    elif isinstance(value, dict):
        _pack_length(len(value), out, fixed=(0x80, 16), wider=(0, 0xDE, 0xDF))
        for key, item in value.items():
            _pack(key, out)
            _pack(item, out)
    else:
        raise MessagePackError(f"cannot pack a {type(value).__name__}")


def _pack_int(value: int, out: bytearray) -> None:
    if 0 <= value < 128:
        out.append(value)
    elif -32 <= value < 0:
        out.append(256 + value)
    else:
        kinds = ((0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q"))
        if value < 0:
            kinds = ((0xD0, ">b"), (0xD1, ">h"), (0xD2, ">i"), (0xD3, ">q"))
        for tag, form in kinds:
            try:
                data = struct.pack(form, value)
            except struct.error:
                continue
            out.append(tag)
            out += data
            return
        raise MessagePackError(f"{value} has more than 64 bits")


def _pack_length(length: int, out: bytearray, fixed: tuple[int, int], wider: tuple[int, int, int]) -> None:
    tag, limit = fixed
    if length < limit:
        out.append(tag | length)
    elif wider[0] and length < 1 << 8:
        out += struct.pack(">BB", wider[0], length)
    elif length < 1 << 16:
        out += struct.pack(">BH", wider[1], length)
    else:
        out += struct.pack(">BI", wider[2], length)


def unpack(data: bytes) -> Any:
    reader = _Reader(data)
    try:
        value = reader.value(0)
    except (struct.error, UnicodeDecodeError, TypeError) as error:  # TypeError: a key that cannot be one
        raise MessagePackError(f"not MessagePack: {error}") from error
    if reader.position != len(data):
        raise MessagePackError(f"{len(data) - reader.position} bytes behind the value")
    return value


# tag -> form of the number that follows
_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
_NUMBERS |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_LENGTHS = (">B", ">H", ">I")
# tag -> (what follows, form of its length)
_SIZED = {0xC4 + i: ("bytes", form) for i, form in enumerate(_LENGTHS)}
_SIZED |= {0xD9 + i: ("str", form) for i, form in enumerate(_LENGTHS)}
_SIZED |= {0xDC + i: ("list", form) for i, form in enumerate(_LENGTHS[1:])}
_SIZED |= {0xDE + i: ("dict", form) for i, form in enumerate(_LENGTHS[1:])}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise MessagePackError(f"deeper than {MAX_DEPTH}")
        tag = int(self._number(">B"))
        if tag < 0x80 or tag >= 0xE0:
            return tag if tag < 0x80 else tag - 256
        if tag < 0xC0:
            kind, length = ("dict", tag & 15) if tag < 0x90 else ("list", tag & 15)
            return self._sized("str", tag & 31, depth) if tag >= 0xA0 else self._sized(kind, length, depth)
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag in _NUMBERS:
            return self._number(_NUMBERS[tag])
        if tag in _SIZED:
            kind, form = _SIZED[tag]
            return self._sized(kind, int(self._number(form)), depth)
        raise MessagePackError(f"tag {tag:#x} is not known here")

    def _number(self, form: str) -> Any:
        (number,) = struct.unpack_from(form, self.data, self.position)
        self.position += struct.calcsize(form)
        return number

    def _sized(self, kind: str, length: int, depth: int) -> Any:
        if length > len(self.data) - self.position:  # every item has a byte at least
            raise MessagePackError(f"{kind} of {length} is longer than what is left")
        if kind == "list":
            return [self.value(depth + 1) for _ in range(length)]
        if kind == "dict":
            return {self.value(depth + 1): self.value(depth + 1) for _ in range(length)}
        data = self.data[self.position : self.position + length]
        self.position += length
        return data.decode() if kind == "str" else data
