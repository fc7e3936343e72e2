"""The pages about running a server, and the unit for systemd, are true: defaults, options, log lines, folders."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import yaml
from http_server import new_key, running_http

from harness import PATIENCE_SEC, running_server, short_directory
from uma.cli.options import load_settings
from uma.cli.parser import build_parser
from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.engine.kv.disk import FOLDER
from uma.engine.ledger import Ledger
from uma.engine.sizing import RULES
from uma.figures import MB
from uma.jobs.store import MAX_FILE_BYTES
from uma.llama.model import Model
from uma.net import throttle

DOCS = Path(__file__).parents[1] / "docs"
NAMES = ("operations", "memory", "tuning", "exact", "slow")
PAGE = "\n".join((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in NAMES)
SERVICE = (DOCS / "service.md").read_text(encoding="utf-8")
UNIT = DOCS / "uma.service"


def test_the_limits_are_those_of_the_code() -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", PAGE, re.MULTILINE))
    defaults = attrs.asdict(RuntimeConfig())
    assert len(told) == 11
    assert told == {name: str(defaults[name]) for name in told}
    assert f"`--cache-disk-mb` ({defaults['cache_disk_mb']})" in PAGE
    assert f"{throttle.LINES_OF_ONE} lines and one a second for a session or an HTTP" in PAGE
    assert f"{throttle.LINES_OF_ALL} and {throttle.LINES_OF_ALL_PER_SEC:.0f} a second for all" in PAGE
    assert throttle.LINES_OF_ONE_PER_SEC == 1


EVENT_AT = {"log": (2, 1), "write": (2, 1), "log_often": (1, 0), "as_uma_error": (2, None)}
"""Places of an event's name and of its level among the arguments of what logs it, by that function's name."""


def logged() -> Iterator[tuple[str, set[str]]]:
    """The name of each event in the code, with the levels that it can have."""
    for path in sorted((DOCS.parent / "uma").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            event_at, level_at = EVENT_AT.get(name, (len(call.args), None))
            event = call.args[event_at] if len(call.args) > event_at else None
            if isinstance(event, ast.Constant) and isinstance(event.value, str):
                said = [] if level_at is None else ast.walk(call.args[level_at])
                yield event.value, {part.attr.lower() for part in said if isinstance(part, ast.Attribute)}


def test_the_tables_have_each_event_that_the_code_logs_with_its_level_and_no_others() -> None:
    tables = "".join(re.findall(r"^\| event \| level \| what happened \|\n((?:\|.*\n)+)", PAGE, re.MULTILINE))
    rows = re.findall(r"^\| (`[\w.`, ]+`) \| (\w+) \|", tables, re.MULTILINE)
    told = {event: level for events, level in rows for event in re.findall(r"[\w.]+", events)}
    levels = list(logged())
    assert len(levels) > 60
    assert {event for event, _ in levels} == told.keys()
    levels_of_calls = {"debug", "info", "warning", "error", "critical"}
    assert [(event, known) for event, known in levels if known & levels_of_calls and told[event] not in known] == []


def test_the_context_is_sized_as_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least, most = f"{RULES.min_pool_tokens:,}", f"{RULES.max_pool_tokens:,}"
    assert (
        f"{RULES.full_contexts} times the model's own context length, at least {least} tokens and at most {most}"
        in PAGE
    )
    assert f"{RULES.conversations} conversations of {RULES.conversation_tokens:,} tokens" in PAGE
    assert f"{RULES.pool_most:.0%}".replace("%", " %") in PAGE
    assert (RULES.pool_share, RULES.ram_share, RULES.max_ram_bytes) == (4, 8, 8_000 * MB)
    with Model.load(tiny) as model:
        cell = model.shape.bytes_per_token("f16", "f16")
        about_q8 = model.shape.bytes_per_token("q8_0", "q8_0") / cell
        for free_tokens, n_ctx in ((4 * 20_480, 20_480), (4 * 10_240, 16_384), (10_240, 7_168), (10**7, 65_536)):
            monkeypatch.setattr(
                sizing, "free_memory_bytes", lambda tokens=free_tokens: model.info.size_bytes + tokens * cell
            )
            assert Ledger(RuntimeConfig(), model.shape).context_params().n_ctx == n_ctx
    assert 0.4 < about_q8 < 0.6


def test_the_log_has_the_events_and_the_form_told_and_folders_the_modes(socket_dir: Path, tiny: Path) -> None:
    cache = socket_dir / "cache"
    with running_server(socket_dir / "s", "--model", str(tiny), "--cache-dir", str(cache)) as process:
        with process.connect() as raw:
            raw.hello()
            raw.send({"id": "a", "prompt": "x", "max_tokens": 1}, {"id": "b", "prompt": 1})
            raw.last_of("a")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    log = process.log.join()
    told = re.findall(r"^\| (`[\w.`, ]+`) \| (\w+) \|", PAGE, re.MULTILINE)
    levels = {event: level for events, level in told for event in re.findall(r"[\w.]+", events)}
    seen = re.findall(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\w+) uma\.\w+ event=(\S+)", log, re.MULTILINE)
    assert {"server.ready", "request.finished", "request.failed", "server.stopped"} <= {event for _, event in seen}
    assert all(levels[event] == level for level, event in seen if event in levels)
    assert FOLDER in PAGE
    assert (cache / FOLDER).stat().st_mode & 0o777 == 0o700


def test_the_proxy_of_the_page_takes_what_the_server_takes_by_the_name_that_it_knows() -> None:
    team = (DOCS / "team.md").read_text(encoding="utf-8")
    (host,) = re.findall(r"^uma run .*--http-hosts (\S+)$", team, re.MULTILINE)
    assert f"server_name {host};" in team
    (body_mb, file_mb) = map(int, re.findall(r"client_max_body_size (\d+)m; .* (\d+)m for the files", team)[0])
    assert body_mb * 2**20 >= RuntimeConfig().frame_bytes(takes_media=True)
    assert file_mb * 2**20 >= MAX_FILE_BYTES


def test_the_probes_shown_are_answered_without_a_key_and_the_grace_is_longer_than_a_drain(
    tmp_path: Path, tiny: Path
) -> None:
    (text,) = re.findall(r"```yaml\n(terminationGrace.*?)```", (DOCS / "operations.md").read_text(), re.DOTALL)
    pod = yaml.safe_load(text)
    assert pod["terminationGracePeriodSeconds"] > RuntimeConfig().drain_timeout_sec + 2
    probes = [probe["httpGet"] for name, probe in pod["containers"][0].items() if name.endswith("Probe")]
    assert len(probes) == 3
    new_key("ada", keys := tmp_path / "keys.toml")
    with (
        short_directory() as directory,
        running_http(directory, "--model", str(tiny), "--http-keys", str(keys)) as server,
    ):
        for probe in probes:  # by the pod's address, as the kubelet asks
            assert server.ask("GET", probe["path"], host=f"10.1.2.3:{probe['port']}").status == 200


def test_the_unit_starts_a_server_that_the_page_tells_of() -> None:
    (command,) = re.findall(r"^ExecStart=\S+/uma (.*)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE)
    options = build_parser().parse_args(shlex.split(command))
    assert load_settings(options).config.socket in SERVICE


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "uma.service"
    unit.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/uma/bin/uma", sys.executable), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SEC,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
