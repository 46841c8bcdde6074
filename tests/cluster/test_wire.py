"""Frames: what goes in comes out; what was damaged is noticed; what is not ours is refused with the reason."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.wire import HEAD_SIZE, MAX_PAYLOAD, VERSION, Frame, Kind, ProtocolError, encode, parse

FRAME = Frame(Kind.BLOCK, {"hash": "00ff", "i": 3}, bytes(range(256)))


def raw(frame: Frame = FRAME) -> bytes:
    return b"".join(encode(frame))


@pytest.mark.parametrize("kind", Kind)
def test_a_frame_comes_back_as_it_went(kind: Kind) -> None:
    frame = Frame(kind, {"a": [1, None, "ü"], "logprob": -0.1}, b"x" * 100)
    assert parse(raw(frame)) == frame
    assert parse(raw(Frame(kind))) == Frame(kind)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 8 * len(raw()) - 1))
def test_a_flipped_bit_is_noticed_wherever_it_is(bit: int) -> None:
    data = bytearray(raw())
    data[bit // 8] ^= 1 << bit % 8
    if bit // 8 >= len(data) - len(FRAME.payload):
        assert not parse(bytes(data)).is_intact
    else:
        with pytest.raises(ProtocolError):
            parse(bytes(data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(20), "not a Paceline cluster connection"),
        (raw()[:4] + bytes([VERSION + 1]) + raw()[5:], f"version {VERSION + 1} of the protocol, this one {VERSION}"),
        (raw()[:5] + bytes([99]) + raw()[6:], "unknown kind 99"),
        (raw()[:12] + struct.pack("!Q", MAX_PAYLOAD + 1) + raw()[20:], "larger than any"),
        (raw()[:10], f"{HEAD_SIZE} bytes at least"),
        (raw()[:-1], "another length"),
    ],
)
def test_what_is_not_a_frame_is_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        parse(data)
