"""Files of pictures and sounds: told apart and bounded before they are decoded, in a process that can be lost."""

from __future__ import annotations

import base64
import os
import random
import signal
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from projectors import bmp, flac, float_wav, png, png_header, png_of, wav
from reference import llama_cpp

from uma import Message, Request
from uma.errors import BadRequest
from uma.llama.projector import Pixels, Samples
from uma.media import files
from uma.media.decoder import MediaDecoder
from uma.media.files import MAX_FILE_BYTES, MAX_PIXELS, check_file, file_of, form_of, size_of
from uma.server.own_files import with_own_files
from uma.types import MAX_MEDIA, Media

GIF = base64.b64decode("R0lGODlhAgADAIAAAP8AAAAA/yH5BAAAAAAALAAAAAACAAMAAAIDhG8FADs=")
"""Two pixels by three."""
FUZZED = int(os.environ.get("UMA_FUZZED_FILES", "200"))


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    decoder = MediaDecoder(sees=True, hears=True)
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


def test_a_jpeg_of_llama_cpp_s_is_told_and_decoded(decoder: MediaDecoder) -> None:
    data = llama_file("test-1.jpeg")
    width, height = size_of(data) or (0, 0)
    found = decoder.decode(data, "a", "picture")
    assert isinstance(found, Pixels)
    assert (found.width, found.height) == (width, height)
    assert found.data is not None
    assert len(found.data) == 3 * width * height


def test_pixels_come_back_as_they_were(decoder: MediaDecoder) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (300, 401, 3), np.uint8)
    assert decoder.decode(png_of(pixels), "a", "picture") == Pixels("a", 401, 300, pixels.tobytes())


def webp(pixels: npt.NDArray[np.uint8], **how: Any) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", **how)
    return file.getvalue()


def test_webp_is_decoded_where_pillow_is(decoder: MediaDecoder) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 41, 3), np.uint8)
    more = [Image.fromarray(255 - pixels)]
    lossy, animated = webp(pixels), webp(pixels, lossless=True, save_all=True, append_images=more)
    for file in (lossy, webp(pixels, lossless=True), animated):
        assert (form_of(file), size_of(file)) == ("WebP", (41, 30))
    assert decoder.decode(animated, "a", "picture") == Pixels("a", 41, 30, pixels.tobytes())
    found = decoder.decode(lossy, "a", "picture")
    assert isinstance(found, Pixels)
    assert found.data == Image.open(BytesIO(lossy)).convert("RGB").tobytes()
    with pytest.raises(BadRequest, match="picture: cannot be decoded"):
        decoder.decode(lossy[:60], "a", "picture")


def test_webp_without_pillow_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "find_spec", lambda _: None)
    with pytest.raises(BadRequest, match=r"is WebP, which needs Pillow .pip install pillow.; or send PNG or JPEG"):
        check_file(webp(np.zeros((2, 2, 3), np.uint8)), "picture", sees=True, hears=False)


def test_sounds_come_at_the_rate_that_models_hear_at(decoder: MediaDecoder) -> None:
    samples = (3_000 * np.sin(np.arange(10_000) / 5)).astype(np.int16)
    expected = Samples("a", 10_000, (samples / np.float32(2**15)).astype(np.float32).tobytes())
    assert decoder.decode(flac(samples), "a", "sound") == expected
    assert expected.data is not None
    assert decoder.decode(float_wav(np.frombuffer(expected.data, np.float32)), "a", "sound") == expected
    for data, seconds in ((wav(0.5), 0.5), (llama_file("test-2.mp3"), 17.44)):
        found = decoder.decode(data, "a", "sound")
        assert isinstance(found, Samples)
        assert found.count == pytest.approx(seconds * 16_000, rel=0.001)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (float_wav(np.zeros(1, np.float32)), "a sound of 6.25e-05 s; from 0.1 to 1,500 s can be read"),
        (float_wav(np.zeros(160_000, np.float32), rate=100), "is larger than 33,554,432 pixels or 1,500 s"),
        (float_wav(np.full(9_000, np.nan, np.float32)), "samples that are no sound"),
        (float_wav(np.array([0.1, np.inf] * 9_000, np.float32)), "samples that are no sound"),
        (float_wav(np.full(9_000, 1e30, np.float32)), "samples that are no sound"),
        (b"RIFF\xff\xff\xff\xffWAVEfmt ", "cannot be decoded"),
        (b"ID3" + bytes(64), "cannot be decoded"),
    ],
    ids=["short", "long", "nan", "inf", "loud", "cut", "empty"],
)
def test_what_is_no_sound_or_too_long_is_refused(decoder: MediaDecoder, data: bytes, problem: str) -> None:
    with pytest.raises(BadRequest, match=f"sound: .*{problem}"):
        decoder.decode(data, "a", "sound")


