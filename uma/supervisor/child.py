"""A model in a process of its own: a whole server, whose one session is a pair of sockets that we made.

No other process can reach it, and each side sees by the pair that the other is gone.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio

from uma.child import KILL_SEC
from uma.client import Client, connect_child
from uma.config import HTTP, RuntimeConfig
from uma.errors import ConnectionLost, InternalError
from uma.figures import MB
from uma.media.files import MAX_REQUEST_BYTES
from uma.net.logfmt import log
from uma.types import MAX_MEDIA

logger = logging.getLogger("uma.supervisor")

END_SEC = 20.0
"""Maximum time for a model that leaves to save its prefixes."""
WORDLESS_SEC = 5.0
"""Maximum time between the end of a process's connection and its own, for the reason to be known."""
CACHE_SHARE = 16
"""Divisor of what all models can take: each keeps so much of prefixes in host memory, without `--cache-ram-mb`."""
NO_TIMEOUT_SEC = 1e6
"""Timeouts of the session that is that of all clients: those of each are the supervisor's."""
FILES_BYTES = 4 * (MAX_REQUEST_BYTES // 3 + MAX_MEDIA)
"""Bytes of a frame beyond its text: files that a request has by their paths, or in a form, become base64 there."""
MAX_FRAME_BYTES = 2**31 - 1
"""The longest frame that can be configured."""

_PROGRAM = (
    # Before the imports that take long: a process that is stopped (SIGSTOP) during these ends with its parent, too.
    "import sys; sys.path = {path!r}; from uma import posix; posix.end_with_parent(); "
    "from uma.server.child import main; main()"
)


def child_config(config: RuntimeConfig, path: str, budget_bytes: int) -> RuntimeConfig:
    """The settings of the process that has the model of this file; all together have `budget_bytes`."""
    plain = RuntimeConfig()
    return attrs.evolve(
        config,
        **{name: getattr(plain, name) for name in (*HTTP, "socket_users", "protocol", "models")},
        model=path,
        memory=max(1, budget_bytes // MB),
        cache_ram_mb=config.cache_ram_mb if config.cache_ram_mb >= 0 else budget_bytes // CACHE_SHARE // MB,
        cache_dir=config.prefix_folder,
        idle_timeout_sec=NO_TIMEOUT_SEC,
        tx_timeout_sec=NO_TIMEOUT_SEC,
        max_frame_bytes=min(MAX_FRAME_BYTES, config.frame_bytes(takes_media=True) + FILES_BYTES),
    )


@asynccontextmanager
async def running(
    name: str,
    config: RuntimeConfig,
    on_start: Callable[[int], None],
    on_loading: Callable[[int], None],
    on_stuck: Callable[[subprocess.Popen[bytes]], None],
) -> AsyncIterator[Client]:
    """A process with the model of `config`, once that is loaded; it ends with the block. Left in order, it saves its
    prefixes first. `on_start` is given its process id, `on_loading` how much of the model is loaded, in percent,
    and `on_stuck` the process that not even SIGKILL has ended.

    Raises what it says where it cannot load the model, and `InternalError` where it ends without a word: from entering,
    or in place of a `ConnectionLost` from the block.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = _start(name, config, theirs)
        except BaseException:
            ours.close()
            raise
    try:
        on_start(process.pid)
        ours.setblocking(False)
        async with connect_child(ours, name, lambda load: on_loading(load.percent)) as client:
            yield client
            process.terminate()
            await _ended(process, END_SEC)  # our end stays open meanwhile: without it the process ends at once
    except ConnectionLost as error:
        await _ended(process, WORDLESS_SEC)
        raise InternalError(f"its process has ended{_how(process.poll())}") from error
    finally:
        ours.close()
        process.kill()
        with trio.CancelScope(shield=True):
            await _ended(process, KILL_SEC)
        if process.poll() is None:
            log(logger, logging.WARNING, "model.not_ended", model=name, process=process.pid, seconds=KILL_SEC)
            on_stuck(process)


async def _ended(process: subprocess.Popen[bytes], most_sec: float) -> None:
    with trio.move_on_after(most_sec):
        await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)


def _how(code: int | None) -> str:
    """How a process has ended that gave this exit code, for the end of a sentence."""
    if code is None:
        return ""
    if code >= 0:
        return f" (exit code {code}); the lines before this one in the log say more"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f" by {name}" + ("; the system does that where memory runs out" if name == "SIGKILL" else "")


def _start(name: str, config: RuntimeConfig, sock: socket.socket) -> subprocess.Popen[bytes]:
    # From this very thread: Linux sends the parent-death signal when the thread ends that has made the child.
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(path=sys.path), json.dumps(attrs.asdict(config)), name],
        stdin=sock.fileno(),
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is the supervisor's to act on
    )


def taken_bytes(pid: int | None) -> int | None:
    """The memory of a process, its part of what it shares included; None where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return None
