"""Recognises files of pictures and sounds without decoding them: format, and a picture's size. Pure."""

from __future__ import annotations

import base64
import binascii
import struct
from importlib.util import find_spec

from uma.errors import BadRequest
from uma.types import MAX_MEDIA, Request

MAX_FILE_BYTES = 20 * 2**20
"""Maximum size of a file of a picture or a sound."""
MAX_REQUEST_BYTES = 64 * 2**20
"""Maximum size of all files that one request names by URL or path."""
MAX_PIXELS = 2**25
"""Maximum pixels of a picture: 8,192 x 4,096. Decoded they take 96 MiB."""
PICTURES = ("PNG", "JPEG", "GIF", "BMP")
"""Formats of pictures that are decoded; of an animated GIF the first frame. WebP too, where Pillow is installed."""
SOUNDS = ("WAV", "MP3", "FLAC")
"""Formats of sounds that are decoded."""

_BLANKS = str.maketrans("", "", "\t\n\f\r ")
_MARKS = (
    (b"\x89PNG\r\n\x1a\n", 0, b"", "PNG"),
    (b"\xff\xd8\xff", 0, b"", "JPEG"),
    (b"GIF87a", 0, b"", "GIF"),
    (b"GIF89a", 0, b"", "GIF"),
    (b"BM", 0, b"", "BMP"),
    (b"RIFF", 8, b"WEBP", "WebP"),
    (b"RIFF", 8, b"WAVE", "WAV"),
    (b"ID3", 0, b"", "MP3"),
    (b"fLaC", 0, b"", "FLAC"),
    (b"OggS", 0, b"", "Ogg"),
    (b"\x1a\x45\xdf\xa3", 0, b"", "WebM"),
    (b"%PDF", 0, b"", "PDF"),
    (b"", 4, b"ftyp", "MP4 (a video, M4A or HEIC)"),
    (b"II*\0", 0, b"", "TIFF"),
    (b"MM\0*", 0, b"", "TIFF"),
)
"""Magic bytes at the beginning, place of a second mark, that mark, and the name of the format."""
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG markers of segments that state the size."""


def check_count(request: Request) -> None:
    """Raise `BadRequest` where a request has too many files. Called before any is fetched or read."""
    if (count := sum(1 for _ in request.placed_media())) > MAX_MEDIA:
        place = "messages" if request.prompt is None else "prompt"
        raise BadRequest.at(place, f"{count:,} pictures and sounds are over the limit of {MAX_MEDIA}")


def file_of(text: str, field: str) -> bytes:
    """The file that a base64 text encodes; white space and missing padding are accepted, as in WHATWG's data URLs.

    Raises `BadRequest`.
    """
    text = text.translate(_BLANKS)
    if len(text) > 4 * MAX_FILE_BYTES // 3 + 4:
        raise BadRequest.at(field, f"is over the limit of {MAX_FILE_BYTES:,} bytes for a file")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest.at(field, "is no base64") from None


def over_limit(field: str, left: int) -> BadRequest:
    """Error for a file over the limit for one file, or over the `left` bytes that the request's other files leave."""
    if left >= MAX_FILE_BYTES:
        return BadRequest.at(field, f"is over the limit of {MAX_FILE_BYTES:,} bytes for a file")
    return BadRequest.at(
        field,
        f"all files of a request by URLs and paths are over the limit of {MAX_REQUEST_BYTES:,} bytes; send "
        "fewer, or smaller ones",
    )


def check_file(data: bytes, field: str, *, sees: bool, hears: bool) -> str:
    """Name of a file's format. Raises `BadRequest` where the first bytes are of no format that the model takes, or
    state a picture that is too large.
    """
    form = form_of(data)
    taken = (PICTURES if sees else ()) + (SOUNDS if hears else ())
    if sees and form == "WebP":
        if find_spec("PIL") is None:
            raise BadRequest.at(field, "is WebP, which needs Pillow (pip install pillow); or send PNG or JPEG")
    elif form not in taken:
        what = f"is {form}" if form else "has an unrecognized format"
        if form in SOUNDS or form in PICTURES:
            what += f", and this model does not support {'audio' if form in SOUNDS else 'image'} input"
        raise BadRequest.at(field, f"{what}; send {', '.join(taken[:-1])} or {taken[-1]}")
    if form in SOUNDS:
        return form
    size = size_of(data)
    if size is None:
        raise BadRequest.at(field, f"this {form} is broken: it says no size")
    width, height = size
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise BadRequest.at(field, f"{width:,} x {height:,} pixels are not from 1 to {MAX_PIXELS:,} in all")
    return form


def form_of(data: bytes) -> str:
    """Name of a file's format by its first bytes; empty where it is unknown."""
    for first, at, mark, what in _MARKS:
        if data.startswith(first) and data.startswith(mark, at):
            return what
    # A frame of MPEG audio without a tag before it: eleven sync bits, and a layer other than AAC's.
    is_mp3 = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 0x06
    return "MP3" if is_mp3 else ""


def size_of(data: bytes) -> tuple[int, int] | None:
    """Width and height that the file states; None where it is too short or broken."""
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
            case "WebP":
                return _webp_size(data)
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


def _webp_size(data: bytes) -> tuple[int, int] | None:
    match data[12:16]:
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
        case b"VP8L":
            (bits,) = struct.unpack_from("<I", data, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X":
            low, high = struct.unpack_from("<IH", data, 24)
            return (low & 0xFFFFFF) + 1, (low >> 24 | high << 8) + 1
    return None
