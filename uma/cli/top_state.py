"""What `uma top` knows: frames of servers and pressed keys go in, a state comes out. Pure: time is passed in.

A frame is what a server tells at one moment; its figures are `metrics.LiveFigures`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import attrs

from uma.metrics.live import RATE_SEC, WINDOW_SEC, LiveFigures
from uma.types import Activity, RunningRequest

SECONDS = round(WINDOW_SEC)
STEP_SEC = 0.45
"""Least time between two frames that are kept: HTTP's come four times a second."""
SORTS = ("start", "speed", "first", "gap", "prompt", "program")
"""What requests can be in the order of: `start` is the server's own, running ones first."""
MAX_FILTER_CHARS = 40
SHORT = "(short)"
"""What stands for the programs of requests that begin and end between two frames."""

Mode = Literal["list", "filter", "confirm", "help"]


@attrs.frozen
class Frame:
    """One server at one moment."""

    where: str
    """Socket or URL of the server."""
    at_sec: float
    model: str
    figures: LiveFigures
    metrics: Mapping[str, Any]
    activity: Activity | None = None
    """None: the server is stopping."""
    own: frozenset[str] | None = None
    """Ids of the requests that can be ended from here; None: all of them."""
    pid: int | None = None
    rss_bytes: int | None = None
    in_short: str = ""
    """`4 of 5 models loaded`, where `model` has the names of several."""
    slot_every_ms: Mapping[str, float | None] = attrs.field(factory=dict)
    """`LiveFigures.slot_every_ms` of each of several models, by name."""


@attrs.frozen
class Lost:
    """A server does not answer as one just now, and why."""

    where: str
    why: str


@attrs.frozen
class KeyPress:
    """A key: a character, or `up`, `down`, `enter`, `escape`, `backspace`."""

    name: str


@attrs.frozen
class Note:
    """What came of something, in a line."""

    text: str


Event = Frame | Lost | KeyPress | Note


@attrs.frozen
class End:
    """A request to be ended: the person has said yes."""

    where: str
    number: int
    id: str


Effect = End | Literal["quit"]


