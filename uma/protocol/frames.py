"""Frames, `uint32_le length | JSON bytes`, decoded from a byte stream that is cut anywhere.

The length is checked as soon as the header is there, so a peer that announces 4 GiB costs no memory.
"""

from __future__ import annotations

from uma.errors import FrameTooLarge

HEADER_BYTES = 4
DEFAULT_MAX_FRAME_BYTES = 1_048_576

_COMPACT_ABOVE_BYTES = 65_536
"""Consumed bytes are removed from the buffer's front above this number: seldom, yet never many are kept."""


def encode_frame(payload: bytes) -> bytes:
    """`payload` with its header. Raises `FrameTooLarge` for a length that a header cannot state (0, or 4 GiB)."""
    if not 0 < len(payload) < 2**32:
        raise FrameTooLarge(f"a frame holds 1 to {2**32 - 1:,} bytes, not {len(payload):,}")
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


class FrameDecoder:
    """Bytes in, payloads out. Buffers at most one frame and the data that one `feed` added after it.

    After `FrameTooLarge` the boundaries of later frames are unknown, so every later call raises it again.
    """

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._read = 0
        self._poisoned: str | None = None

    def feed(self, data: bytes) -> None:
        """Take bytes from the peer, cut anywhere. Never raises."""
        if self._poisoned is None:
            self._buffer += data

    def next_frame(self) -> bytes | None:
        """The next whole payload, or None until more is fed. Raises `FrameTooLarge` for a length of 0 or over the
        maximum.
        """
        if self._poisoned is not None:
            raise FrameTooLarge(self._poisoned)
        start = self._read + HEADER_BYTES
        if len(self._buffer) < start:
            return None
        length = int.from_bytes(self._buffer[self._read : start], "little")
        if not 0 < length <= self.max_frame_bytes:
            self._poison(length)
        if len(self._buffer) < start + length:
            return None
        payload = bytes(self._buffer[start : start + length])
        self._consume(start + length)
        return payload

    @property
    def is_mid_frame(self) -> bool:
        """Whether a frame is incomplete. Only valid after `next_frame` gave None."""
        return self._poisoned is None and len(self._buffer) > self._read

    def _poison(self, length: int) -> None:
        self._poisoned = (
            "a frame of 0 bytes came; a frame holds one JSON object"
            if length == 0
            else f"a frame of {length:,} bytes came; at most {self.max_frame_bytes:,} are taken (max_frame_bytes)"
        )
        self._buffer.clear()
        self._read = 0
        raise FrameTooLarge(self._poisoned)

    def _consume(self, upto: int) -> None:
        if upto == len(self._buffer):
            self._buffer.clear()
            self._read = 0
        elif upto > _COMPACT_ABOVE_BYTES:
            del self._buffer[:upto]
            self._read = 0
        else:
            self._read = upto
