"""Frames: any message and buffers, cut into any pieces, come back; nothing else gets through."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem._wire.frames import (
    ALIGNMENT,
    INPUT_BYTES,
    KINDS,
    REPLY,
    Frame,
    FrameParser,
    Limits,
    Placing,
    encode_frame,
)
from stratagem.errors import ProtocolError


def feed(parser: FrameParser, data: bytes, piece: int) -> list[Frame]:
    """Gives the parser the bytes, at most `piece` at a time, as a socket would."""
    found = []
    position = 0
    while position < len(data):
        space = parser.space()
        assert len(space) > 0
        count = min(piece, len(space), len(data) - position)
        space[:count] = data[position : position + count]
        parser.advance(count)
        position += count
        while (frame := parser.next_frame()) is not None:
            found.append(frame)
    return found


Frames = st.lists(
    st.tuples(
        st.sampled_from(sorted(KINDS)),
        st.integers(0, 2**32 - 1),
        st.binary(max_size=300),
        st.lists(st.binary(max_size=200), max_size=4),
    ),
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(Frames, st.integers(1, 400))
def test_frames_come_back_however_the_stream_is_cut(
    sent: list[tuple[int, int, bytes, list[bytes]]], piece: int
) -> None:
    """Kind, call, message and every buffer survive any cut of the stream."""
    data = b"".join(b"".join(encode_frame(*one)) for one in sent)
    parser = FrameParser()
    found = feed(parser, data, piece)
    back = [
        (one.kind, one.call, one.data, [bytes(one.buffer(i)) for i in range(len(one.spans))])
        for one in found
    ]
    assert back == sent
    assert parser.is_between_frames


@pytest.mark.parametrize("size", [INPUT_BYTES - 1, INPUT_BYTES, INPUT_BYTES * 3 + 5])
def test_large_messages_and_buffers_come_back(size: int) -> None:
    """Sizes around and beyond the input buffer, followed by a small frame."""
    message = bytes(range(256)) * (size // 256)
    data = b"".join(encode_frame(1, 7, message, [message, b"", message[:9]]))
    data += b"".join(encode_frame(4, 0, b"next", []))
    for piece in (1000, 1 << 20):
        first, second = feed(FrameParser(), data, piece)
        assert first.data == message
        assert [bytes(first.buffer(i)) for i in range(3)] == [message, b"", message[:9]]
        assert second.data == b"next"


def test_buffers_are_aligned_and_writable() -> None:
    """Tensors of every dtype can be made over received buffers without a copy."""
    import torch

    data = b"".join(encode_frame(1, 7, b"m", [b"x" * 3, b"y" * 16]))
    (frame,) = feed(FrameParser(), data, 1 << 20)
    tensor = torch.frombuffer(frame.buffer(1), dtype=torch.float64)
    assert tensor.data_ptr() % ALIGNMENT == 0
    tensor.fill_(1.0)
    assert bytes(frame.buffer(0)) == b"xxx"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak this protocol"),
        (struct.pack("<2sBBIII", b"SG", 9, 0, 1, 0, 0), "does not speak this protocol"),
        (struct.pack("<2sBBIII", b"SG", 1, 0, 1, 2000, 0), "message of 2000 bytes"),
        (struct.pack("<2sBBIII", b"SG", 1, 0, 1, 0, 2**31), "2147483648 buffers"),
        (struct.pack("<2sBBIIIQ", b"SG", 1, 0, 1, 0, 1, 2**62), "bytes of buffers; the limit"),
        (struct.pack("<2sBBIIIQQ", b"SG", 1, 0, 1, 0, 2, 2**64 - 1, 2**64 - 1), "the limit"),
    ],
)
def test_damaged_and_oversized_frames_are_refused_before_memory_is_allocated(
    data: bytes, words: str
) -> None:
    """The announcement alone is enough to refuse it."""
    parser = FrameParser(Limits(message_bytes=1000, frame_bytes=1 << 20))
    with pytest.raises(ProtocolError, match=words):
        feed(parser, data, 1 << 20)


def test_a_buffer_that_is_not_there_is_an_error() -> None:
    """A message may name any number; only those of its frame exist."""
    (frame,) = feed(FrameParser(), b"".join(encode_frame(1, 7, b"m", [b"x"])), 100)
    for index in (-1, 1, 2**40):
        with pytest.raises(ProtocolError, match="names buffer"):
            frame.buffer(index)


def test_memory_is_used_again_for_the_same_size_once_its_frame_is_done() -> None:
    """An area is overwritten only after its receiver has said that nothing uses it."""
    parser = FrameParser()

    def receive(*buffers: bytes) -> Frame:
        (found,) = feed(parser, b"".join(encode_frame(1, 1, b"", buffers)), 1 << 20)
        return found

    first = receive(b"a" * 100, b"b")
    second = receive(b"c" * 100, b"d")
    assert (bytes(first.buffer(0)), bytes(second.buffer(0))) == (b"a" * 100, b"c" * 100)
    second.is_done = True
    third = receive(b"e" * 100, b"f")
    assert third.area is second.area
    assert [bytes(third.buffer(index)) for index in (0, 1)] == [b"e" * 100, b"f"]
    third.is_done = True
    assert receive(b"g" * 300).area is not third.area
    assert bytes(third.buffer(0)) == b"e" * 100


@pytest.mark.parametrize("piece", [1 << 20, 70_000, 4099])
def test_large_buffers_of_a_reply_are_received_where_its_caller_wants_them(piece: int) -> None:
    """Also between other frames, with padding, with an empty buffer, and with one that has no place."""
    sent = [bytes([65 + number]) * length for number, length in enumerate((300_001, 0, 90_000, 7))]
    places = [bytearray(len(one)) for one in sent]
    wanted = [None if n == 2 else memoryview(one) for n, one in enumerate(places)]
    parser = FrameParser()
    parser.places[7] = lambda message: Placing(wanted, message)
    other = b"".join(encode_frame(REPLY, 8, b"other", [b"x" * 300_000]))
    reply = b"".join(encode_frame(REPLY, 7, b"reply", sent))
    frames = feed(parser, other + reply + other, piece)
    assert [one.data for one in frames] == [b"other", b"reply", b"other"]
    assert [bytes(frames[1].buffer(index)) for index in range(4)] == sent
    assert frames[1].buffer(0) is wanted[0]
    assert [bytes(one) for n, one in enumerate(places) if n != 2] == [sent[0], sent[1], sent[3]]
    assert bytes(places[2]) == bytes(90_000)
    assert [bytes(one.buffer(0)) for one in (frames[0], frames[2])] == [b"x" * 300_000] * 2
    assert parser.is_between_frames


@pytest.mark.parametrize("places", [[], [bytearray(299_999)], [bytearray(300_000)] * 2])
def test_places_that_do_not_fit_are_not_used(places: list[bytearray]) -> None:
    parser = FrameParser()
    parser.places[7] = lambda message: Placing([memoryview(one) for one in places], message)
    (frame,) = feed(parser, b"".join(encode_frame(REPLY, 7, b"", [b"a" * 300_000])), 1 << 20)
    assert bytes(frame.buffer(0)) == b"a" * 300_000
    assert not any(any(one) for one in places)
