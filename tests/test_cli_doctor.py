"""`uma doctor` tells what is there, and what to do where something is in the way."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from http_server import new_key
from hybrids import write_hybrid
from projectors import write_projector, write_seeing_model

from harness import ServerProcess, clean_environ, run_to_end, uma_command, until, write_certificate
from models import write_encoder, write_large_cells
from uma.cli import checks, doctor, main, ps
from uma.cli.checks import Check
from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.llama import backend, extra_buffers, library, pages
from uma.models.catalog import MAX_BROKEN
from uma.net.controls import TABLE
from uma.supervisor.estimate import planned_memory

Capsys = pytest.CaptureFixture[str]

NAMES = ["UMA", "llama.cpp", "extra buffers", "CPU", "instructions", "GPU", "memory", "context", "threads",
         "huge pages", "socket", "model", "models", "server"]  # fmt: skip


@pytest.fixture(autouse=True)
def sound_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine where nothing needs doing: what this very one has found out is another test's business."""
    for name in [name for name in os.environ if name.startswith("UMA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(extra_buffers, "names", lambda: ("SOUND",))
    monkeypatch.setattr(pages, "gives_huge_pages", lambda: True)
    monkeypatch.setattr(checks, "BUILD_FLAGS", {})
    monkeypatch.setattr(checks, "GPU_TRACES", {})
    monkeypatch.setattr(checks, "PRESSURE", tmp_path / "none")
    monkeypatch.setattr(ps, "listening_sockets", list)


async def too_slow(_: RuntimeConfig) -> Check:
    """A server that does not answer in time."""
    raise trio.TooSlowError


def run(capsys: Capsys, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = main(["doctor", "--json", *arguments])
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] == (code == 0)
    return code, {each["name"]: each for each in answer["checks"]}


def test_where_nothing_needs_doing_every_check_is_told_and_the_exit_code_is_0(capsys: Capsys) -> None:
    code, found = run(capsys)
    assert (code, list(found)) == (0, NAMES)
    assert all(each["finding"] and not each["todo"] for each in found.values())
    assert found["extra buffers"]["finding"] == "SOUND"
    assert found["server"]["finding"].startswith("none runs")
    assert str(Path("uma") / "uma.sock") in found["socket"]["finding"]


def test_people_get_a_table_and_what_to_do_below_it(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("UMA works here.")
    assert not re.search("extra buffers|instructions|KV|hugepage", told), "nothing is to be done about them"
    assert main(["doctor", "--details"]) == 0
    assert "extra buffers" in capsys.readouterr().out
    (tmp_path / "broken.gguf").write_bytes(b"GGUF of no kind")
    monkeypatch.setenv("UMA_MODELS", str(tmp_path))
    assert main(["doctor", "--model", "broken"]) == 1
    first, broken, *_ = capsys.readouterr().out.splitlines()
    assert first == "Something is in the way:"
    assert broken.startswith("! model: ")
    assert "broken.gguf" in broken


def test_a_broken_file_that_nothing_uses_is_told_and_in_nobodys_way(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UMA_MODELS", str(tmp_path))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF of no kind")
    code, found = run(capsys)
    assert (code, found["models"]["todo"]) == (0, "")
    assert re.search(r"broken files, .*: \S+broken\.gguf: ", found["models"]["lacks"])
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("UMA works here, but not with every model:\n! models: broken files, ")
    for number in range(MAX_BROKEN):
        (tmp_path / f"broken-{number}.gguf").write_bytes(b"GGUF of no kind")
    assert "; 1 more broken files: " in run(capsys)[1]["models"]["lacks"]


@pytest.mark.parametrize("option", ["--http-keys", "--http-tls-cert", "--socket-users"])
def test_a_broken_file_of_a_server_that_runs_is_told_with_what_the_server_does(
    capsys: Capsys, tmp_path: Path, option: str
) -> None:
    file = tmp_path / "file"
    file.write_text("[broken\n")
    more = ("--http-tls-key", str(file)) if option == "--http-tls-cert" else ()
    code, found = run(capsys, option, str(file), *more)
    assert (code, found["access"]["finding"]) == (1, str(file))
    assert found["access"]["todo"].startswith(f"{option}: {file}")
    assert found["access"]["todo"].endswith("a server that runs keeps what it read before")


def test_a_certificate_that_expires_soon_and_a_key_that_others_can_read_are_told(
    capsys: Capsys, tmp_path: Path
) -> None:
    cert, key = write_certificate(tmp_path)
    flags = ("--http-tls-cert", str(cert), "--http-tls-key", str(key))
    code, found = run(capsys, *flags)
    assert code == 1
    assert re.search(r"the certificate expires at 2[\d-]+ [\d:]+ UTC; renew it$", found["access"]["todo"])
    write_certificate(tmp_path, 90)
    assert run(capsys, *flags)[0] == 0
    key.chmod(0o644)
    told = run(capsys, *flags)[1]["access"]["todo"]
    assert told == f"http_tls_key: {key}: mode 644 lets other users use the private key: chmod o= {key}"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of processes")
def test_a_broken_file_of_keys_of_a_server_that_runs_is_told_whatever_the_settings_here_are(
    capsys: Capsys, socket_dir: Path
) -> None:
    keys, config = socket_dir / "keys.toml", socket_dir / "uma.toml"
    new_key("ada", keys)
    config.write_text('http_keys = "keys.toml"\nhttp = "127.0.0.1:0"\nhttp_jobs = "jobs"\n')
    command = uma_command("run", "--socket", "s", "--config", config.name)  # what is relative is the server's
    with subprocess.Popen(command, cwd=socket_dir, env=clean_environ()) as server:  # forked it would have no command
        try:
            until(lambda: run(capsys, "--socket", str(socket_dir / "s")), lambda told: "ok" in str(told[1]["server"]))
            code, found = run(capsys, "--socket", str(socket_dir / "s"))
            assert (code, found["access"]["finding"]) == (0, str(keys))
            assert found["disk"]["finding"].startswith(f"{socket_dir / 'jobs'}, ")
            keys.write_text("[broken\n")
            code, found = run(capsys, "--socket", str(socket_dir / "s"))
        finally:
            server.terminate()
    assert (code, "is not TOML" in found["access"]["todo"]) == (1, True)


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="only root mounts a small disk")
@pytest.mark.parametrize("setting", ["UMA_HTTP_JOBS", "UMA_CACHE_DIR"])
def test_a_full_disk_that_a_server_would_write_to_is_told(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str
) -> None:
    folder = tmp_path / "small"
    monkeypatch.setenv("UMA_HTTP", "127.0.0.1:0")
    monkeypatch.setenv(setting, str(folder / "own"))
    assert run(capsys)[0] == 0
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "none", folder], check=False)
    if mounted.returncode:
        pytest.skip("this container mounts nothing")
    try:
        code, told = main(["doctor", "--json"]), capsys.readouterr().out
    finally:
        subprocess.run(["umount", folder], check=True)
    assert (code, f"the disk of {folder / 'own'} is full" in told) == (1, True)


