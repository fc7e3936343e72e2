"""While a long prompt is read, its stream says that it is alive, and how far it is."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from http_server import HttpServer, running_http

from harness import short_directory
from models import write_model

PROMPT = "x" * 60_000
"""With this model a CPU of any kind reads on it for longer than a stream is silent: 2 TFLOP for one thread."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server whose model is slow for its size."""
    slow = write_model(tmp_path_factory.mktemp("slow") / "slow.gguf", feed_forward=24_000, context_length=65_536)
    flags = ("--model", str(slow), "--n-ctx", "65536", "--max-prompt-bytes", "100000")
    with short_directory() as directory, running_http(directory, *flags) as process:
        yield process


def test_a_stream_whose_prompt_is_read_tells_how_far_it_is(server: HttpServer) -> None:
    with server.connect() as raw:
        raw.send("POST", "/v1/completions", {"prompt": PROMPT, "stream": True})
        assert raw.head()[0] == 200
        chunks = raw.chunks()
        before, total = progress(chunks)
        while (now := progress(chunks)) == (before, total):
            pass
    assert 0 <= before < now[0] < total == now[1]
    assert total in (len(PROMPT), len(PROMPT) + 1)  # with the token that begins a text


def progress(chunks: Iterator[bytes]) -> tuple[int, int]:
    """Tokens read and all tokens, as the next sign of life tells them. Fails where the answer ends without one."""
    for chunk in chunks:
        if found := re.fullmatch(rb": prompt (\d+)/(\d+) tokens\n\n", chunk):
            return int(found[1]), int(found[2])
    raise AssertionError("the prompt was read before its stream said anything")
