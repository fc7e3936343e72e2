"""`uma run` as its user sees it: what runs, where, how to reach it, and why it does not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from pty_screen import Terminal

from harness import BULKY, Raw, ServerProcess, ask, clean_environ, run_to_end, uma_command
from uma import figures
from uma.cli import main, say, words
from uma.cli.run import announce, banner
from uma.config import RuntimeConfig, load
from uma.types import Capabilities, Limits, MemoryPlan, ModelInfo, ServerInfo

INFO = ServerInfo(
    server="uma/1.2.3",
    model=ModelInfo("m", "/m.gguf", "llama", 7_240_000_000, 4_370_000_000, "Q4_K_M", 32_768, 32_000, True),
    capabilities=Capabilities(True, True, True, True, True, "cells", True, 16, ()),
    limits=Limits(8192, 4096, 1_000_000, 1_048_576, 256, 1024),
)


def test_a_running_server_has_said_what_it_serves_and_how_to_reach_it(server: ServerProcess) -> None:
    said = server.log.text
    for line in ("model   builtin", "Q8_0", f"socket  {server.socket}", f"try     uma chat --socket {server.socket}"):
        assert line in said
    assert words.DEMONSTRATION not in said, "it was named"


def test_the_banner_names_model_parameters_quantization_size_context_and_socket() -> None:
    lines = banner(RuntimeConfig(socket="/s"), INFO)
    assert lines == [
        "model   m · 7.24 B parameters · Q4_K_M · 4.37 GB",
        "        context 8,192 tokens (trained for 32,768)",
        "socket  /s",
        "try     uma chat --socket /s",
        '        uma generate --socket /s "Tell me a story about a fox"',
    ]


def test_the_banner_tells_what_texts_take_of_memory() -> None:
    def told(**plan: Any) -> str:
        able = attrs.evolve(INFO.capabilities, memory=MemoryPlan(**plan))
        return banner(RuntimeConfig(socket="/s"), attrs.evolve(INFO, capabilities=able))[2].strip()

    kv = {"cells": 32_768, "kv_bytes": 216_000_000}
    assert told(kind="attention", **kv) == "KV of 32,768 tokens 216 MB"
    windows = "KV of 32,768 tokens 216 MB, of 8,704 in layers with a window"
    assert told(kind="sliding-window", window_cells=8_704, **kv) == windows
    assert told(kind="sliding-window", window_cells=32_768, **kv) == "KV of 32,768 tokens 216 MB"
    states = {"states": 9, "state_bytes": 54_000_000}
    assert told(kind="hybrid", **kv, **states) == "KV of 32,768 tokens 216 MB · 9 recurrent states 54 MB"
    assert told(kind="recurrent", cells=512, kv_bytes=0, **states) == "9 recurrent states 54 MB"


def test_commands_to_try_can_be_pasted_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "try     uma chat" in banner(RuntimeConfig(), INFO)
    assert "try     uma chat --socket '/a b/s'" in banner(RuntimeConfig(socket="/a b/s"), INFO)
    assert "try     nc -U /s" in banner(RuntimeConfig(socket="/s", protocol="newline"), INFO)
    monkeypatch.setattr(say, "columns", lambda: 40)
    named = load({"model": "builtin", "socket": "/home/ada/a place of her own/uma.sock"}, environ={})
    announce(named, INFO)
    say.complain("no server listens there; start one with `uma run --socket /home/ada/uma.sock --model m`")
    shown = capsys.readouterr().err.splitlines()
    commands = set(banner(named.config, INFO)[-2:])
    assert commands <= set(shown)
    assert max(len(line) for line in set(shown) - commands if "`" not in line and "/" not in line) <= 40, "folded"
    assert any("`uma run --socket /home/ada/uma.sock --model m`" in line for line in shown)


def test_only_the_built_in_model_is_called_a_demonstration() -> None:
    assert words.demonstration(INFO.model, load(environ={})) is None
    assert words.demonstration(attrs.evolve(INFO.model, is_builtin=True), load(environ={})) is not None


def test_a_user_who_has_named_it_is_not_told_what_it_is() -> None:
    named = load({"model": "builtin"}, environ={})
    assert words.demonstration(attrs.evolve(INFO.model, is_builtin=True), named) is None


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--model", "/nowhere.gguf", "--http", "127.0.0.1:0"), 2, "/nowhere.gguf: model not found"),
        (("--socket", "/"), 2, "is a directory"),
        (("--n-batch", "100000000"), 2, "--n-batch: 100000000 must be from 1 to"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_line(
    arguments: tuple[str, ...], code: int, words: str, socket_dir: Path
) -> None:
    done = run_to_end(*uma_command("run", "--socket", str(socket_dir / "s"), *arguments))
    assert done.returncode == code
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("Try ")]
    assert line.startswith("uma: error: ")
    assert words in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (5_179_104, "5.18 MB"), (999_600, "1 MB"), (7.3e12, "7.3 TB")],
)
def test_sizes_are_told_in_the_unit_that_fits(number: int, text: str) -> None:
    assert figures.size(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.01234, "0.0123"), (41.23, "41.2"), (99.96, "100"), (2_110.0, "2,110"), (1_234_567.8, "1,234,568")],
)
def test_a_speed_is_told_in_plain_digits(number: float, text: str) -> None:
    assert figures.figure(number) == text


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--models", "all", "--memory", "10"), "--memory: "),
        (("--model", "builtin", "--cache-dir", "/proc/nope"), "--cache-dir: /proc/nope/"),
    ],
)
def test_what_cannot_be_served_is_told_before_anything_is_opened(
    flags: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[object] = []
    monkeypatch.setattr("uma.cli.run.run_server", opened.append)
    assert main(["run", *flags]) == 2
    assert why in capsys.readouterr().err
    assert not opened


def test_a_stop_is_told_once_with_what_may_finish_and_refusals_meanwhile_are_not(socket_dir: Path) -> None:
    command = uma_command("run", "builtin", "--socket", str(socket_dir / "s"), "--drain-timeout-sec", "30")
    with Terminal(command, clean_environ(), columns=100) as terminal:
        terminal.wait_for("starting …")
        terminal.wait_for("Ctrl-C ends the server")
        assert "starting" not in terminal.text
        with Raw(socket_dir / "s") as raw:
            raw.hello()
            raw.send(ask("runs", max_tokens=30_000, metadata=BULKY))
            raw.until_token("runs")
            terminal.type("\x03")
            terminal.wait_for("stopping: 1 request may finish, 30 s at most; Ctrl-C again ends at once")
            raw.send(*(ask(id) for id in "abc"), {"type": "health"})
            while (told := raw.receive()) is not None and told.get("id") != "c":
                pass
            assert told is not None and told["code"] == "E_RUNTIME_SHUTDOWN"
            terminal.type("\x03")
            assert terminal.wait() == 130
        assert "uma run" not in terminal.text.partition("stopping: ")[2]
        assert re.findall("warning: (.*), and", terminal.text) == ["the server is stopping"]  # of the one that was cut
