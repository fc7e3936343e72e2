"""What is said of pictures and sounds is what the real llama-server says, where `python -m benchmarks.build_peers` has
built one; elsewhere these are left out, and llama.cpp's own helpers are what the others compare with.
"""

from __future__ import annotations

import base64
import json
import urllib.request
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_world import SMALL_WINDOWS
from every_kind import write_named
from http_server import running_http
from projectors import Hearing, Seeing, bmp, png, wav, write_projector, write_seeing_model
from real_llama_server import llama_server

from benchmarks.cache import peer_binary
from harness import EXACT, ONE_THREAD, run_uma, short_directory, until

pytestmark = pytest.mark.skipif(not peer_binary("llama-server").exists(), reason="llama-server is not built")
LENGTH = 24
LONG = 60
"""Tokens of answers that are preempted."""


def seeing(model: Path, projector: Path) -> AbstractContextManager[str]:
    """The URL of a llama-server that sees and hears."""
    return llama_server(model, "--mmproj", str(projector), "--jinja", "--ctx-size", "2048", "--no-mmproj-offload")


def said(url: str, *parts: Any) -> str:
    """The answer to a chat's one message."""
    return answered(url, [{"role": "user", "content": list(parts)}])[0]


def answered(url: str, messages: Sequence[Any], length: int = LENGTH) -> tuple[str, int]:
    """The answer to a chat, and how many tokens of its prompt were cached."""
    body = {"messages": messages, "max_tokens": length, **PLAIN}
    answer = posted(f"{url}/v1/chat/completions", json.dumps(body).encode())
    cached = answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return whole(answer["choices"][0]["message"]["content"]), cached


def continued(url: str, *parts: Any) -> str:
    """What follows the same parts without a chat template."""
    with urllib.request.urlopen(f"{url}/props", timeout=60) as answer:
        mark = json.loads(answer.read())["media_marker"]
    files = [next(iter(part[part["type"]].values())) for part in parts if part["type"] != "text"]
    prompt = {
        "prompt_string": f"<|im_start|>See {''.join(part.get('text', mark) for part in parts)}<|im_end|>",
        "multimodal_data": [each.rpartition(",")[2] for each in files],
    }
    body = {"prompt": prompt, "n_predict": LENGTH, **PLAIN}
    return whole(posted(f"{url}/completion", json.dumps(body).encode())["content"])


def whole(said: str) -> str:
    """Without what stands for parts of characters: of how many bytes one mark is made is each server's own."""
    return said.replace("\ufffd", "")


def written(url: str, file: bytes) -> str:
    """The transcript of a sound."""
    mark = uuid.uuid4().hex
    fields = {"model": "any", "max_tokens": str(LENGTH), "temperature": "0"}
    text = "".join(f'--{mark}\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n' for k, v in fields.items())
    text += f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    form = text.encode() + file + f"\r\n--{mark}--\r\n".encode()
    kind = f"multipart/form-data; boundary={mark}"
    return whole(posted(f"{url}/v1/audio/transcriptions", form, kind)["text"])


def posted(url: str, data: bytes, kind: str = "application/json") -> Any:
    request = urllib.request.Request(url, data, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


PLAIN = {"temperature": 0, "top_k": 1, "ignore_eos": True}


def text(told: str) -> dict[str, str]:
    return {"type": "text", "text": told}


def picture(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file).decode()}"}}


def sound(file: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": "wav"}}


@pytest.mark.parametrize(("sees", "hears"), [("llava", "ultravox"), ("qwen2vl", "gemma4ua"), ("llava", "gemma4ua")])
def test_the_text_is_llama_server_s(tmp_path: Path, sees: Seeing, hears: Hearing) -> None:
    model = write_seeing_model(tmp_path / "model.gguf", sees)
    projector = write_projector(tmp_path / "mmproj.gguf", sees, hears=hears)
    asked = [
        (picture(png(40, 30, 1)), text("What is this?")),
        (text("Compare"), picture(png(90, 61, 2)), text("to"), picture(bmp(31, 17, 4))),
        (sound(wav(0.4, 1)), text("What is this?")),
        (text("Listen."), sound(wav(2, 2)), picture(png(56, 56, 3)), text("Well?")),
    ]
    with (
        seeing(model, projector) as theirs,
        short_directory() as directory,
        running_http(directory, "--model", str(model), "--alias=*", *EXACT, *ONE_THREAD) as ours,
    ):
        for parts in asked:
            assert said(ours.url, *parts) == said(theirs, *parts), parts[0]
            assert continued(ours.url, *parts) == continued(theirs, *parts), parts[0]
        assert written(ours.url, wav(1, 5)) == written(theirs, wav(1, 5))


@pytest.mark.parametrize("kind", ["qwen3vl", "lfm2", "gemma3"])
def test_with_recurrent_states_and_small_windows_the_text_is_llama_server_s_too(tmp_path: Path, kind: Seeing) -> None:
    """Alone, eight at once behind a system prompt and pictures that they share, preempted, and from the disk."""
    is_windowed = kind == "gemma3"
    model = write_named(tmp_path, SMALL_WINDOWS) if is_windowed else write_seeing_model(tmp_path / "model.gguf", kind)
    projector = write_projector(tmp_path / "mmproj.gguf", kind)
    system, pictures = {"role": "system", "content": "You are helpful. " * 9}, [png(200, 160, at) for at in range(3)]
    chats = [
        [
            system,
            {"role": "user", "content": [text("Look."), picture(pictures[at % 3]), text("Well? " * (1 + at // 3))]},
        ]
        for at in range(8)
    ]
    chats.append([*chats[0], {"role": "assistant", "content": "A thing."}, {"role": "user", "content": "Sure?"}])
    flags = ["--model", str(model), *EXACT, *ONE_THREAD, *(["--swa-full", "off"] if is_windowed else [])]
    with seeing(model, projector) as theirs:
        expected = [answered(theirs, chat, LONG)[0] for chat in chats]
    with short_directory() as directory:
        kept = [*flags, "--cache-dir", str(tmp_path / "cache")]
        with running_http(directory, *kept) as ours, ThreadPoolExecutor(8) as eight:
            assert [answered(ours.url, chat, LONG)[0] for chat in chats[:1]] == expected[:1]
            assert [answer for answer, _ in eight.map(partial(answered, ours.url, length=LONG), chats)] == expected
        with running_http(directory, *kept) as ours:
            again = [answered(ours.url, chat, LONG) for chat in chats]
            assert [answer for answer, _ in again] == expected
            assert again[-1][1] > 100
        with running_http(directory, *flags, "--n-ctx", "768") as ours, ThreadPoolExecutor(9) as at_once:
            at = "--socket", str(ours.process.socket)
            assert run_uma(("pause", *at)).returncode == 0
            given = at_once.map(partial(answered, ours.url, length=LONG), chats)
            until(ours.process.metrics, lambda now: now["active_sequences"] + now["queued_requests"] == 9)
            assert run_uma(("resume", *at)).returncode == 0
            assert [answer for answer, _ in given] == expected
            metrics = urllib.request.urlopen(f"{ours.url}/metrics", timeout=60).read().decode()
            preempted = [line for line in metrics.splitlines() if line.startswith("uma_preemptions_total")]
            assert preempted
            assert float(preempted[0].split()[-1]) > 0
