"""Texts with LoRA adapters are the real llama-server's, where `python -m benchmarks.build_peers` has built one."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from adapters import write_adapter
from engine_world import tokens_for
from http_server import running_http
from real_llama_server import llama_server

from benchmarks.cache import peer_binary
from harness import EXACT, ONE_THREAD, short_directory
from models import write_model

pytestmark = pytest.mark.skipif(not peer_binary("llama-server").exists(), reason="llama-server is not built")
INVOCATION = (65, 66, 65)


def completed(url: str, seed: int, lora: list[Any]) -> str:
    prompt = (*tokens_for(seed, 40), *INVOCATION, *tokens_for(seed + 9, 20))
    body = {"prompt": prompt, "n_predict": 24, "temperature": 0, "ignore_eos": True, "lora": lora}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.loads(answer.read())["content"]
    return text.replace("\ufffd", "")  # of how many bytes one mark is made is each server's own


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_text_with_adapters_is_llama_servers(kind: Any, tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.gguf", kind=kind, context_length=2_048)
    files = [write_adapter(tmp_path / f"{seed}.gguf", model, seed=seed) for seed in (1, 2)]
    # llama-server begins a token before the invocation; so its file does not name the first one.
    late, early = (
        write_adapter(tmp_path / f"{name}.gguf", model, seed=1, invocation=tokens)
        for name, tokens in (("late", INVOCATION), ("early", INVOCATION[1:]))
    )
    adapters = [flag for file in (*files, late) for flag in ("--lora", f"a{file.stem}={file}")]
    flags = ("--model", str(model), *adapters, *EXACT, *ONE_THREAD)
    theirs = [flag for file in (*files, early) for flag in ("--lora", str(file))]
    asked = [
        (seed, [{"id": id, "scale": scale} for id, scale in enumerate(scales)])
        for seed in (1, 2)
        for scales in ((0, 0), (1, 0), (0, 0.5), (1, 1), (2, -0.25), (0, 0, 1), (0, 0, 0.5))
    ]
    with (
        short_directory() as folder,
        running_http(folder, *flags) as server,
        llama_server(model, "--ctx-size", "1024", *theirs) as real,
    ):
        found = [completed(server.url, *each) for each in asked]
        assert found == [completed(real, *each) for each in asked]
    assert len(set(found)) == len(asked)
