"""The application asked from within its own process: a request's body in, the answer's out, no socket between."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import trio
from starlette.types import ASGIApp, Message

from uma.config import RuntimeConfig
from uma.http.app import build_app
from uma.http.exchange import ID, LINES
from uma.http.gateway import Gateway
from uma.jobs import Answer, Ask
from uma.net.throttle import ClientLines, Throttle
from uma.types import Source

BACKGROUND = b"-1"
"""The lane of a request that asks for none itself."""


def ask_of(source: Source, config: RuntimeConfig, program: str) -> Ask:
    """Asks `source` under the rules of HTTP; `program` is what its requests are listed under.

    Every request is in the background lane unless its body names another one. Refusals are answers and not logged.
    """
    inside = attrs.evolve(config, http="", http_keys="", http_tls_cert="", http_tls_key="")
    return _InMemory(build_app(Gateway.of(source, inside)), program.encode())


@attrs.frozen
class _InMemory:
    """See `ask_of`."""

    app: ASGIApp
    program: bytes

    async def __call__(self, path: str, body: bytes, id: str) -> Answer:
        """See `Ask`."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"content-length", str(len(body)).encode()),
                (b"content-type", b"application/json"),
                (b"user-agent", self.program),
                (b"x-uma-priority", BACKGROUND),
            ],
            "client": None,
            "server": None,
            "state": {LINES: _Unsaid(Throttle())},
            ID: id,
        }
        unread = [body]
        started: dict[str, Any] = {"status": 500, "headers": []}
        parts: list[bytes] = []

        async def receive() -> Message:
            if not unread:
                await trio.sleep_forever()  # the client stays
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.update(message)
            else:
                parts.append(message.get("body", b""))

        await self.app(scope, receive, send)
        headers = dict(started["headers"])
        wait = headers.get(b"retry-after-ms")
        return Answer(
            started["status"],
            b"".join(parts),
            headers.get(b"x-request-id", b"").decode(),
            None if wait is None else int(wait),
        )


class _Unsaid(ClientLines):
    """For requests whose refusals are told in results: a log would only repeat them."""

    def log(self, logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
        """Say nothing."""
