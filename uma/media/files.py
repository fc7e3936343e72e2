"""What a picture's file says of itself, without decoding it: its form and its size. Pure."""

from __future__ import annotations

import base64
import binascii
import struct

from uma.errors import BadRequest

MAX_FILE_BYTES = 20 * 2**20
"""Longest file of a picture."""
MAX_PIXELS = 2**25
"""Maximum pixels of a picture: 8,192 x 4,096. Decoded they take 96 MiB."""
FORMS = ("PNG", "JPEG", "GIF", "BMP")
"""What is decoded; of an animated GIF the first picture."""

_OTHERS = (
    (b"RIFF", 8, b"WEBP", "WebP"),
    (b"RIFF", 8, b"WAVE", "a sound (WAV)"),
    (b"ID3", 0, b"ID3", "a sound (MP3)"),
    (b"fLaC", 0, b"fLaC", "a sound (FLAC)"),
    (b"%PDF", 0, b"%PDF", "PDF"),
    (b"", 4, b"ftyp", "a video, or HEIC"),
    (b"II*\0", 0, b"", "TIFF"),
    (b"MM\0*", 0, b"", "TIFF"),
)
"""Beginning, place of a second mark and that mark, and what such a file is."""
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's markers of segments that have the size."""


def file_of(text: str, field: str) -> bytes:
    """The file that base64 stands for. Raises `BadRequest`."""
    if len(text) > 4 * MAX_FILE_BYTES // 3 + 4:
        raise BadRequest(f"{field}: is over the limit of {MAX_FILE_BYTES:,} bytes for a picture's file")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(f"{field}: is no base64") from None


def check_file(data: bytes, field: str) -> None:
    """Raise `BadRequest` for what is none of `FORMS` by its first bytes, or says that it is too large."""
    form = form_of(data)
    if form not in FORMS:
        what = f"is {form}" if form else "is no picture that is known"
        raise BadRequest(f"{field}: {what}; send {', '.join(FORMS[:-1])} or {FORMS[-1]}")
    size = size_of(data)
    if size is None:
        raise BadRequest(f"{field}: this {form} is broken: it says no size")
    width, height = size
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise BadRequest(f"{field}: {width:,} x {height:,} pixels are not from 1 to {MAX_PIXELS:,} in all")


def form_of(data: bytes) -> str:
    """One of `FORMS`, words for another that is known, or empty."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"BM"):
        return "BMP"
    return next((what for first, at, mark, what in _OTHERS if data.startswith(first) and data.startswith(mark, at)), "")


def size_of(data: bytes) -> tuple[int, int] | None:
    """Width and height as the file says them; None where it is too short or broken."""
    try:
        match form_of(data):
            case "PNG":
                width, height = struct.unpack_from(">II", data, 16)
            case "GIF":
                width, height = struct.unpack_from("<HH", data, 6)
            case "BMP":
                is_old = struct.unpack_from("<I", data, 14)[0] == 12
                width, height = struct.unpack_from("<HH" if is_old else "<ii", data, 18)
            case "JPEG":
                return _jpeg_size(data)
            case _:
                return None
    except struct.error:
        return None
    return int(width), abs(int(height))


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    at = 2
    while True:
        mark, kind = struct.unpack_from("BB", data, at)
        if mark != 0xFF:
            return None
        if kind == 0xFF:  # may be repeated
            at += 1
        elif kind in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        else:
            at += 2 + max(2, struct.unpack_from(">H", data, at + 2)[0])
