"""The clients that people use, with only their address changed."""

from __future__ import annotations

from typing import Any

import anthropic
import ollama
import openai
from http_server import HostedHttp, HttpServer

from harness import PATIENCE_SEC

_PLAIN: dict[str, Any] = {"max_retries": 0, "timeout": PATIENCE_SEC}


def openai_of(server: HttpServer | HostedHttp, key: str = "none") -> openai.OpenAI:
    """OpenAI's own client of a server; closed by its `with` block."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, **_PLAIN)


def claude_of(server: HttpServer | HostedHttp) -> anthropic.Anthropic:
    """Anthropic's."""
    return anthropic.Anthropic(base_url=server.url, api_key="none", **_PLAIN)


def ollama_of(server: HttpServer | HostedHttp) -> ollama.Client:
    """Ollama's."""
    return ollama.Client(host=server.url, timeout=PATIENCE_SEC)
