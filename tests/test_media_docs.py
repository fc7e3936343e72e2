"""docs/media.md is true: its Python is sent as it is pasted, and a model that sees answers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from http_server import running_http
from projectors import png, write_projector, write_seeing_model

from harness import run_to_end, short_directory

PAGE = (Path(__file__).parents[1] / "docs" / "media.md").read_text(encoding="utf-8")


def test_the_picture_of_the_example_is_answered(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    path = write_seeing_model(tmp_path / "model.gguf", "gemma3")
    write_projector(tmp_path / "mmproj.gguf", "gemma3")
    (tmp_path / "cat.png").write_bytes(png(8, 8))
    with short_directory() as directory, running_http(directory, "--model", str(path), "--alias", "*") as server:
        pasted = code.replace("http://127.0.0.1:8080", server.url).replace("cat.png", str(tmp_path / "cat.png"))
        done = run_to_end(sys.executable, "-c", pasted.replace("model=", "max_tokens=4, model="))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
