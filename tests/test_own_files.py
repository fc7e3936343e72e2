"""A file that a client names by its path: nothing but a regular one of its user is so much as opened."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from harness import PATIENCE_SEC
from uma.config import RuntimeConfig
from uma.errors import BadRequest
from uma.media.files import MAX_REQUEST_BYTES
from uma.server import own_files
from uma.server.own_files import MAX_READING, OwnFiles, with_own_files
from uma.supervisor.child import child_config
from uma.types import Media, Message, Request


def about(*paths: Path) -> Request:
    media = tuple(Media(path=str(each)) for each in paths)
    return Request("a", messages=(Message("user", "What?", media=media),))


@pytest.mark.skipif(sys.platform != "linux", reason="opening without opening is Linux's")
async def test_what_is_no_regular_file_is_looked_at_and_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    flags, open_file = list[int](), os.open

    def noting(path: Any, how: int, *more: Any, **named: Any) -> int:
        flags.append(how)
        return open_file(path, how, *more, **named)

    monkeypatch.setattr(os, "open", noting)
    for path in (pipe, link, tmp_path, Path("/dev/null")):
        with pytest.raises(BadRequest, match="is no file of this client's user"):
            async with OwnFiles().read(about(path), os.getuid()):
                pass
    assert flags
    assert all(each & os.O_PATH for each in flags)


async def test_a_file_system_that_does_not_answer_ends_the_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, answers = tmp_path / "file", threading.Event()
    file.write_bytes(b"a file")

    def read(request: Request, user: int | None) -> Request:
        answers.wait(PATIENCE_SEC)
        return with_own_files(request, user)

    monkeypatch.setattr(own_files, "DEADLINE_SEC", 0.05)
    monkeypatch.setattr(own_files, "with_own_files", read)
    reader = OwnFiles()
    for _ in range(MAX_READING + 1):
        with pytest.raises(BadRequest, match="were not read by their paths within"):
            async with reader.read(about(file), os.getuid()):
                pass
    monkeypatch.setattr(own_files, "DEADLINE_SEC", PATIENCE_SEC)
    answers.set()
    async with reader.read(about(file), os.getuid()) as whole:
        assert [each.data for message in whole.messages or () for each in message.media] == ["YSBmaWxl"]


async def test_so_many_are_read_as_can_be_admitted(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a file")
    reader, admitted, inside = OwnFiles(), trio.Event(), list[Request]()

    async def enter() -> None:
        async with reader.read(about(file), os.getuid()) as whole:
            inside.append(whole)
            await admitted.wait()

    async with trio.open_nursery() as nursery:
        for _ in range(2 * MAX_READING):
            nursery.start_soon(enter)
        while len(inside) < MAX_READING:
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()
        assert len(inside) == MAX_READING
        admitted.set()
    assert len(inside) == 2 * MAX_READING


async def test_the_sum_is_named_where_it_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a file")
    monkeypatch.setattr(own_files, "MAX_REQUEST_BYTES", 10)
    with pytest.raises(BadRequest, match=r"media\[1\]\.path: all files of a request .* limit of 67,108,864 bytes"):
        async with OwnFiles().read(about(file, file), os.getuid()):
            pass


def test_a_model_s_process_takes_what_files_become_in_a_frame() -> None:
    config = RuntimeConfig()
    child = child_config(config, "model.gguf", 2**30)
    assert child.max_frame_bytes >= config.frame_bytes(takes_media=True) + 4 * MAX_REQUEST_BYTES // 3
