"""Proofs of claims about pictures and sounds."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from uma.contracts.proofs import NOT_SHOWN, TOKENS, TRIES, Claim, Proof, Question, answered, demand, refused
from uma.types import ServerInfo

ASKED = "What is this?"
SIDE = 64
"""Width and height of a test picture in pixels."""
RATE = 8_000
"""Sample rate of the test sound."""
SECONDS = 0.5
"""Length of the test sound."""
_PLACE = "messages[0]"
"""Part of a field's path that every refusal names, on the socket as over HTTP."""
_NOWHERE = "http://127.0.0.1:9/picture.png"
"""A URL that no server may fetch."""


def about_media(info: ServerInfo) -> Iterator[Claim]:
    """Claims about pictures and sounds."""
    able = info.capabilities
    for name, make in (("vision", _picture), ("audio", _sound)):
        if getattr(able, name):
            yield Claim(name, "yes", partial(_perceives, make))
        else:
            yield Claim(name, "no", partial(refused, _asked({"data": make(0)}), _PLACE))
    fetches = able.media_urls
    yield Claim("media_urls", "yes" if fetches else "no", partial(_fetches_nothing_near, fetches))


def _asked(media: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "user", "content": ASKED, "media": [media]}
    return {"messages": [message], "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}


def _fetches_nothing_near(fetches: bool) -> Proof:
    """Prove that a URL of the server's own machine is refused, whether or not the server fetches URLs."""
    seen = yield from refused(_asked({"url": _NOWHERE}), _PLACE)
    demand(not fetches or "fetches nothing" not in seen, seen)
    return seen


def _perceives(make: Callable[[int], str]) -> Proof:
    """Prove that a file adds tokens to the prompt, and that another file of the same size gets another answer."""
    plain = {**_asked({}), "messages": [{"role": "user", "content": ASKED}], "max_tokens": 1}
    without = answered((yield Question(plain))).last["usage"]["prompt_tokens"]
    first = answered((yield Question(_asked({"data": make(0)}))))
    taken = first.last["usage"]["prompt_tokens"] - without
    demand(taken > 0, f"a prompt of {without + taken} tokens, and of {without} without the file")
    for number in range(1, TRIES):
        if answered((yield Question(_asked({"data": make(number)})))).text != first.text:
            return f"{taken} tokens, and another answer about another file"
    return f"{taken} tokens; {NOT_SHOWN}: the same answer about {TRIES} files"


def _picture(number: int) -> str:
    """A striped BMP picture as base64."""
    steps = (number + 1, 3 * number + 2, 5 * number + 3)
    rows = bytes(step * (x + 2 * y) % 256 for y in range(SIDE) for x in range(SIDE) for step in steps)
    head = struct.pack("<2sIHHI", b"BM", 54 + len(rows), 0, 0, 54)
    info = struct.pack("<IiiHHIIiiII", 40, SIDE, SIDE, 1, 24, 0, len(rows), 0, 0, 0, 0)
    return base64.b64encode(head + info + rows).decode()


def _sound(number: int) -> str:
    """A WAV file of a tone as base64."""
    period = 16 + 8 * number
    samples = b"".join(
        struct.pack("<h", 8_000 if at % period < period // 2 else -8_000) for at in range(int(RATE * SECONDS))
    )
    form = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    parts = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(samples)) + samples
    return base64.b64encode(b"RIFF" + struct.pack("<I", 4 + len(parts)) + b"WAVE" + parts).decode()
