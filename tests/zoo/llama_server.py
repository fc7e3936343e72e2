"""llama-server as a yardstick, where `python -m benchmarks.build_peers` has built it: its prompts and its answers.

`python tests/zoo/record_llama_server.py` keeps what it says, so that tests compare with it where it is missing.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
from conversations import PROMPTS, openai, openai_tool
from required import missing

from benchmarks.cache import peer_binary
from harness import PATIENCE_SEC, Log

RECORDED = Path(__file__).parent / "llama_server.json"
"""What llama-server said when that was last recorded."""
REFUSED = "refused"
"""In place of a prompt that llama-server's template refuses."""

_DATES = ("%d %b %Y", "%b %d %Y", "%B %d, %Y", "%d %B %Y", "%Y-%m-%d")
"""Forms in which templates write today's date."""


def llama_server() -> Path:
    """The program; a test is skipped where it is missing."""
    path = peer_binary("llama-server")
    return path if path.exists() else missing("llama-server", "no llama-server: python -m benchmarks.build_peers")


@contextmanager
def running_llama_server(model: Path, *flags: str) -> Iterator[httpx.Client]:
    """llama-server with a model, on a port of the system's choice, and a client of it; ended with the block."""
    command = [str(llama_server()), "-m", str(model), "--host", "127.0.0.1", "--port", "0", "--no-warmup", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log = Log(process.stdout)
    try:
        url = "http://" + log.wait_for("listening on http://").rpartition("http://")[2].split()[0]
        with httpx.Client(base_url=url, timeout=PATIENCE_SEC) as client:
            yield client
    finally:
        process.kill()
        process.wait()
        log.join()


def prompt_of(client: httpx.Client, name: str) -> str | None:
    """The prompt that llama-server makes of a conversation of `PROMPTS`, without today's date; None where it makes
    none.
    """
    conversation = PROMPTS[name]
    body: dict[str, Any] = {"messages": [openai(each) for each in conversation.messages]}
    if conversation.tools:
        body["tools"] = [openai_tool(each) for each in conversation.tools]
    body["chat_template_kwargs"] = {"enable_thinking": conversation.reasoning == "on"}
    answer = client.post("/apply-template", json=body)
    return without_today(answer.json()["prompt"]) if answer.status_code == 200 else None


def tokens_of(client: httpx.Client, text: str) -> list[int]:
    """The tokens that llama-server reads a prompt as."""
    asked = {"content": text, "add_special": True, "parse_special": True}
    answer = client.post("/tokenize", json=asked).raise_for_status()
    return [int(token) for token in answer.json()["tokens"]]


def without_today(text: str) -> str:
    """A prompt in which today's date, or yesterday's, is a word."""
    for day in (date.today(), date.today() - timedelta(days=1)):
        for form in _DATES:
            text = text.replace(day.strftime(form), "TODAY")
    return text


def digest(tokens: list[int]) -> str:
    """A short text for a prompt's tokens."""
    return sha256(",".join(map(str, tokens)).encode()).hexdigest()[:12]
