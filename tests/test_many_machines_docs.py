"""The compose file and the page about many machines: their commands are commands, and say the same."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from harness import PATIENCE_SEC
from uma.cli import main
from uma.cli.options import load_settings
from uma.cli.parser import build_parser
from uma.cli.worker import address_of

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "many-machines.md").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((DOCS / "many-machines.compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKERS = {name: each for name, each in SERVICES.items() if each["command"].startswith("uma ")}
FRONTEND = ["python", "-m", "dynamo.frontend"]
FRONTEND_FLAGS = {"--http-host", "--http-port", "--router-mode", "--kv-cache-block-size", "--migration-limit"}
"""Of Dynamo 1.6's frontend, those that are used here."""
DYNAMO_DRAIN_SEC = 30
"""From SIGTERM on, Dynamo ends a worker after this long."""

needs_dynamo = pytest.mark.skipif(
    importlib.util.find_spec("dynamo") is None and os.environ.get("TEST_DYNAMO") != "required",
    reason="needs the extra [dynamo]",
)


def commands_of_the_page() -> list[list[str]]:
    """The commands in the page's blocks, without their comments."""
    blocks = re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


def frontend_commands() -> list[list[str]]:
    """The arguments of each frontend that is started, here or there."""
    written = [shlex.split(SERVICES["frontend"]["command"]), *commands_of_the_page()]
    return [command[3:] for command in written if command[:3] == FRONTEND]


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_of_the_compose_file_is_reached_by_its_name_and_finds_its_model(name: str) -> None:
    worker = WORKERS[name]
    _, *arguments = shlex.split(worker["command"])
    options = build_parser().parse_args(arguments)
    assert options.command == "worker"
    assert options.host == worker["hostname"] == name
    assert int(worker["environment"]["DYN_SYSTEM_PORT"]) <= 32_767
    folders = {mount.rsplit(":", 2)[1] for mount in worker["volumes"]}
    assert str(PurePosixPath(load_settings(options).config.model).parent) in folders
    assert int(worker["stop_grace_period"].removesuffix("s")) > DYNAMO_DRAIN_SEC
    assert "ports" not in worker


def test_all_find_each_other_through_an_etcd_that_is_up_first() -> None:
    etcd = shlex.split(SERVICES["etcd"]["command"])
    told = etcd[etcd.index("--advertise-client-urls") + 1]
    assert SERVICES["etcd"]["healthcheck"]["test"] == ["CMD", "etcdctl", "endpoint", "health"]
    assert len(WORKERS) == 2
    for each in (*WORKERS.values(), SERVICES["frontend"]):
        assert each["environment"]["ETCD_ENDPOINTS"] == told
        assert each["depends_on"] == {"etcd": {"condition": "service_healthy"}}
        assert build_parser().parse_args(["worker"]).discovery_backend == "etcd"


def test_the_image_is_made_of_this_checkout_by_the_page_s_own_command() -> None:
    install = next(line for line in PAGE.splitlines() if line.startswith("pip install '.[dynamo]'"))
    for each in (*WORKERS.values(), SERVICES["frontend"]):
        build = each["build"]
        assert (DOCS / build["context"] / "pyproject.toml").exists()
        assert f"RUN {install}" in build["dockerfile_inline"].splitlines()


def test_the_frontend_listens_on_this_machine_alone_and_has_the_workers_block_size() -> None:
    for flags in frontend_commands():
        assert {flag for flag in flags if flag.startswith("--")} <= FRONTEND_FLAGS
        size = int(flags[flags.index("--kv-cache-block-size") + 1])
        assert size == build_parser().parse_args(["worker"]).block_size
    flags = shlex.split(SERVICES["frontend"]["command"])
    port = flags[flags.index("--http-port") + 1]
    assert SERVICES["frontend"]["ports"] == [f"127.0.0.1:{port}:{port}"]


@needs_dynamo
def test_dynamo_s_own_frontend_takes_these_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynamo.frontend.main import parse_args

    for flags in frontend_commands():
        monkeypatch.setattr(sys, "argv", ["dynamo.frontend", *flags])
        config, *_ = parse_args()
        assert (config.router_mode, config.migration_limit, config.discovery_backend) == ("kv", 3, "etcd")


class Service(HTTPServer):
    """A service that has a state."""

    status = 200


class Health(BaseHTTPRequestHandler):
    """Tells it at /health."""

    def do_GET(self) -> None:
        """Answer a question."""
        assert isinstance(self.server, Service)
        self.send_response(self.server.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def service() -> Iterator[Service]:
    """A service that runs."""
    with Service(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(PATIENCE_SEC)


@pytest.mark.parametrize("name", ["worker-1", "frontend"])
def test_a_health_check_tells_a_service_that_serves_from_one_that_does_not(name: str, service: Service) -> None:
    kind, program, option, code = SERVICES[name]["healthcheck"]["test"]
    assert (kind, program, option) == ("CMD", "python", "-c")
    port = str(service.server_port)
    command = [sys.executable, "-c", code.replace("127.0.0.1:8000", f"127.0.0.1:{port}")]
    environ = {"HOSTNAME": "127.0.0.1", "DYN_SYSTEM_PORT": port}
    for service.status, expected in ((200, 0), (503, 1)):
        done = subprocess.run(command, env=environ, capture_output=True, timeout=PATIENCE_SEC, check=False)
        assert done.returncode == expected, done.stderr.decode()


def test_a_worker_s_name_becomes_an_address_which_the_event_plane_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ip_address(address_of("localhost")).is_loopback
    assert address_of("192.0.2.7") == "192.0.2.7"
    names = {"127.0.1.1": socket.AF_INET, "2001:db8::7": socket.AF_INET6, "192.0.2.7": socket.AF_INET}
    known = [(family, socket.SOCK_STREAM, 6, "", (address, 0)) for address, family in names.items()]
    with monkeypatch.context() as resolved:
        for count, address in enumerate(names, 1):
            found = known[:count]
            resolved.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
            assert address_of("worker-1") == address
    assert capsys.readouterr().err.count("worker-1 is 127.0.1.1 here, which no other machine reaches") == 1
    assert main(["worker", "--host", "x" * 64]) == 2
    assert "--host: xxxx" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["32768", "http"])
def test_a_status_port_that_dynamo_cannot_read_is_refused(
    port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYN_SYSTEM_PORT", port)
    assert main(["worker"]) == 2
    assert "DYN_SYSTEM_PORT: " in capsys.readouterr().err