@attrs.frozen
class WatchedServer:
    """A server, as its frames of the last minute tell."""

    frames: tuple[Frame, ...] = ()
    """The newest last."""
    lost: str = ""
    """Why it does not answer; empty: it does."""

    @property
    def newest(self) -> Frame | None:
        """None before the first."""
        return self.frames[-1] if self.frames else None

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits there, as far as is known."""
        return self.newest is not None and not (self.newest.figures.running or self.newest.figures.waiting)

    def history(self, name: str) -> list[float]:
        """A figure in each second of the last minute, the newest last; one without a frame has that of the frame behind
        it.
        """
        values = [0.0] * SECONDS
        for before, after in pairwise(self.frames):
            begin, end = (
                int(SECONDS - 1 - (self.frames[-1].at_sec - end_frame.at_sec)) for end_frame in (before, after)
            )
            for second in range(max(0, begin), end + 1):
                values[second] = getattr(after.figures, name)
        return values

    def speed(self, number: int) -> float:
        """Tokens a second of a request, of late."""
        if self.newest is None:
            return 0.0
        seen = [
            (frame.at_sec, request.generated_tokens)
            for frame in self.frames
            if frame.at_sec >= self.newest.at_sec - RATE_SEC
            for request in _begun(frame)
            if request.number == number
        ]
        if len(seen) < 2:
            return 0.0
        (began, first), (ended, last) = seen[0], seen[-1]
        return max(0, last - first) / max(ended - began, 1e-3)

    def work(self) -> Counter[str]:
        """Tokens of the window by program: read and generated."""
        done: Counter[str] = Counter()
        for before, after in pairwise(self.frames):
            known = {request.number: request for request in _begun(before)}
            seen = 0
            for request in _begun(after):
                was = known.get(request.number)
                tokens = _tokens(request) - (_tokens(was) if was is not None else request.cached_tokens)
                done[program_of(request.origin)] += max(0, tokens)
                seen += max(0, tokens)
            counters = ("tokens_generated_total", "prefill_tokens_total")
            done[SHORT] += max(0, round(sum(_growth(before, after, name) for name in counters)) - seen)
        return +done


def _begun(frame: Frame) -> tuple[RunningRequest, ...]:
    return frame.activity.running if frame.activity is not None else ()


def _tokens(request: RunningRequest) -> int:
    return request.computed_tokens + request.generated_tokens


def _growth(before: Frame, after: Frame, name: str) -> float:
    """0 where the server was started anew in between."""
    return max(0.0, float(after.metrics.get(name, 0)) - float(before.metrics.get(name, 0)))


def program_of(origin: str) -> str:
    """The program of `RunningRequest.origin`."""
    return origin.partition(" · ")[0] or "this server"


def pid_of(origin: str) -> str:
    """The process of it; empty where the server does not know it."""
    last = origin.rpartition(" · ")[2]
    return last.removeprefix("pid ") if last.startswith("pid ") else ""


@attrs.frozen
class RequestRow:
    """One request."""

    where: str
    model: str
    request: RunningRequest
    place: int | None
    """How many start before it; None: it has been started."""
    starts_in_ms: float | None
    """What that takes by the requests of late; None where it is not known, or has been started."""
    tokens_per_sec: float
    can_end: bool

    @property
    def key(self) -> tuple[str, int, str]:
        """What tells it from all others."""
        return self.where, self.request.number, self.request.id

    @property
    def state(self) -> str:
        """What is done for it just now, in a word or two."""
        request = self.request
        if self.place is not None:
            return f"queue {self.place + 1}"
        if request.is_preempted:
            return "preempted"
        if request.waits_for:
            return f"waits: {request.waits_for}"
        return "reads" if request.computed_tokens < request.prompt_tokens else "writes"

    @property
    def read_share(self) -> float:
        """How much of its prompt is there."""
        return self.request.computed_tokens / max(1, self.request.prompt_tokens)


@attrs.frozen
class TopState:
    """All that is shown."""

    servers: Mapping[str, WatchedServer] = attrs.field(factory=dict)
    sort: str = SORTS[0]
    is_reversed: bool = False
    filter: str = ""
    mode: Mode = "list"
    selected: tuple[str, int, str] | None = None
    note: str = ""
    paused: Mapping[str, WatchedServer] | None = None
    """What is shown instead of `servers`, which go on."""
    first: str = ""
    """The server that is shown first: the one on the usual socket, or the one that was asked for."""

    @property
    def shown(self) -> Mapping[str, WatchedServer]:
        """The servers as they are to be shown, always in the same order."""
        servers = self.servers if self.paused is None else self.paused
        return dict(sorted(servers.items(), key=lambda known: (known[0] != self.first, known[0])))

    def rows(self) -> list[RequestRow]:
        """The requests, as filter and order have them."""
        wanted = self.filter.casefold()
        rows = [row for where, server in self.shown.items() for row in _rows(where, server)]
        rows = [row for row in rows if wanted in f"{row.request.origin} {row.request.id} {row.model}".casefold()]
        if self.sort != SORTS[0]:
            rows.sort(key=lambda row: _order(row, self.sort))
        return rows[::-1] if self.is_reversed else rows

    def chosen(self) -> RequestRow | None:
        """The request that keys are about."""
        return next((row for row in self.rows() if row.key == self.selected), None)


def _rows(where: str, server: WatchedServer) -> Iterable[RequestRow]:
    frame = server.newest
    if frame is None or frame.activity is None:
        return
    for request in frame.activity.running:
        yield _row(where, server, frame, request)
    places = Counter[str]()
    for request in frame.activity.waiting:
        if request.waits_for == "loading":  # it has yet to come to a model's queue
            yield _row(where, server, frame, request)
            continue
        slot_every_ms = frame.slot_every_ms.get(request.model, frame.figures.slot_every_ms)
        place = places[request.model]
        places[request.model] += 1
        yield _row(where, server, frame, request, place, slot_every_ms and (place + 1) * slot_every_ms)


def _row(
    where: str,
    server: WatchedServer,
    frame: Frame,
    request: RunningRequest,
    place: int | None = None,
    starts_in_ms: float | None = None,
) -> RequestRow:
    # Of several prompts of one HTTP request each has a number behind its id.
    is_own = frame.own is None or request.id in frame.own or request.id.rpartition("-")[0] in frame.own
    can_end = is_own and (request.number > 0 or frame.own is not None) and not server.lost
    return RequestRow(
        where, request.model or frame.model, request, place, starts_in_ms, server.speed(request.number), can_end
    )


def _order(row: RequestRow, sort: str) -> Any:
    request = row.request
    match sort:
        case "speed":
            return -row.tokens_per_sec
        case "first":
            return -(request.ttft_ms or request.age_ms)
        case "gap":
            return -request.worst_gap_ms
        case "prompt":
            return -request.prompt_tokens
        case _:
            return program_of(request.origin).casefold()


def reduce(state: TopState, event: Event) -> tuple[TopState, Effect | None]:
    """The state after `event`, and what is to be done."""
    match event:
        case Frame():
            server = _with(state.servers.get(event.where, WatchedServer()), event)
            return attrs.evolve(state, servers={**state.servers, event.where: server}), None
        case Lost():
            server = attrs.evolve(state.servers.get(event.where, WatchedServer()), lost=event.why)
            return attrs.evolve(state, servers={**state.servers, event.where: server}), None
        case Note():
            return attrs.evolve(state, note=event.text), None
        case KeyPress():
            return _pressed(attrs.evolve(state, note=""), event.name)


def _with(server: WatchedServer, frame: Frame) -> WatchedServer:
    frames: Sequence[Frame] = server.frames
    if frames and frame.metrics.get("requests_total", 0) < frames[-1].metrics.get("requests_total", 0):
        frames = ()  # started anew: its counters and numbers begin again
    if len(frames) > 1 and frames[-1].at_sec - frames[-2].at_sec < STEP_SEC:
        frames = frames[:-1]
    kept = [older for older in frames if older.at_sec > frame.at_sec - WINDOW_SEC]
    return WatchedServer((*kept, frame))


def _pressed(state: TopState, key: str) -> tuple[TopState, Effect | None]:
    if state.mode == "filter":
        return _typed(state, key), None
    if state.mode == "confirm":
        row, state = state.chosen(), attrs.evolve(state, mode="list")
        if key.lower() != "y" or row is None:
            return attrs.evolve(state, note="nothing was ended"), None
        return state, End(row.where, row.request.number, row.request.id)
    if state.mode == "help":
        return (state, "quit") if key == "q" else (attrs.evolve(state, mode="list"), None)
    return (state, "quit") if key == "q" else (_listed(state, key), None)


def _listed(state: TopState, key: str) -> TopState:
    """A key among the requests."""
    match key:
        case "?" | "h":
            return attrs.evolve(state, mode="help")
        case "s":
            return attrs.evolve(state, sort=SORTS[(SORTS.index(state.sort) + 1) % len(SORTS)])
        case "r":
            return attrs.evolve(state, is_reversed=not state.is_reversed)
        case "/":
            return attrs.evolve(state, mode="filter")
        case "escape":
            return attrs.evolve(state, filter="", selected=None)
        case " " | "p":
            return attrs.evolve(state, paused=dict(state.servers) if state.paused is None else None)
        case "up" | "k":
            return _moved(state, -1)
        case "down" | "j":
            return _moved(state, 1)
        case "x":
            return _asked(state)
    return state


def _typed(state: TopState, key: str) -> TopState:
    match key:
        case "enter":
            return attrs.evolve(state, mode="list")
        case "escape":
            return attrs.evolve(state, mode="list", filter="")
        case "backspace":
            return attrs.evolve(state, filter=state.filter[:-1])
    if len(key) == 1 and key.isprintable():
        return attrs.evolve(state, filter=(state.filter + key)[:MAX_FILTER_CHARS])
    return state


def _moved(state: TopState, by: int) -> TopState:
    keys = [row.key for row in state.rows()]
    if not keys:
        return state
    at = keys.index(state.selected) + by if state.selected in keys else 0
    return attrs.evolve(state, selected=keys[max(0, min(at, len(keys) - 1))])


def _asked(state: TopState) -> TopState:
    row = state.chosen()
    if row is None:
        return attrs.evolve(state, note="choose a request with the arrows first")
    if not row.can_end:
        return attrs.evolve(state, note="only its owner can end this request")
    return attrs.evolve(state, mode="confirm")
