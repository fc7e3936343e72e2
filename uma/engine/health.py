"""The watchdog: asks the decode thread for a sign of life, once for all probes that are in flight together."""

from __future__ import annotations

from collections.abc import Callable

import trio

from uma.engine.worker.commands import Commands, Probe

PROBE_TIMEOUT_SEC = 10.0
"""An engine that generates no token within this time reports `stalled`."""


class Watchdog:
    """At most one probe is on its way, however many tasks ask. Belongs to the Trio thread."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._trio_token = trio.lowlevel.current_trio_token()
        self._probe: _Pending | None = None

    async def is_alive(self) -> bool:
        """Whether a token was generated within `PROBE_TIMEOUT_SEC` of a probe that began now or was on its way."""
        probe = self._probe
        if probe is None or probe.answered.is_set():
            probe = self._probe = _Pending(self._trio_token.run_sync_soon)
            self._commands.post(Probe(probe.answer))
        with trio.move_on_after(PROBE_TIMEOUT_SEC):
            await probe.answered.wait()
        return probe.is_alive


class _Pending:
    """A probe whose answer comes from the decode thread."""

    def __init__(self, run_sync_soon: Callable[..., None]) -> None:
        self._run_sync_soon = run_sync_soon
        self.answered = trio.Event()
        self.is_alive = False

    def answer(self, is_alive: bool) -> None:
        """On the decode thread: the answer."""
        self.is_alive = is_alive
        self._run_sync_soon(self.answered.set)
