"""Questions to a server as bare JSON, each in a session of its own: for proofs, which trust no class of this side."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from uma import posix
from uma.contracts.proofs import Question, ServerReply
from uma.errors import ConnectionLost
from uma.net.place import objection
from uma.protocol.converter import structure
from uma.protocol.frames import FrameDecoder, encode_frame
from uma.protocol.messages import HelloEvent
from uma.protocol.versions import SUPPORTED
from uma.protocol.wire import EVENTS
from uma.types import ServerInfo

ID = "proof"
MAX_REPLY_BYTES = 2**30
ENDS = EVENTS.keys() - {"hello", "loading", "prompt", "token", "reasoning", "tool_call"}
"""Events that end an answer."""


@attrs.frozen
class SocketProbe:
    """Asks the server on a Unix socket, and waits for each answer. `timeout_sec` bounds each event's wait."""

    path: Path
    timeout_sec: float = 120.0

    def introduce(self) -> ServerInfo:
        """What the server says of itself. Raises `ConnectionLost` where no server answers."""
        with self._session() as (_, hello):
            fields = {name: value for name, value in hello.items() if name != "event"}
            return structure(fields, HelloEvent).info

    def ask(self, question: Question) -> ServerReply:
        """All events of the answer. Raises `ConnectionLost` where the server goes away or stays silent."""
        with self._session() as (wire, _):
            wire.send({"id": ID, **question.fields})
            return ServerReply(tuple(self._events(wire, question)))

    def _events(self, wire: _Wire, question: Question) -> Iterator[dict[str, Any]]:
        tokens = 0
        while (event := wire.receive()) is not None:
            yield event
            tokens += event["event"] == "token"
            if event["event"] == "token" and tokens == question.cancel_after:
                wire.send({"event": "cancel", "id": ID})
            if event["event"] in ENDS:
                return

    @contextmanager
    def _session(self) -> Iterator[tuple[_Wire, dict[str, Any]]]:
        if (problem := objection(self.path)) is not None:
            raise ConnectionLost(problem)
        with posix.unix_socket() as sock:
            sock.settimeout(self.timeout_sec)
            try:
                sock.connect(str(self.path))
                wire = _Wire(sock)
                wire.send({"type": "hello", "versions": list(SUPPORTED), "client": "uma-contract"})
                hello = wire.receive()
                if hello is None or hello.get("event") != "hello":
                    raise ConnectionLost(f"{self.path}: what listens there does not greet as a UMA server: {hello}")
                yield wire, hello
            except TimeoutError:
                raise ConnectionLost(f"{self.path}: timeout: no answer within {self.timeout_sec:g} s") from None
            except OSError as error:
                raise ConnectionLost(f"{self.path}: {error.strerror}; start a server with `uma run`") from error


@attrs.define
class _Wire:
    """Frames of JSON on a blocking socket."""

    _sock: socket.socket
    _frames: FrameDecoder = attrs.field(factory=lambda: FrameDecoder(MAX_REPLY_BYTES))

    def send(self, fields: dict[str, Any]) -> None:
        self._sock.sendall(encode_frame(json.dumps(fields).encode()))

    def receive(self) -> dict[str, Any] | None:
        """The next event; None where the server has closed."""
        while (payload := self._frames.next_frame()) is None:
            data = self._sock.recv(65_536)
            if not data:
                return None
            self._frames.feed(data)
        event: dict[str, Any] = json.loads(payload)
        return event
