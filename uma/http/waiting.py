"""A stream whose model has yet to be loaded: it begins before that, with reports of the load's progress."""

from __future__ import annotations

from collections.abc import Callable

import trio

from uma.http.dialect import NDJSON, StreamForm, dumps, sse
from uma.http.exchange import Exchange
from uma.http.generation import HEARTBEAT_SEC, NO_BUFFERING

SSE = StreamForm()
ANTHROPIC = StreamForm(failed=lambda body: sse(body, "error"))
TRANSCRIPTIONS = StreamForm(is_asked=lambda fields: fields.get("stream") == "true")
RESPONSES = StreamForm(failed=lambda body: sse({**body["error"], "type": "error", "sequence_number": 0}, "error"))
OLLAMA = StreamForm(
    NDJSON,
    alive=lambda text: b" ",
    failed=lambda body: dumps(body) + b"\n",
    is_asked=lambda fields: fields.get("stream") is not False and bool(fields.get("messages") or fields.get("prompt")),
)


async def tell_of_load(http: Exchange, form: StreamForm, model: str, percent: Callable[[], int | None]) -> None:
    """Begin the answer after a while, and tell how far its model is; to be cancelled once it is loaded.

    An error then has no status of its own any more.
    """
    await trio.sleep(HEARTBEAT_SEC)
    http.form = form
    await http.start(200, form.media_type, NO_BUFFERING)
    while True:
        await http.write(form.alive(f"loading {model}: {percent() or 0} %"))
        await trio.sleep(HEARTBEAT_SEC)
