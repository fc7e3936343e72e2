"""Where `uma top` has its frames from: a session on a socket that asks twice a second, or the page's feed over HTTP."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import attrs
import trio

from uma.cli.top_state import Event, Frame, Lost
from uma.client import Client, connect
from uma.client.http import HttpClient
from uma.errors import ConnectionLost, Loading, ShuttingDown, UmaError
from uma.metrics import LiveFigures, LiveSeries
from uma.protocol.converter import structure
from uma.types import Activity, ListedModel

INTERVAL_SEC = 0.5
"""Between two questions on a socket."""
RETRY_SEC = 1.0
"""Between two attempts to reach a server that went away."""
SILENCE_SEC = 15.0
"""Time without a word after which a server is given up: over HTTP frames come four times a second."""

Post = Callable[[Event], None]
T = TypeVar("T")


class Feed(ABC):
    """One server."""

    where: str

    async def follow(self, post: Post) -> None:
        """Post frames until cancelled. A server that goes away is told as `Lost`, and asked again.

        Raises the `UmaError` with which the first attempt fails.
        """
        was_there = False

        def noting(event: Event) -> None:
            nonlocal was_there
            was_there = True
            post(event)

        while True:
            try:
                await self._follow_once(noting)
            except (UmaError, trio.TooSlowError) as error:
                is_told = isinstance(error, Loading | ShuttingDown)
                if not (was_there or is_told):
                    raise
                was_there = True
                why = str(error) if is_told else "the server does not answer; trying again"
                post(Lost(self.where, why))
            await trio.sleep(RETRY_SEC)

    @abstractmethod
    async def _follow_once(self, post: Post) -> None:
        """Post frames. Raises an `UmaError` or `TooSlowError` where the server goes away."""

    @abstractmethod
    async def end(self, number: int, id: str) -> bool:
        """End a request; whether it still ran. Raises an `UmaError` where that is not possible."""


@attrs.define(eq=False)
class SocketFeed(Feed):
    """A server on a socket."""

    where: str
    _client: Client | None = attrs.field(default=None, init=False)

    async def _follow_once(self, post: Post) -> None:
        async with connect(self.where, loads=False, waits=False) as client:
            self._client, series = client, LiveSeries()
            try:
                while True:
                    post(await self._frame(client, series))
                    await trio.sleep(INTERVAL_SEC)
            finally:
                self._client = None

    async def _frame(self, client: Client, series: LiveSeries) -> Frame:
        activity: Activity | None = None
        models: Sequence[ListedModel] = ()
        with trio.fail_after(SILENCE_SEC):
            metrics = await client.metrics()
            with suppress(ShuttingDown):  # then it tells its counters alone
                activity = await client.activity()
                models = await client.models() if client.info.models else ()
        info, pid = client.info, client.server_pid
        name, slots, rss_bytes = info.model.name, info.limits.max_sequences, _rss_bytes(pid)
        in_short, every_ms = "", dict[str, float | None]()
        if models:
            loaded = [model for model in models if model.state == "loaded"]
            told = [
                (model.name, None if model.state == "loaded" else model.load.words, model.waiting)
                for model in models
                if model.state in ("loaded", "loading") or model.waiting
            ]
            in_short, name = _of_several(told, len(models))
            name += "".join(f"; {model.name} {model.yielded}" for model in models if model.yielded)
            slots, known = 0, metrics.get("models", {})  # each has slots of its own
            every_ms = {
                model.name: known[model.name]["service_ms_ewma"] / model.info.limits.max_sequences or None
                for model in loaded
                if model.info is not None and model.name in known
            }
            rss_bytes = None if rss_bytes is None else rss_bytes + sum(model.taken_bytes for model in loaded)
        at_sec = trio.current_time()
        figures = series.figures(at_sec, metrics, activity, slots)
        return Frame(self.where, at_sec, name, figures, metrics, activity, None, pid, rss_bytes, in_short, every_ms)

    async def end(self, number: int, id: str) -> bool:
        if self._client is None:
            raise ConnectionLost(f"{self.where}: only a server that is heard of ends requests from here")
        return await self._client.end_request(number)


def _of_several(models: Sequence[tuple[str, str | None, int]], total: int) -> tuple[str, str]:
    """`1 of 4 models loaded`, and the same with `: alpha, beta (loading, 40 %, 2 wait)`: names of those that are
    loaded, and how far those are that are waited for, and by how many requests.
    """
    in_short = f"{sum(load is None for _, load, _ in models)} of {total} models loaded"
    told = []
    for name, load, waiting in models:
        wait = f", {waiting:,} wait" if waiting else ""
        told.append(name if load is None else f"{name} ({load}{wait})")
    return in_short, ": ".join([in_short, *([", ".join(told)] if told else [])])


def _rss_bytes(pid: int | None) -> int | None:
    """Resident memory of a process, where the system tells."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), None)


@attrs.define(eq=False)
class HttpFeed(Feed):
    """A server at a URL."""

    where: str
    _key: str | None

    @property
    def _server(self) -> HttpClient:
        return HttpClient(self.where, self._key, SILENCE_SEC)

    async def _follow_once(self, post: Post) -> None:
        info = await _in_thread(self._server.read_json, "GET", "/ui/api/info")
        try:
            total = len(info.get("models") or ())
            model = str(info["model"]["called"])
        except (LookupError, TypeError):
            raise ConnectionLost(f"{self.where}: what answers there is no UMA server") from None
        with self._server.connection() as connection:
            response = await _in_thread(self._server.begin, connection, "GET", "/ui/api/live")
            self._server.check(response)
            own, name = frozenset[str](), b""
            while line := await _in_thread(response.readline):
                field, _, value = line.strip().partition(b": ")
                if field == b"event":
                    name = value
                elif field == b"data" and name in (b"own", b"frame"):
                    values = _read_values(value)
                    if name == b"own":
                        own = frozenset(values["ids"])
                    else:
                        far = [(of["name"], of.get("load"), of.get("waiting", 0)) for of in values["models"]]
                        in_short, called = _of_several(far, total) if total else ("", model)
                        told = self._frame(called, own, values)
                        every_ms = {of["name"]: of.get("figures", {}).get("slot_every_ms") for of in values["models"]}
                        post(attrs.evolve(told, in_short=in_short, slot_every_ms=every_ms) if total else told)
        raise ConnectionLost(f"{self.where}: the server went away")

    def _frame(self, model: str, own: frozenset[str], values: dict[str, Any]) -> Frame:
        if "figures" not in values:
            raise ConnectionLost(f"{self.where}: the server there is too old for this `uma top`")
        figures = structure(values["figures"], LiveFigures)
        activity = structure(values["activity"], Activity)
        return Frame(self.where, values["at_ms"] / 1000, model, figures, values["metrics"], activity, own)

    async def end(self, number: int, id: str) -> bool:
        return await _in_thread(self._end, f"/v1/requests/{quote(id, safe='')}")

    def _end(self, path: str) -> bool:
        with self._server.ask("DELETE", path) as response:
            if response.status == 404:
                return False
            self._server.check(response)
            return True


async def _in_thread(ask: Callable[..., T], *arguments: Any) -> T:
    return await trio.to_thread.run_sync(partial(ask, *arguments), abandon_on_cancel=True)


def _read_values(data: bytes) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(data)
    except ValueError:
        raise HTTPException("an event is no JSON") from None
    return values