def test_a_machine_whose_threads_wait_for_each_other_is_marked_and_told_what_to_do(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "PRESSURE", tmp_path / "pressure")
    checks.PRESSURE.write_text("some avg10=96.00 avg60=96.20 avg300=8.00 total=1\n")
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"^\+ +threads .* 96 % of the last minute$", told, re.MULTILINE)
    assert told.startswith("UMA works here, and could be faster:\n+ threads: more threads want the CPUs than there are")


def test_the_model_is_the_one_that_uma_run_would_have(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    monkeypatch.setenv("UMA_MODELS", str(tiny.parent))
    assert str(tiny) in run(capsys)[1]["model"]["finding"]
    assert "story" in run(capsys, "--model", "builtin")[1]["model"]["finding"]


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_no_name_in_what_it_tells_is_obeyed_by_a_terminal(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    folder = tmp_path / "\x1b]0;owned\x07\x7f\u202e\u034f"
    folder.mkdir()
    (folder / "broken.gguf").write_bytes(b"GGUF of no kind")
    monkeypatch.setenv("UMA_MODELS", str(folder))
    assert main(["doctor", *arguments]) == 0
    told = capsys.readouterr().out
    assert "owned" in told
    assert not [char for char in told if ord(char) in TABLE]


def test_amx_is_told_as_left_out_with_how_to_have_it(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra_buffers, "names", lambda: ("AMX", "SOUND"))
    code, found = run(capsys)
    assert code == 0, "it works without"
    assert found["extra buffers"]["finding"] == "SOUND; left out: AMX"
    assert "--extra-buffers on" in found["extra buffers"]["faster"]
    assert "pip install" in found["extra buffers"]["faster"]
    assert not run(capsys, "--extra-buffers", "off")[1]["extra buffers"]["faster"]
    assert run(capsys, "--extra-buffers", "on")[1]["extra buffers"]["finding"] == "AMX, SOUND; the setting is on"


def test_a_build_that_leaves_the_cpu_unused_is_to_be_rebuilt(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "BUILD_FLAGS", {"avx9": "AVX9"})
    monkeypatch.setattr(library, "cpu_field", lambda *_: "avx2 avx9")
    code, found = run(capsys)
    assert code == 0
    assert "AVX9" in found["CPU"]["faster"]
    assert main(["doctor"]) == 0
    assert "+ CPU: the CPU has AVX9" in capsys.readouterr().out


def test_what_texts_would_take_of_memory_is_told_before_a_server_is_started(capsys: Capsys, tmp_path: Path) -> None:
    named = ("--model", str(write_hybrid(tmp_path / "hybrid.gguf", "qwen35")), "--max-sequences", "3")
    assert re.fullmatch(
        r"hybrid: KV of [\d,]+ tokens [\d.]+ MB · 4 recurrent states [\d.]+ kB",
        run(capsys, *named)[1]["context"]["finding"],
    )
    encoder = write_encoder(tmp_path / "encoder.gguf")
    assert run(capsys, "--model", str(encoder))[1]["context"]["finding"] == "an encoder keeps nothing of a text"


def test_a_projector_is_counted_where_memory_is_planned(capsys: Capsys, tmp_path: Path) -> None:
    path = write_seeing_model(tmp_path / "model.gguf", "llava")
    (tmp_path / "elsewhere").mkdir()
    projector = write_projector(tmp_path / "elsewhere" / "mmproj.gguf")
    plain = planned_memory(path, RuntimeConfig())[0]
    assert planned_memory(path, RuntimeConfig(mmproj=str(projector)))[0] == plain + projector.stat().st_size
    named = ("--model", str(path), "--mmproj", str(projector))
    assert re.search(r"model.gguf has [\d.]+ kB, its projector [\d.]+ kB", run(capsys, *named)[1]["memory"]["finding"])
    assert "projector" not in run(capsys, *named[:3], "off")[1]["memory"]["finding"]


def test_a_model_without_memory_for_its_texts_is_told_and_one_with_little(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write_large_cells(tmp_path / "7b.gguf", layers=32, kv_heads=32)
    for free_bytes, finding, todo in (
        (2**33, "less than 4 conversations of 4,096: beside the weights", ""),
        (2**20, "there is no memory for it", "n_ctx: beside the weights there is memory for"),
    ):
        monkeypatch.setattr(sizing, "free_memory_bytes", lambda free_bytes=free_bytes: free_bytes)
        found = run(capsys, "--model", str(path))[1]["context"]
        assert finding in found["finding"]
        assert found["todo"].startswith(todo) and bool(found["todo"]) == bool(todo)


def test_a_gpu_that_this_build_cannot_use_is_told(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "GPU_TRACES", {str(tmp_path): ("a GPU", "-DGGML_X=on")})
    monkeypatch.setattr(backend, "has_gpu", lambda: False)
    code, found = run(capsys)
    assert code == 0
    assert f"CMAKE_ARGS=-DGGML_X=on {shlex.quote(sys.executable)} -m pip install" in found["GPU"]["faster"]


def test_settings_that_cannot_work_are_told_before_a_server_is_started(capsys: Capsys, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, found = run(
        capsys,
        *("--model", str(tmp_path / "none.gguf"), "--threads", "1000"),
        *("--socket", str(tmp_path / "file"), "--cache-dir", str(tmp_path / "file" / "folder")),
    )
    assert code == 1
    assert "no such file" in found["model"]["todo"]
    assert "1000 threads" in found["threads"]["todo"]
    assert "is no socket" in found["socket"]["todo"]
    assert "--cache-dir" in found["cache_dir"]["todo"]


@pytest.mark.parametrize(("use_mmap", "tells"), [("auto", True), ("on", False)])
def test_without_huge_pages_decoding_is_slower_unless_weights_are_mapped(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, use_mmap: str, tells: bool
) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(pages, "SETTING", setting)
    monkeypatch.setattr(pages, "gives_huge_pages", lambda: False)
    found = run(capsys, "--use-mmap", use_mmap)[1]["huge pages"]
    assert ("decoding is several percent slower" in found["finding"]) is tells
    assert bool(found["faster"]) is tells


@pytest.mark.parametrize(
    ("patched", "name", "finding", "advice"),
    [
        ({"sizing.free_memory_bytes": lambda: 1}, "memory", "builtin has", "todo: take a smaller model"),
        ({"pages.gives_huge_pages": lambda: False}, "huge pages", "never given", "faster: as root: echo madvise"),
        ({"backend.affinity": lambda: frozenset({0, 1}), "backend.available_cores": lambda *_: 0.5},
         "threads", "on 2 of [0-9]+ CPUs, a quota of 0.5; threads waited for a CPU during 42 % of the last minute", ""),
        ({"_ask_server": too_slow}, "server", "does not answer", "todo: timeout: no answer within 15 s"),
    ],
)  # fmt: skip
def test_what_a_machine_lacks_is_told_with_what_to_do(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    patched: dict[str, Callable[..., object]], name: str, finding: str, advice: str,
) -> None:  # fmt: skip
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(pages, "SETTING", setting)
    monkeypatch.setattr(checks, "PRESSURE", tmp_path / "pressure")
    checks.PRESSURE.write_text("some avg10=90.00 avg60=41.60 avg300=8.00 total=1\nfull avg10=0.00 avg60=0.00 total=0\n")
    for target, instead in patched.items():
        monkeypatch.setattr(f"uma.cli.checks.{target}", instead)
    (tmp_path / "socket").touch()
    code, found = run(capsys, "--socket", str(tmp_path / "socket") if name == "server" else str(tmp_path / "s"))
    assert re.search(finding, found[name]["finding"])
    told = [f"{kind}: {found[name][kind]}" for kind in ("todo", "faster") if found[name][kind]]
    assert len(told) == bool(advice)
    assert all(re.match(advice, each) for each in told)
    assert code == (1 if advice.startswith("todo") else 0)


def test_a_socket_folder_that_others_can_write_to_is_told(capsys: Capsys, tmp_path: Path) -> None:
    (tmp_path / "uma").mkdir()
    (tmp_path / "uma").chmod(0o777)
    code, found = run(capsys)
    assert code == 1
    assert "other users" in found["socket"]["todo"]


def test_a_server_that_runs_is_asked_for_a_token(capsys: Capsys, server: ServerProcess) -> None:
    code, found = run(capsys, "--socket", str(server.socket))
    assert code == 0
    assert found["server"]["finding"].startswith("ok, a token after ")
    assert not found["socket"]["todo"]


def test_a_server_that_is_paused_is_told_with_what_ends_that(capsys: Capsys, server: ServerProcess) -> None:
    run_to_end(*uma_command("pause", "--for", "10m", "--socket", str(server.socket)))
    try:
        _, found = run(capsys, "--socket", str(server.socket))
    finally:
        run_to_end(*uma_command("resume", "--socket", str(server.socket)))
    assert re.fullmatch(r"paused for (10|9) min more: it computes nothing", found["server"]["finding"])
    assert found["server"]["todo"] == "`uma resume` continues"


def test_a_socket_that_a_dead_server_left_is_in_no_servers_way(capsys: Capsys, socket_dir: Path) -> None:
    import socket

    path = socket_dir / "left"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    code, found = run(capsys, "--socket", str(path))
    assert (code, found["server"]["finding"]) == (0, "none runs; one has left its socket")


def test_the_real_findings_of_this_machine_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = {each.name: each for each in doctor.examine(RuntimeConfig())}
    assert all(name in found["extra buffers"].finding for name in extra_buffers.names())
    assert str(library.library_file()) in found["llama.cpp"].finding
    assert library.cpu_name() in found["CPU"].finding