def llama_file(name: str) -> bytes:
    return (llama_cpp() / "tools" / "mtmd" / name).read_bytes()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "has an unrecognized format; send PNG, JPEG, GIF or BMP"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "this WebP is broken"),
        (b"fLaC\0", r"is FLAC, and this model does not support audio input; send PNG"),
        (b"\xff\xfb\x90\0", "is MP3, and this model does not support audio input"),
        (b"\xff\xf1\x90\0", "has an unrecognized format"),
        (b"OggS\0", "is Ogg"),
        (b"%PDF-1.7", "is PDF"),
        (b"\0\0\0\x18ftypheic", "is MP4 "),
        (png(9, 9)[:20], "PNG is broken: it says no size"),
        (png_header(0, 9), "0 x 9 pixels"),
        (png_header(2**31 - 1, 2), f"are not from 1 to {MAX_PIXELS:,}"),
        (b"\xff\xd8\xff" + b"\xe0\0\2\xff" * 9, "JPEG is broken"),
    ],
)
def test_what_is_no_picture_is_refused_without_decoding(data: bytes, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        check_file(data, "picture", sees=True, hears=False)


def test_a_model_that_only_hears_says_what_it_takes() -> None:
    assert check_file(wav(0.1), "sound", sees=False, hears=True) == "WAV"
    with pytest.raises(BadRequest, match="is PNG, and this model does not support image input; send WAV, MP3 or FLAC"):
        check_file(png(9, 9), "sound", sees=False, hears=True)


def test_base64_is_read_in_lines_and_without_padding_and_within_bounds() -> None:
    text = base64.b64encode(GIF).decode()
    for spelling in (text, text.rstrip("="), f"\n{text[:9]}\r\n{text[9:17]} \t{text[17:]}\f"):
        assert file_of(spelling, "picture") == GIF
    for wrong in ("a", "AAAA=A==", "AA-_", "====", "äöü=", "data:image/png;base64,AAAA"):
        with pytest.raises(BadRequest, match="picture: is no base64"):
            file_of(wrong, "picture")
    with pytest.raises(BadRequest, match="over the limit"):
        file_of("A" * (2 * MAX_FILE_BYTES), "picture")


def test_files_are_counted_before_any_is_read() -> None:
    one = Media(path="/nowhere")
    for count, told in ((MAX_MEDIA, "path: is no file"), (MAX_MEDIA + 1, "messages: 65 pictures and sounds are over")):
        messages = tuple(Message("user", "What?", media=(one,)) for _ in range(count))
        with pytest.raises(BadRequest, match=told):
            with_own_files(Request("a", messages=messages), 0)


def test_hostile_files_end_as_errors_or_as_pictures(decoder: MediaDecoder) -> None:
    """A file is broken in some place; what has no limits of its own is held by the child's. `UMA_FUZZED_FILES` says how
    many (200).
    """
    chance = random.Random(FUZZED)
    whole = [png(64, 48, 1), bmp(33, 20), GIF, png_header(5_000, 6_000), llama_file("test-1.jpeg")[:20_000]]
    whole += [webp(np.zeros((30, 20, 3), np.uint8)), wav(0.2), flac(np.arange(9_000, dtype=np.int16))]
    whole.append(llama_file("test-2.mp3")[:9_000])
    refused = 0
    for _ in range(FUZZED):
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
            size = 3 * found.width * found.height if isinstance(found, Pixels) else 4 * found.count
            assert len(found.data) == size
    assert FUZZED // 4 < refused < FUZZED
    assert decoder.decode(GIF, "a", "picture") == Pixels("a", 2, 3, ANY)


@pytest.mark.skipif(sys.platform != "linux", reason="the child is found in /proc")
def test_a_child_that_has_died_is_one_picture_s_error(decoder: MediaDecoder) -> None:
    decoder.decode(GIF, "a", "picture")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if b"media_process" in command and int(parent) == os.getpid():
            os.kill(int(process.name), signal.SIGKILL)
    with pytest.raises(BadRequest, match="the process that tried has ended"):
        decoder.decode(GIF, "a", "picture")
    assert decoder.decode(GIF, "a", "picture") == Pixels("a", 2, 3, ANY)
