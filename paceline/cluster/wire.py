"""Frames between the processes of a cluster: a header, a JSON object, and bytes.

    magic "PCLW" | version | kind | 0 | length of the JSON | length of the bytes | crc of the bytes | crc of all before

Numbers are big-endian. The second crc is over the header up to it and the JSON. A frame whose head is damaged ends its
connection, because nobody knows where the next one begins. One whose bytes are damaged is handed on as such: a KV
block that did not arrive whole is a block that did not arrive.

>>> frame = parse(b"".join(encode(Frame(Kind.PING, {"n": 1}))))
>>> frame.meta
{'n': 1}
"""

import enum
import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PacelineError

MAGIC = b"PCLW"
VERSION = 2
HEADER = struct.Struct("!4sBBHIQI")  # without its own crc
CRC = struct.Struct("!I")
HEAD_SIZE = HEADER.size + CRC.size
MAX_META = 64 << 20  # a prompt of a million tokens has 8 MB
MAX_PAYLOAD = 1 << 30


class ProtocolError(PacelineError):
    """The other side does not speak this protocol, or what it said was damaged."""


class Kind(enum.IntEnum):
    HELLO = 1  # a worker says what it is
    WELCOME = 2
    REFUSE = 3  # with the reason
    SUBMIT = 4
    ABORT = 5
    ITEMS = 6  # what one engine step brought, for all requests
    PREFILL = 7  # a prompt whose blocks will be fetched over this connection
    WAIT = 8  # blocks are still being computed
    EVENTS = 9
    REPLAY = 10
    PING = 11
    PONG = 12
    FETCH = 13
    BLOCK = 14
    END = 15
    STOP = 16
    LEAVING = 17  # a worker takes no new requests, and ends when it has none
    AGENT = 18  # how to read blocks with NIXL
    TAKEN = 19  # a block was read with NIXL


@dataclass(slots=True)
class Frame:
    kind: Kind
    meta: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""
    is_intact: bool = True  # the payload is what was sent


@dataclass(frozen=True, slots=True)
class Head:
    kind: Kind
    meta_size: int
    payload_size: int
    payload_crc: int
    crc: int
    raw: bytes


def encode(frame: Frame) -> tuple[bytes, bytes]:
    """The head with the JSON, and the payload, which is not copied."""
    meta = json.dumps(frame.meta, separators=(",", ":")).encode()
    fields = HEADER.pack(
        MAGIC, VERSION, frame.kind, 0, len(meta), len(frame.payload), zlib.crc32(frame.payload) if frame.payload else 0
    )
    return fields + CRC.pack(zlib.crc32(meta, zlib.crc32(fields))) + meta, frame.payload


def parse_head(data: bytes) -> Head:
    magic, version, kind, _, meta_size, payload_size, payload_crc = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"not a Paceline cluster connection: it begins with {bytes(magic)!r}")
    if version != VERSION:
        raise ProtocolError(f"the other side speaks version {version} of the protocol, this one {VERSION}: update both")
    if meta_size > MAX_META or payload_size > MAX_PAYLOAD:
        raise ProtocolError(f"a frame of {meta_size} + {payload_size} bytes is larger than any that is sent")
    try:
        known = Kind(kind)
    except ValueError:
        raise ProtocolError(f"frame of an unknown kind {kind}") from None
    (crc,) = CRC.unpack_from(data, HEADER.size)
    return Head(known, meta_size, payload_size, payload_crc, crc, data[: HEADER.size])


def parse_body(head: Head, meta: bytes, payload: bytes) -> Frame:
    if zlib.crc32(meta, zlib.crc32(head.raw)) != head.crc:
        raise ProtocolError("a frame's head was damaged on the way")
    try:
        values = json.loads(meta)
    except ValueError as error:
        raise ProtocolError(f"a frame's head is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ProtocolError("a frame's head is not a JSON object")
    return Frame(head.kind, values, payload, not payload or zlib.crc32(payload) == head.payload_crc)


def parse(data: bytes) -> Frame:
    """One whole frame."""
    if len(data) < HEAD_SIZE:
        raise ProtocolError(f"a frame has {HEAD_SIZE} bytes at least, got {len(data)}")
    head = parse_head(data)
    if len(data) != HEAD_SIZE + head.meta_size + head.payload_size:
        raise ProtocolError(f"a frame of another length than its head says: {len(data)}")
    return parse_body(head, data[HEAD_SIZE : HEAD_SIZE + head.meta_size], data[HEAD_SIZE + head.meta_size :])
