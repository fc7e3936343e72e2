"""`uma service`: a server that the system starts and keeps, by a unit of systemd's for this user or launchd's plist."""

from __future__ import annotations

import argparse
import getpass
import os
import plistlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import attrs

from uma import posix
from uma.cli.options import load_settings
from uma.cli.parser import build_parser
from uma.cli.table import print_wrapped
from uma.config import ALL_MODELS
from uma.errors import ConfigError, UmaError
from uma.models import catalog

MARK = "written by `uma service install`"
"""The words of every file that UMA can replace or remove."""
NAME = "uma.service"
CALL_SEC = 60.0
"""Maximum time of a call of the service manager; what stops first lets running requests finish."""
UNIT = """\
# {mark}; `uma service remove` undoes it
[Unit]
Description=UMA, one language model for every program of this user

[Service]
WorkingDirectory=-{folder}
ExecStart={command}
Restart=on-failure
# Slower than systemd's limit of starts: an address can come late, and another server end.
RestartSec=5
# More than drain_timeout_sec, which lets running requests finish.
TimeoutStopSec=15

[Install]
WantedBy=default.target
"""


@attrs.frozen
class Manager:
    """The system's keeper of services: the file that it reads, and what it is told."""

    path: Path
    text: str
    """The file, for the server that is asked for."""
    start: Sequence[Sequence[str]]
    stop: Sequence[Sequence[str]]
    is_active: Sequence[str]
    log: str
    """The command that shows what the server says."""
    hint: str
    """What to know once it is installed."""


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    manager = _manager(options.arguments)
    if options.action not in ("install", "show") and options.arguments:
        raise ConfigError(f"service {options.action}: takes no options of uma run; they are for install and show")
    if (
        options.action != "show"
        and manager.path.exists()
        and MARK not in manager.path.read_text(encoding="utf-8", errors="replace")
    ):
        raise ConfigError(f"{manager.path}: is not {MARK}, so it is left as it is; remove it, or manage it by hand")
    if options.action == "install":
        _check_models(options.arguments)
    return {"install": _install, "remove": _remove, "show": _show, "status": _status}[options.action](manager)


def _show(manager: Manager) -> int:
    print(manager.text, end="")
    return 0


def _install(manager: Manager) -> int:
    was = manager.path.read_text(encoding="utf-8") if manager.path.exists() else None
    made = [folder for folder in manager.path.parents if not folder.exists()]
    manager.path.parent.mkdir(parents=True, exist_ok=True)
    manager.path.write_text(manager.text, encoding="utf-8")
    try:
        _call(manager.stop if was is not None and sys.platform == "darwin" else (), is_checked=False)
        _call(manager.start)
    except BaseException:
        if was is None:
            with suppress(UmaError):
                _call(manager.stop, is_checked=False)
            manager.path.unlink()
            for folder in made:
                folder.rmdir()
        else:
            manager.path.write_text(was, encoding="utf-8")
        raise
    _tell(f"{'wrote' if was is None else 'replaced'} {manager.path}", *map(shlex.join, manager.start), manager.hint)
    return 0


def _check_models(arguments: Sequence[str]) -> None:
    """Raise `ModelError` where a model is not here for a service, which has none of this shell's variables."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UMA_")}
    config = load_settings(build_parser().parse_args(["run", *arguments]), environ).config
    for name in config.models.split(",") if config.models else [config.model]:
        if name != ALL_MODELS:
            catalog.resolve(name, environ)


def _remove(manager: Manager) -> int:
    if not manager.path.exists():
        raise ConfigError(f"{manager.path}: not found: no service is installed")
    _call(manager.stop, is_checked=False)  # a service that has ended is stopped, too
    manager.path.unlink()
    if sys.platform != "darwin":
        _call([_systemctl("daemon-reload")], is_checked=False)
    _tell(*map(shlex.join, manager.stop), f"removed {manager.path}")
    return 0


def _status(manager: Manager) -> int:
    if not manager.path.exists():
        _tell("no service is installed; `uma service install` does it")
        return 1
    asked = _run(manager.is_active)
    _check_manager(asked)
    is_active = asked.returncode == 0
    _tell(f"{manager.path}: {'runs' if is_active else 'does not run'}; its log: {manager.log}")
    return 0 if is_active else 1


def _manager(arguments: Sequence[str]) -> Manager:
    build_parser().parse_args(["run", *arguments])  # tells what is wrong now, and not at the next start
    command = [sys.executable, "-m", "uma", "run", *arguments]
    home = Path.home()
    if sys.platform == "darwin":
        path, domain = home / "Library" / "LaunchAgents" / "uma.plist", f"gui/{posix.user_id()}"
        log = home / "Library" / "Logs" / "uma.log"
        table = {"Label": "uma", "ProgramArguments": command, "RunAtLoad": True, "KeepAlive": {"SuccessfulExit": False}}
        table |= {"Comment": MARK, "StandardErrorPath": str(log), "WorkingDirectory": str(Path.cwd())}
        return Manager(
            path,
            plistlib.dumps(table).decode(),
            [["launchctl", "bootstrap", domain, str(path)]],
            [["launchctl", "bootout", f"{domain}/uma"]],
            ["launchctl", "print", f"{domain}/uma"],
            f"cat {log}",
            "it runs from now on whenever you are logged in",
        )
    if sys.platform != "linux":
        raise ConfigError("service: unsupported on this system: Linux with systemd and macOS have it")
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    return Manager(
        folder / "systemd" / "user" / NAME,
        UNIT.format(mark=MARK, command=" ".join(map(_quoted, command)), folder=str(Path.cwd()).replace("%", "%%")),
        [_systemctl("daemon-reload"), _systemctl("enable", NAME), _systemctl("restart", NAME)],
        [_systemctl("disable", "--now", NAME)],
        _systemctl("is-active", "--quiet", NAME),
        f"journalctl --user -u {NAME}",
        "it runs from now on whenever you are logged in; `loginctl enable-linger` has it run without that",
    )


def _systemctl(*words: str) -> list[str]:
    return ["systemctl", "--user", *words]


def _quoted(word: str) -> str:
    """A word as systemd reads it: in quotes, without its specifiers and variables."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _call(commands: Sequence[Sequence[str]], *, is_checked: bool = True) -> None:
    for command in commands:
        done = _run(command)
        if done.returncode and is_checked:
            _check_manager(done)
            said = done.stderr.strip() or f"exit code {done.returncode}"
            raise UmaError(f"{shlex.join(command)}: failed: {said}")


def _check_manager(done: subprocess.CompletedProcess[str]) -> None:
    """Raise `ConfigError` where a call has not reached the service manager: systemd's own words name no way out."""
    if "booted with systemd" in done.stderr:
        raise ConfigError(
            "service: systemd is not what started this system, as in most containers; have what starts its programs "
            "start `uma run`"
        )
    if "connect to" in done.stderr and " bus" in done.stderr:
        raise ConfigError(
            "service: this login has no user bus of systemd, as after su or sudo; `sudo loginctl enable-linger "
            f"{getpass.getuser()}` starts one, and with XDG_RUNTIME_DIR=/run/user/{posix.user_id()} in the environment "
            "`uma service` finds it; `uma run` serves without it"
        )


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=CALL_SEC, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"{command[0]}: not found: this system has no such service manager; `uma run` serves"
        ) from None
    except subprocess.TimeoutExpired:
        raise UmaError(f"{shlex.join(command)}: timeout: no answer within {CALL_SEC:g} s") from None


def _tell(*lines: str) -> None:
    for line in lines:
        print_wrapped(line)
