"""The application asked from within its own process: a request's body in, the answer's out, no socket between."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import attrs
import trio
from starlette.types import ASGIApp, Message

from uma.errors import UmaError
from uma.http.exchange import ACCOUNT, ID, LINES
from uma.jobs import Progress, RowAnswer, RowAsk
from uma.net.quota import ClientAccount
from uma.net.throttle import ClientLines, Throttle
from uma.types import Models, Source

BACKGROUND = b"-1"
"""The lane of a request that asks for none itself."""


@attrs.frozen
class InMemory(RowAsk):
    """A `RowAsk` of an application over HTTP.

    Every request is in the background lane unless its body names another one. Refusals are answers and not logged.
    """

    app: ASGIApp
    program: str
    """What its requests are listed under."""
    source: Source
    """That of the application."""
    account: ClientAccount | None = None
    """Whose bounds hold for them."""

    async def __call__(self, path: str, body: bytes, id: str) -> RowAnswer:
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
                (b"user-agent", self.program.encode()),
                (b"x-uma-priority", BACKGROUND),
            ],
            "client": None,
            "server": None,
            "state": {LINES: _Unsaid(Throttle())},
            ID: id,
            ACCOUNT: self.account,
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
        return RowAnswer(
            started["status"],
            b"".join(parts),
            headers.get(b"x-request-id", b"").decode(),
            None if wait is None else int(wait),
            tuple(filter(None, headers.get(b"x-uma-ignored", b"").decode().split(", "))),
            unquote(headers.get(b"x-uma-model", b"").decode()),
        )

    async def progress(self) -> Mapping[str, Progress]:
        try:
            activity = await self.source.activity()
        except UmaError:  # a server of an older protocol, or none any more
            return {}
        found: dict[str, Progress] = {}
        waiting = [(request, True) for request in activity.waiting if request.waits_for != "loading"]
        begun = [(request, request.is_preempted or bool(request.waits_for)) for request in activity.running]
        for request, waits in (*begun, *waiting):  # of several answers to one prompt each is listed
            known = found.get(request.id, Progress(waits=True))
            found[request.id] = Progress(
                max(known.prompt_tokens, request.computed_tokens),
                known.completion_tokens + request.generated_tokens,
                known.waits and waits,
            )
        return found

    def loading(self) -> str:
        listed = self.source.listed() if isinstance(self.source, Models) else ()
        loading = (f"{model.name}: {model.load.words}" for model in listed if model.state == "loading")
        return next(loading, "")


class _Unsaid(ClientLines):
    """Log of requests whose refusals are told in results: a log would only repeat them."""

    def log(self, logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
        """Say nothing."""
