"""`uma service`: the unit that it writes, what the service manager is told, and that all of it can be undone."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import PATIENCE_SEC
from uma.cli import main

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with service managers that write down what they are told; `fails` in it has them fail."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "fails").touch()
    for name in ("systemctl", "launchctl"):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/told\n[ "$(cat {tmp_path}/fails)" != "$2" ]\n')
        program.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def unit_of(home: Path) -> Path:
    return home / ".config" / "systemd" / "user" / "uma.service"


def told(home: Path) -> list[str]:
    return (home / "told").read_text().splitlines()


def test_a_unit_is_written_enabled_and_started_and_all_of_that_is_undone(
    home: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    options = ["--", "--http", "--model", 'a "model" of 5 %.gguf']
    assert main(["service", "install", *options]) == 2
    assert "model not found" in capsys.readouterr().err
    assert not (home / "told").exists(), "it would start in vain again and again"
    (home / options[-1]).touch()
    assert main(["service", "status"]) == 1
    capsys.readouterr()
    assert main(["service", "show", *options]) == 0
    shown = capsys.readouterr().out
    assert not (home / ".config").exists()
    assert main(["service", "install", *options]) == 0
    assert str(unit_of(home)) in capsys.readouterr().out
    assert (text := unit_of(home).read_text()) == shown
    assert f'ExecStart="{sys.executable}" "-m" "uma" "run" "--http" "--model" "a \\"model\\" of 5 %%.gguf"\n' in text
    assert f"\nWorkingDirectory=-{home}\n" in text, "where the model's path begins"
    asked = ["daemon-reload", "enable uma.service", "restart uma.service"]
    assert told(home) == [f"systemctl --user {each}" for each in asked]
    assert main(["service", "status"]) == 0
    assert "runs; its log: journalctl --user -u uma.service" in capsys.readouterr().out
    assert main(["service", "remove"]) == 0
    assert told(home)[-2:] == ["systemctl --user disable --now uma.service", "systemctl --user daemon-reload"]
    assert not unit_of(home).exists()
    assert main(["service", "remove"]) == 2
    assert "not found" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_unit(home: Path) -> None:
    assert main(["service", "install", "--", "--http", "--alias", "a $HOME %i"]) == 0
    verify = ["systemd-analyze", "verify", "--man=no", str(unit_of(home))]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=PATIENCE_SEC, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_cannot_be_started_leaves_nothing_behind(home: Path, capsys: Capsys) -> None:
    (home / "fails").write_text("enable\n")
    assert main(["service", "install"]) == 1
    assert "systemctl --user enable uma.service: failed" in capsys.readouterr().err
    assert not (home / ".config").exists(), "no empty folder"
    (home / "fails").write_text("")
    assert main(["service", "install"]) == 0
    before = unit_of(home).read_text()
    (home / "fails").write_text("enable\n")
    assert main(["service", "install", "--", "--http"]) == 1
    assert unit_of(home).read_text() == before


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Failed to connect to bus: No medium found", "no user bus of systemd, as after su or sudo; `sudo loginctl"),
        (
            "Failed to connect to user scope bus via local transport: $DBUS_SESSION_BUS_ADDRESS and $XDG_RUNTIME_DIR "
            "not defined (consider using --machine=<user>@.host --user to connect to bus of other user)",
            f"with XDG_RUNTIME_DIR=/run/user/{os.getuid()} in the environment",
        ),
        (
            "System has not been booted with systemd as init system (PID 1). Can't operate.\n"
            "Failed to connect to bus: Host is down",
            "systemd is not what started this system",
        ),
    ],
)
def test_where_systemd_cannot_be_reached_it_is_said_what_is_missing_and_what_to_do(
    home: Path, capsys: Capsys, said: str, told: str
) -> None:
    assert main(["service", "install"]) == 0
    (home / "said").write_text(f"{said}\n")
    (home / "bin" / "systemctl").write_text(f"#!/bin/sh\ncat {home}/said >&2\nexit 1\n")
    for action in ("install", "status"):
        assert main(["service", action]) == 2
        err = capsys.readouterr().err
        assert told in err
        assert "Failed" not in err
        assert "`uma run`" in err
    assert main(["service", "remove"]) == 0
    assert not unit_of(home).exists()


def test_a_unit_of_the_user_s_own_and_wrong_options_change_nothing(home: Path, capsys: Capsys) -> None:
    for wrong in (["--", "--modles"], ["--http"]):
        with pytest.raises(SystemExit):
            main(["service", "install", *wrong])
    assert "stands behind --: … -- --http" in capsys.readouterr().err
    assert not unit_of(home).exists()
    unit_of(home).parent.mkdir(parents=True)
    unit_of(home).write_text("[Service]\n")
    for action in ("install", "remove"):
        assert main(["service", action]) == 2
        assert "is left as it is" in capsys.readouterr().err
    assert unit_of(home).read_text() == "[Service]\n"


def test_macos_has_a_plist_of_launchd_s(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(["service", "install", "--", "--http"]) == 0
    path = home / "Library" / "LaunchAgents" / "uma.plist"
    assert plistlib.loads(path.read_bytes())["ProgramArguments"][1:] == ["-m", "uma", "run", "--http"]
    assert plistlib.loads(path.read_bytes())["WorkingDirectory"] == str(Path.cwd())
    assert main(["service", "remove"]) == 0
    assert [line.split()[1] for line in told(home)] == ["bootstrap", "bootout"]
    assert not path.exists()


def test_a_system_without_a_service_manager_is_told_so(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setenv("PATH", str(home))
    assert main(["service", "install"]) == 2
    assert "systemctl: not found" in capsys.readouterr().err
    assert not unit_of(home).exists()
