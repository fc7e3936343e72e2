"""Frames: any split of the bytes gives the same frames; no bytes give anything but frames or the one error."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma.errors import FrameTooLarge
from uma.protocol.frames import HEADER_BYTES, FrameDecoder, encode_frame

payloads = st.lists(st.binary(min_size=1, max_size=40), max_size=8)


def drain(decoder: FrameDecoder) -> list[bytes]:
    frames = []
    while (frame := decoder.next_frame()) is not None:
        frames.append(frame)
    return frames


@given(payloads, st.data())
def test_any_split_of_the_bytes_gives_the_same_frames(sent: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(encode_frame, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder = FrameDecoder(40)
    received = []
    for start, end in pairwise([0, *cuts, len(stream)]):
        decoder.feed(stream[start:end])
        received += drain(decoder)
    assert received == sent
    assert not decoder.is_mid_frame


@given(payloads.filter(bool), st.data())
def test_a_frame_that_has_not_all_come_is_told_as_half(sent: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(encode_frame, sent))
    cut = data.draw(st.integers(1, len(sent[-1]) + HEADER_BYTES - 1))
    decoder = FrameDecoder(40)
    decoder.feed(stream[:-cut])
    assert drain(decoder) == sent[:-1]
    assert decoder.is_mid_frame
    decoder.feed(stream[-cut:])
    assert drain(decoder) == sent[-1:]
    assert not decoder.is_mid_frame


@given(st.lists(st.binary(max_size=30), max_size=8))
def test_random_bytes_give_frames_or_the_one_error(chunks: list[bytes]) -> None:
    decoder = FrameDecoder(64)
    for chunk in chunks:
        decoder.feed(chunk)
        try:
            frames = drain(decoder)
        except FrameTooLarge:
            return
        assert all(0 < len(frame) <= 64 for frame in frames)


@pytest.mark.parametrize("length", [0, 65, 2**31, 2**32 - 1])
def test_a_length_of_0_or_over_the_cap_is_refused_from_the_header_alone(length: int) -> None:
    decoder = FrameDecoder(64)
    decoder.feed(length.to_bytes(4, "little"))
    with pytest.raises(FrameTooLarge, match=f"{length:,} bytes"):
        decoder.next_frame()


def test_a_length_of_4_gib_allocates_nothing() -> None:
    decoder = FrameDecoder(2**20)
    tracemalloc.start()
    try:
        decoder.feed(b"\xff\xff\xff\xff")
        with pytest.raises(FrameTooLarge):
            decoder.next_frame()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_the_cap_itself_is_allowed_and_one_more_is_not() -> None:
    decoder = FrameDecoder(64)
    decoder.feed(encode_frame(b"x" * 64) + encode_frame(b"x" * 65))
    assert decoder.next_frame() == b"x" * 64
    with pytest.raises(FrameTooLarge, match="at most 64"):
        decoder.next_frame()


def test_after_an_oversize_frame_nothing_is_read() -> None:
    decoder = FrameDecoder(64)
    decoder.feed(bytes(4))
    for _ in range(2):
        with pytest.raises(FrameTooLarge):
            decoder.next_frame()
        decoder.feed(encode_frame(b"{}") * 1000)
    assert not decoder.is_mid_frame


def test_frames_read_one_by_one_from_a_large_buffer_leave_none_behind() -> None:
    sent = [b"%d" % number * 300 for number in range(1000)]
    decoder = FrameDecoder(10_000)
    decoder.feed(b"".join(map(encode_frame, sent)))
    assert drain(decoder) == sent
    assert not decoder.is_mid_frame


def test_no_frame_is_empty() -> None:
    with pytest.raises(FrameTooLarge):
        encode_frame(b"")


def test_the_length_is_little_endian() -> None:
    assert encode_frame(b"ab" * 150) == b"\x2c\x01\x00\x00" + b"ab" * 150
