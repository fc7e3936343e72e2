"""The processes whose requests over HTTP run: looked up while the live view is watched, and for a share of the time."""

from __future__ import annotations

import math

import attrs
import trio

from uma.http.exchange import Exchange
from uma.http.gateway import PART, Gateway
from uma.http.local_user import ends_of
from uma.net.peer import program_of, script_of
from uma.net.tcp_peer import Address, ends_at, pids_of
from uma.types import Activity, RunningRequest

Ends = tuple[Address, Address]

LOOK_SEC = 1.0
"""Minimum time between two looks."""
REST = 20
"""Minimum time until the next look, in times that the last one took."""


@attrs.frozen
class _Process:
    """A process at the other end of a connection."""

    pid: int
    script: str
    program: str


@attrs.define(eq=False)
class Processes:
    """Processes that the requests of one gateway come from. Trio thread."""

    gateway: Gateway
    _known: dict[Ends, _Process | None] = attrs.field(factory=dict, init=False)
    """The process at each connection; None: unknown."""
    _rests_until: float = attrs.field(default=0.0, init=False)

    def named(self, activity: Activity) -> Activity:
        """The same, with its process in each `origin` where that is known; what is not is looked up meanwhile."""
        exchanges = {each.id: self._exchange_of(each.id) for each in (*activity.running, *activity.waiting)}
        pairs = ((id, None if http is None else ends_of(http)) for id, http in exchanges.items())
        connections = {id: ends for id, ends in pairs if ends is not None}
        self._known = {ends: self._known[ends] for ends in connections.values() if ends in self._known}
        unknown = [ends for ends in dict.fromkeys(connections.values()) if ends not in self._known]
        if unknown and self.gateway.tasks is not None and trio.current_time() >= self._rests_until:
            self._rests_until = math.inf
            self.gateway.tasks.start_soon(self._look_up, unknown)
        processes = {id: self._known.get(ends) for id, ends in connections.items()}
        nameless = {id for id, http in exchanges.items() if http is not None and not http.header(b"user-agent")}
        running, waiting = (
            tuple(_with_process(each, processes.get(each.id), is_nameless=each.id in nameless) for each in part)
            for part in (activity.running, activity.waiting)
        )
        return attrs.evolve(activity, running=running, waiting=waiting)

    async def _look_up(self, connections: list[Ends]) -> None:
        began = trio.current_time()
        self._known |= await trio.to_thread.run_sync(_look, connections, abandon_on_cancel=True)
        now = trio.current_time()
        self._rests_until = now + max(LOOK_SEC, REST * (now - began))

    def _exchange_of(self, id: str) -> Exchange | None:
        found = self.gateway.answering.get(id) or self.gateway.answering.get(PART.sub("", id))
        return None if found is None else found.exchange


def _with_process(request: RunningRequest, process: _Process | None, *, is_nameless: bool) -> RunningRequest:
    """A request with its process in its `origin`, and its script: programs of one library give themselves one name.
    What gives itself none has the program's.
    """
    if process is None:
        return request
    name = process.script or (process.program if is_nameless else "")
    before = "" if name.lower() in request.origin.lower() else name
    return attrs.evolve(
        request, origin=" · ".join(part for part in (before, request.origin, f"pid {process.pid}") if part)
    )


def _look(connections: list[Ends]) -> dict[Ends, _Process | None]:
    """Look for processes, in a thread: files are read, of the system and of all processes."""
    ends = dict(zip(connections, ends_at(connections), strict=True))
    pids = pids_of({end for end in ends.values() if end is not None})
    known = {pid: _Process(pid, script_of(pid), program_of(pid)) for pid in set(pids.values())}
    return {each: None if end is None or end not in pids else known[pids[end]] for each, end in ends.items()}
