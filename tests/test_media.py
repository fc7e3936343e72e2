"""Pictures' files: told apart and bounded before they are decoded, in a process that can be lost."""

from __future__ import annotations

import base64
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from projectors import bmp, png, png_header, png_of
from reference import llama_cpp

from uma.errors import BadRequest
from uma.media.decoder import PictureDecoder
from uma.media.files import MAX_FILE_BYTES, MAX_PIXELS, check_file, file_of, form_of, size_of

GIF = base64.b64decode("R0lGODlhAgADAIAAAP8AAAAA/yH5BAAAAAAALAAAAAACAAMAAAIDhG8FADs=")
"""Two pixels by three."""


@pytest.fixture(scope="module")
def decoder() -> Iterator[PictureDecoder]:
    decoder = PictureDecoder()
    yield decoder
    decoder.close()


def test_forms_and_sizes_are_told_by_the_first_bytes() -> None:
    assert (form_of(png(40, 30)), size_of(png(40, 30))) == ("PNG", (40, 30))
    assert (form_of(bmp(31, 17)), size_of(bmp(31, 17))) == ("BMP", (31, 17))
    assert (form_of(GIF), size_of(GIF)) == ("GIF", (2, 3))
    jpeg = b"\xff\xd8\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0\xff\xff\xc2\0\x11\x08\0\x21\0\x2c\3"
    assert (form_of(jpeg), size_of(jpeg)) == ("JPEG", (44, 33))
    for end in range(len(jpeg) - 3):
        assert size_of(jpeg[:end]) is None


def test_a_jpeg_of_llama_cpp_s_is_told_and_decoded(decoder: PictureDecoder) -> None:
    data = (llama_cpp() / "tools" / "mtmd" / "test-1.jpeg").read_bytes()
    width, height = size_of(data) or (0, 0)
    found = decoder.decode(data, "a", "picture")
    assert (found.width, found.height) == (width, height)
    assert found.data is not None
    assert len(found.data) == 3 * width * height


def test_pixels_come_back_as_they_were(decoder: PictureDecoder) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (300, 401, 3), np.uint8)
    found = decoder.decode(png_of(pixels), "a", "picture")
    assert (found.id, found.width, found.height, found.data) == ("a", 401, 300, pixels.tobytes())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is no picture that is known"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "is WebP; send PNG, JPEG, GIF or BMP"),
        (b"fLaC\0", r"is a sound \(FLAC\)"),
        (b"%PDF-1.7", "is PDF"),
        (b"\0\0\0\x18ftypheic", "is a video, or HEIC"),
        (png(9, 9)[:20], "PNG is broken: it says no size"),
        (png_header(0, 9), "0 x 9 pixels"),
        (png_header(2**31 - 1, 2), f"are not from 1 to {MAX_PIXELS:,}"),
        (b"\xff\xd8\xff" + b"\xe0\0\2\xff" * 9, "JPEG is broken"),
    ],
)
def test_what_is_no_picture_is_refused_without_decoding(data: bytes, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        check_file(data, "picture")


def test_base64_is_read_strictly_and_within_bounds() -> None:
    assert file_of(base64.b64encode(GIF).decode(), "picture") == GIF
    for wrong in ("a", "====", "äöü=", "data:image/png;base64,AAAA"):
        with pytest.raises(BadRequest, match="picture: is no base64"):
            file_of(wrong, "picture")
    with pytest.raises(BadRequest, match="over the limit"):
        file_of("A" * (2 * MAX_FILE_BYTES), "picture")


def test_hostile_files_end_as_errors_or_as_pictures(decoder: PictureDecoder) -> None:
    """A file is broken in some place; what has no limits of its own is held by the child's."""
    chance = random.Random(0)
    whole = [png(64, 48, 1), bmp(33, 20), GIF, png_header(5_000, 6_000)]
    refused = 0
    for _ in range(200):
        data = bytearray(chance.choice(whole))
        for _ in range(chance.randrange(1, 6)):
            match chance.randrange(3):
                case 0:
                    data[chance.randrange(len(data))] = chance.randrange(256)
                case 1:
                    del data[chance.randrange(len(data)) :]
                case _:
                    at = chance.randrange(len(data) + 1)
                    data[at:at] = chance.randbytes(chance.randrange(1, 9))
            data = data or bytearray(b"\0")
        try:
            found = decoder.decode(bytes(data), "a", "picture")
        except BadRequest as error:
            refused += 1
            assert error.message.startswith("picture: ")
        else:
            assert found.data is not None
            assert len(found.data) == 3 * found.width * found.height
    assert 50 < refused < 200
    assert decoder.decode(GIF, "a", "picture").width == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the child is found in /proc")
def test_a_child_that_has_died_is_one_picture_s_error(decoder: PictureDecoder) -> None:
    decoder.decode(GIF, "a", "picture")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if b"picture_process" in command and int(parent) == os.getpid():
            os.kill(int(process.name), signal.SIGKILL)
    with pytest.raises(BadRequest, match="the process that tried has ended"):
        decoder.decode(GIF, "a", "picture")
    assert decoder.decode(GIF, "a", "picture").height == 3
