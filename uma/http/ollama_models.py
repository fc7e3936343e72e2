"""What Ollama's clients do with models: `/api/pull` gets one from the Hugging Face hub, `/api/delete` takes one off the
disk. Names are the server's own, or what `uma pull` takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import trio

from uma.errors import BadRequest, ModelError, UmaError
from uma.http.dialect import NDJSON, dumps
from uma.http.exchange import Exchange
from uma.http.gateway import Gateway
from uma.http.generation import NO_BUFFERING
from uma.http.local_user import check_manager
from uma.http.many import own_model
from uma.http.problem import NotFound, Unsupported
from uma.http.reader import Reader, read
from uma.types import Download, Models

TELL_SEC = 0.1
"""Minimum time between two lines of progress."""


@attrs.frozen(kw_only=True)
class NameBody:
    """Old clients say `name`."""

    model: str | None = None
    name: str | None = None

    def asked(self, reader: Reader) -> str:
        """The name. Raises `BadRequest` where there is none."""
        found = reader.first(("model", self.model or None), ("name", self.name or None))
        if found is None:
            raise BadRequest.at("model", "the name of the model is missing")
        return found


@attrs.frozen(kw_only=True)
class PullBody(NameBody):
    """`POST /api/pull`."""

    stream: bool | None = None


async def pull(gateway: Gateway, http: Exchange) -> None:
    """`POST /api/pull`. A client that goes away ends it, and the next one goes on where it was."""
    body = await http.built(lambda fields: read(fields, PullBody, http.ignored))
    await check_manager(http, "pull models")
    models = _managed(gateway)
    download = models.download(body.asked(gateway.reader(http)))
    answer = _answer_whole if body.stream is False else _answer_stream
    async with http.connected():
        await answer(http, models, download)


async def _fetched(download: Download) -> None:
    """Run a download. One that is cancelled is not waited for: the network can be what does not answer."""
    try:
        await trio.to_thread.run_sync(download.run, abandon_on_cancel=True)
    finally:
        download.stop()


async def _answer_whole(http: Exchange, models: Models, download: Download) -> None:
    try:
        await _fetched(download)
    except ModelError as error:
        raise NotFound(error.message) from None
    await models.look_again(is_changed=True)
    *_, last = _end(download)
    await http.answer_json(last)


async def _answer_stream(http: Exchange, models: Models, download: Download) -> None:
    await http.start(200, NDJSON, NO_BUFFERING)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_tell, http, download)
        try:
            await _fetched(download)
            await models.look_again(is_changed=True)
            last = list(_end(download))
        except UmaError as error:
            last = [{"error": error.message}]
        nursery.cancel_scope.cancel()
    await http.write(b"".join(map(_written, last)), is_last=True)


async def _tell(http: Exchange, download: Download) -> None:
    sent: dict[str, Any] = {}
    while True:
        if (line := _line(download)) != sent:
            sent = line
            await http.write(_written(line))
        await trio.sleep(TELL_SEC)


def _line(download: Download) -> dict[str, Any]:
    """How far it is."""
    if not download.digest:
        return {"status": "pulling manifest"}
    progress = {"total": download.total_bytes, "completed": download.completed_bytes}
    return {"status": f"pulling {download.digest[:12]}", "digest": f"sha256:{download.digest}", **progress}


def _end(download: Download) -> Iterator[dict[str, Any]]:
    """The last lines of a download, which was checked as it came."""
    yield _line(download)
    for status in ("verifying sha256 digest", "writing manifest", "success"):
        yield {"status": status}


def _written(line: dict[str, Any]) -> bytes:
    return dumps(line) + b"\n"


async def delete(gateway: Gateway, http: Exchange) -> None:
    """`DELETE /api/delete`. Requests that run with it come to their end."""
    body = await http.built(lambda fields: read(fields, NameBody, http.ignored))
    await check_manager(http, "delete models")
    models, asked = _managed(gateway), body.asked(gateway.reader(http))
    await models.remove(own_model(models, http, asked) or asked)
    await http.answer(b"")


async def copy(gateway: Gateway, http: Exchange) -> None:
    """`POST /api/copy`, which is refused."""
    raise Unsupported.at(
        "destination",
        'a copy would only be another name: `alias = ["NAME"]` below [models."MODEL"] in the configuration',
    )


def _managed(gateway: Gateway) -> Models:
    """All models of the server. Raises `Unsupported` where it has one alone."""
    if gateway.models is None:
        raise Unsupported.at("model", "this server has one model for as long as it runs; start it with --models all")
    return gateway.models
