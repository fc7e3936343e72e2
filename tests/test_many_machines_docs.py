"""The compose file and the page about many machines: their commands are commands, and say the same."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from uma.cli import main
from uma.cli.parser import build_parser

DOCS = Path(__file__).parents[1] / "docs"
FRONTEND_FLAGS = {"--http-port", "--router-mode", "--kv-cache-block-size", "--migration-limit"}
"""Of Dynamo 1.6's frontend, those that are used here."""


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, dict[str, Any]] = yaml.safe_load((DOCS / "many-machines.compose.yaml").read_text())["services"]
    return found


def test_every_worker_of_the_compose_file_is_a_command_of_uma_s(services: dict[str, dict[str, Any]]) -> None:
    workers = {name: each for name, each in services.items() if each["command"].startswith("uma ")}
    assert len(workers) == 2
    for name, worker in workers.items():
        _, command, *arguments = shlex.split(worker["command"])
        options = build_parser().parse_args([command, *arguments])
        assert command == "worker"
        assert options.host == worker["hostname"] == name
        assert int(worker["environment"]["DYN_SYSTEM_PORT"]) <= 32_767
        assert worker["depends_on"] == ["etcd"]
        assert "etcd" in services


def test_the_frontend_listens_on_this_machine_alone_and_has_the_workers_block_size(
    services: dict[str, dict[str, Any]],
) -> None:
    frontend = services["frontend"]
    flags = shlex.split(frontend["command"])
    assert {flag for flag in flags if flag.startswith("--")} <= FRONTEND_FLAGS
    assert int(flags[flags.index("--kv-cache-block-size") + 1]) == build_parser().parse_args(["worker"]).block_size
    assert all(port.startswith("127.0.0.1:") for port in frontend["ports"])


def test_every_command_of_the_page_is_one() -> None:
    text = (DOCS / "many-machines.md").read_text()
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    commands = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    ours = [shlex.split(line) for line in commands if line.startswith("uma ")]
    assert {command for _, command, *_ in ours} == {"worker", "engine-zmq"}
    for _, *arguments in ours:
        build_parser().parse_args(arguments)


@pytest.mark.parametrize("port", ["32768", "http"])
def test_a_status_port_that_dynamo_cannot_read_is_refused(
    port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYN_SYSTEM_PORT", port)
    assert main(["worker"]) == 2
    assert "DYN_SYSTEM_PORT: " in capsys.readouterr().err
