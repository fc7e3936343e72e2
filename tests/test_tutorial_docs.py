"""docs/tutorial.md is true: its lines run in a shell as they are pasted, in their order, with a real model."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from http_server import running_http
from hub_server import running_hub
from reference import real_model
from required import required_command

from harness import PATIENCE_SEC, clean_environ, short_directory

PAGE = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh( background)?\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PLACE = "http://127.0.0.1:8080"
REPOSITORY = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"


def test_every_line_can_be_pasted_one_after_the_other(tmp_path: Path) -> None:
    required_command("curl")
    model = real_model("qwen2.5-coder")
    at = next(at for at, (background, _) in enumerate(BLOCKS) if background)
    flags = shlex.split(BLOCKS[at][1])
    assert flags[:3] == ["uma", "run", "--http"]
    uma = tmp_path / "bin" / "uma"
    uma.parent.mkdir()
    uma.write_text(f'#!/bin/sh\nexec {sys.executable} -m uma "$@"\n', encoding="utf-8")
    uma.chmod(0o755)
    agent = uma.parent / "codex"
    agent.write_text("#!/bin/sh\necho codex is told of $*\n", encoding="utf-8")
    agent.chmod(0o755)
    with running_hub({REPOSITORY: {model.name: model.read_bytes()}}) as hub, short_directory() as directory:
        environ = clean_environ(
            HF_ENDPOINT=hub.url,
            HF_HOME=str(tmp_path / "hf"),
            HOME=str(tmp_path),
            XDG_RUNTIME_DIR=str(directory),
            UMA_N_CTX="2048",
        )
        environ["PATH"] = f"{uma.parent}:{environ['PATH']}"

        def paste(blocks: list[tuple[str, str]], place: str = PLACE) -> str:
            script = "set -e\n" + "".join(text for _, text in blocks).replace(PLACE, place)
            done = subprocess.run(
                ["bash", "-c", script],
                cwd=tmp_path,
                env=environ,
                capture_output=True,
                text=True,
                timeout=3 * PATIENCE_SEC,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        assert "qwen2.5-coder" in paste(BLOCKS[:at]).lower()
        places = {name: environ[name] for name in ("HF_HOME", "HOME", "UMA_N_CTX")}
        with running_http(directory, *flags[3:], **places) as server:
            environ["UMA_SOCKET"] = str(server.process.socket)
            said = paste(BLOCKS[at + 1 :], server.url)
            assert '"choices"' in said
            assert "codex is told of -c model=" in said
            assert server.process.wait() == 0
    assert len((tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()) == 3
