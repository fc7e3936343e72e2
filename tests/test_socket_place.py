"""The default socket's directory, whose name can be guessed: used by neither end where it may be another user's."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from engine_world import config_for

from uma import open_engine
from uma.client import connect
from uma.config import default_socket
from uma.errors import ConfigError, ConnectionLost
from uma.server import socketfile
from uma.server.server import Server


@pytest.fixture(params=["temporary", "runtime"])
def path(request: pytest.FixtureRequest, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default socket, in a folder of this test's."""
    if request.param == "runtime":
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    else:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", str(socket_dir))
    path = Path(default_socket())
    assert path.parent.parent == socket_dir
    return path


def others_may_write(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)


def a_link_to_elsewhere(directory: Path) -> None:
    elsewhere = directory.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    directory.symlink_to(elsewhere)


def a_file(directory: Path) -> None:
    directory.touch()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (others_may_write, "can be written by other users"),
        (a_link_to_elsewhere, "no directory of its own"),
        (a_file, "no directory of its own"),
    ],
)
async def test_a_directory_that_may_be_another_user_s_is_used_by_neither_end(
    path: Path, make: Callable[[Path], None], why: str
) -> None:
    make(path.parent)
    for use in (lambda: socketfile.check(path), lambda: socketfile.listen(path, 0o600)):
        with pytest.raises(ConfigError, match=f"{why}.*; remove it, or name another path with --socket"):
            use()
    with pytest.raises(ConnectionLost, match=why):
        async with connect(path):
            pass


def squat(path: Path) -> socket.socket:
    """Listen there without asking."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


@pytest.mark.parametrize("whose", ["directory", "socket"])
async def test_what_belongs_to_another_user_is_used_by_neither_end(
    path: Path, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir(mode=0o700)
    with squat(path):
        if os.geteuid() == 0:
            os.chown(path.parent if whose == "directory" else path, 12_345, 12_345)
        else:
            # Only root can give files away: so this process becomes another user.
            monkeypatch.setattr(os, "geteuid", lambda: 12_345)
        with pytest.raises(ConfigError, match="belongs to another user"):
            socketfile.listen(path, 0o600)
        with pytest.raises(ConnectionLost, match="belongs to another user"):
            async with connect(path):
                pass


async def test_our_own_directory_is_closed_to_others_and_then_both_ends_meet(path: Path, tiny: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o755)
    config = config_for(tiny, socket=str(path))
    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        await nursery.start(Server(engine, config).serve)
        assert path.parent.stat().st_mode & 0o777 == 0o700
        async with connect(path) as client:
            assert (await client.health()).status == "ok"
        nursery.cancel_scope.cancel()


def test_a_directory_that_the_user_names_is_the_user_s_own_affair(socket_dir: Path) -> None:
    (socket_dir / "ours").mkdir()
    (socket_dir / "ours").chmod(0o777)
    listening = socketfile.listen(socket_dir / "ours" / "s", 0o600)
    assert (socket_dir / "ours").stat().st_mode & 0o777 == 0o777
    listening.remove()
    listening.close()
