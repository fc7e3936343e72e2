"""Processes that send a server frames which are legal, illegal, too many, cut in half, or never answered for.

Frames are made in advance and sent by the hundred, so that the server and not this program is what computes.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import attrs

BLOB_FRAMES, BLOBS = 400, 24
"""Frames that are sent at once, and different ones there are of those."""
HELLO = {"type": "hello", "versions": ["1.1", "1.0"], "client": "fuzz/1"}
PATIENCE_SEC = 10.0


@attrs.define
class Budget:
    """How much is still to be sent, by all attackers together."""

    sent: Synchronized[int]
    frames: int
    until: float
    """In seconds of `time.time`, which processes share."""

    @property
    def is_spent(self) -> bool:
        """Whether it is over."""
        return self.sent.value >= self.frames or time.time() > self.until

    def count(self, frames: int) -> None:
        """Note frames that the server has been given."""
        with self.sent.get_lock():
            self.sent.value += frames


def attack(name: str, path: Path, seed: int, budget: Budget) -> None:
    """One process: attack in one way until the budget is spent. Whatever the server does to a session is fine."""
    rng = random.Random(f"{seed} {name}")
    way = ATTACKERS[name]
    # Numbers, so that the frames are the same in every run, whatever the server has answered meanwhile.
    material = Material(rng)
    while not budget.is_spent:
        with suppress(OSError):
            way(path, material, budget)


def _frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def _framed(message: Any) -> bytes:
    return _frame(json.dumps(message).encode())


STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**32 + 1, 2**63, 2**64, -(2**63), 0.5, 1e-38, 1e308, -0.0),
    *("", "\0", "é", "x" * 2_000, "\u2028", "-1", [], [[]], {}, {"a": 1}, [None], ["x"] * 20, [0] * 300),
    *([{"role": "user", "content": "hi"}], [{"role": "user"}], {"x": {"x": {"x": {}}}}, [1, "1", 1.5, None]),
)
FIELDS = (
    *("id", "prompt", "messages", "token_ids", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "stop", "ignore_eos", "stream"),
    *("priority", "slo", "metadata", "keep_alive", "n", "logprobs", "grammar", "type", "event", "probe", "strange"),
    *("texts", "query", "documents", "dimensions", "encoding", "tools", "tool_choice", "reasoning", "echo", "best_of"),
    *("logit_bias", "prompt_logprobs", "mirostat", "dry_multiplier", "xtc_probability", "pace"),
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
LEGAL: tuple[dict[str, Any], ...] = (
    {"id": "g", "prompt": "Once", "max_tokens": 4},
    {"id": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 1, "seed": 7},
    {"id": "t", "token_ids": [1, 2, 3], "max_tokens": 3, "stop": ["e", "th"], "metadata": {"a": [1, 2]}},
    {"id": "b", "prompt": "x" * 300, "max_tokens": 1, "priority": -1, "stream": False},
    {"type": "tokenize", "id": "k", "prompt": "some words"},
    {"type": "health", "id": "h", "probe": False},
    {"type": "health"},
    {"type": "metrics", "id": "q"},
    {"type": "activity", "id": "a"},
    {"type": "embed", "id": "e", "texts": ["a fox", "a forest"], "dimensions": 8},
    {"type": "rerank", "id": "r", "query": "a fox", "documents": ["one", "two"]},
    {"id": "j", "prompt": "{", "max_tokens": 16, "grammar": {"json_schema": SCHEMA}, "temperature": 1},
    {"id": "x", "prompt": "a", "max_tokens": 4, "grammar": {"regex": "[a-z]+"}, "logit_bias": {"7": -100}},
    {"id": "n", "prompt": "Twice", "max_tokens": 3, "n": 2, "logprobs": 3, "echo": True, "temperature": 1},
    {"id": "c", "messages": [{"role": "user", "content": "Look"}], "tools": [TOOL], "tool_choice": "required"},
    {"event": "answer", "id": "g"},
    {"event": "cancel", "id": "g"},
    {"event": "cancel", "id": "m"},
)


class Material:
    """What one attacker sends, made once."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.cheap = [_framed({"event": "cancel", "id": f"gone{number}"}) for number in range(50)]
        self.cheap += [_framed({"event": "cancel", "id": each}) for each in STRANGE[:20] if each]
        self.strange = [_framed(self._mutant()) for _ in range(2_000)]
        self.legal = [_framed(each) for each in LEGAL]
        self.blobs = [self._blob() for _ in range(BLOBS)]

    def _mutant(self) -> dict[str, Any]:
        message = dict(self.rng.choice(LEGAL))
        for _ in range(self.rng.randint(1, 3)):
            message[self.rng.choice(FIELDS)] = self.rng.choice(STRANGE)
        return message

    def _blob(self) -> bytes:
        """Frames that keep a session open: most cost the server little, the others whatever there is."""
        kinds = self.rng.choices((self.cheap, self.strange, self.legal), weights=(96, 3.6, 0.4), k=BLOB_FRAMES)
        return b"".join(map(self.rng.choice, kinds))

    def broken(self) -> bytes:
        """Bytes that end a session, or begin what never ends."""
        rng = self.rng
        good = rng.choice(self.legal)
        match rng.randrange(7):
            case 0:
                return rng.randbytes(rng.randint(1, 2_000))
            case 1:
                return struct.pack("<I", rng.choice((0, 2**23 + 1, 2**31, 2**32 - 1)))
            case 2:
                return good[: rng.randint(1, len(good) - 1)]
            case 3:
                flipped = bytearray(good)
                flipped[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
                return bytes(flipped)
            case 4:
                return _frame(b"[" * rng.randint(1, 100_000))
            case 5:
                return _frame(
                    rng.choice((b"null", b"[]", b'"x"', b"1e999", b'{"a":', b"\xff\xfe", b'{"id":"\\ud800"}'))
                )
            case _:
                return _framed({"id": "large", "prompt": "x", "metadata": {"a": [[]] * rng.randint(1, 200_000)}})


def _connected(path: Path, *, hello: bool = True) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(PATIENCE_SEC)
    sock.connect(str(path))
    if hello:
        sock.sendall(_framed(HELLO))
    return sock


def flood(path: Path, material: Material, budget: Budget) -> None:
    """As many frames as the server takes, with all answers read."""
    with _connected(path) as sock:
        reader = threading.Thread(target=_read_all, args=(sock,), daemon=True)
        reader.start()
        while not budget.is_spent:
            sock.sendall(material.rng.choice(material.blobs))
            budget.count(BLOB_FRAMES)


def _read_all(sock: socket.socket) -> None:
    with suppress(OSError, ValueError):
        while sock.recv(2**20):
            pass


def break_frames(path: Path, material: Material, budget: Budget) -> None:
    """Good frames, then bad bytes; the answers are read to the end, or not."""
    with _connected(path, hello=material.rng.random() < 0.7) as sock:
        frames = material.rng.choices(material.legal + material.strange, k=material.rng.randint(0, 5))
        sock.sendall(b"".join(frames) + material.broken())
        budget.count(len(frames) + 1)
        if material.rng.random() < 0.5:
            sock.shutdown(socket.SHUT_WR)
            _read_all(sock)


def hang_up(path: Path, material: Material, budget: Budget) -> None:
    """Requests that are cancelled, or left, at any moment of their life."""
    rng = material.rng
    with _connected(path) as sock:
        ids = [f"r{number}" for number in range(rng.randint(1, 20))]
        asked = [{"id": id, "prompt": "y" * rng.randint(1, 3_000), "max_tokens": 64, "priority": -1} for id in ids]
        cancels = [{"event": "cancel", "id": id} for id in ids if rng.random() < 0.5]
        sock.sendall(b"".join(map(_framed, asked)))
        for _ in range(rng.randint(0, 5)):
            sock.recv(rng.choice((1, 100, 65_536)))
        sock.sendall(b"".join(map(_framed, cancels)))
        budget.count(len(asked) + len(cancels))


def read_slowly(path: Path, material: Material, budget: Budget) -> None:
    """Requests whose bulky answers are read a few bytes at a time, or not at all, until the server hangs up."""
    rng = material.rng
    with _connected(path) as sock:
        asked = [{"id": f"s{n}", "prompt": "z", "max_tokens": 64, "metadata": {"pad": "x" * 8_000}} for n in range(8)]
        sock.sendall(b"".join(map(_framed, asked)))
        budget.count(len(asked))
        for _ in range(rng.randint(0, 200)):
            if budget.is_spent or not sock.recv(rng.randint(1, 500)):
                return
            time.sleep(0.01)  # that is what slow means


def dribble(path: Path, material: Material, budget: Budget) -> None:
    """Frames in pieces of a few bytes."""
    with _connected(path) as sock:
        sock.settimeout(PATIENCE_SEC)
        data = b"".join(material.rng.choices(material.legal + material.strange, k=20))
        for piece in _pieces(data, material.rng):
            sock.sendall(piece)
        budget.count(20)
        _read_some(sock)


def _pieces(data: bytes, rng: random.Random) -> Iterator[bytes]:
    while data:
        size = rng.choice((1, 2, 3, 5, 50))
        yield data[:size]
        data = data[size:]


def _read_some(sock: socket.socket) -> None:
    sock.setblocking(False)
    with suppress(OSError):
        while sock.recv(2**20):
            pass


ATTACKERS: dict[str, Callable[[Path, Material, Budget], None]] = {
    "flood": flood,
    "flood too": flood,
    "break frames": break_frames,
    "hang up": hang_up,
    "read slowly": read_slowly,
    "dribble": dribble,
}
