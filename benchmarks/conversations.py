"""Programs that talk with a server over HTTP, through the chat template, in words whose tokens are known."""

from __future__ import annotations

from random import Random
from typing import Any

import attrs
import orjson

from benchmarks.http_stream import post
from benchmarks.targets.llama_server import LlamaServer

WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "number", "night", "point", "home",
)  # fmt: skip
"""Each a token of every vocabulary here, with the space before it: of a text of them the tokens are known."""
WORD_BIAS = 100
"""Added to the logits of these. What random weights say otherwise is no text that has the same tokens when it is sent
back, as nearly all text of real models has."""


@attrs.frozen
class Reply:
    """What came back for a conversation."""

    text: str
    read: int
    """Tokens of the prompt that were not from cache."""
    prompt: int


async def chat(server: LlamaServer, messages: list[dict[str, str]], *, tokens: int, thinks: bool = False) -> Reply:
    """Ask for so many tokens, all of them out of `WORDS`. Raises `HttpError` where the server refuses."""
    body = {
        "messages": messages, "max_tokens": tokens, "temperature": 0, "top_k": 1, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": thinks},
        "logit_bias": {f" {word}": WORD_BIAS for word in WORDS},
    }  # fmt: skip
    text, usage = "", dict[str, Any]()
    async with post(server.port, "/v1/chat/completions", body) as events:
        async for payload in events:
            event = orjson.loads(payload)
            for choice in event.get("choices", []):
                delta = choice["delta"]
                text += (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            usage = event.get("usage") or usage
    prompt = usage["prompt_tokens"]
    return Reply(text, prompt - usage["prompt_tokens_details"]["cached_tokens"], prompt)


def words(rng: Random, count: int) -> str:
    """A text of so many tokens."""
    return " ".join(rng.choices(WORDS, k=count))


class Conversation:
    """One program's talk with a server: each turn sends all that was said. `read` and `sent` count prompt tokens."""

    def __init__(self, server: LlamaServer, rng: Random, system: str, *, answer: int, thinks: bool = False) -> None:
        self._server, self._rng, self._answer, self._thinks = server, rng, answer, thinks
        self._messages = [{"role": "system", "content": system}]
        self.read = self.sent = 0

    async def turn(self, new_tokens: int, role: str = "user") -> None:
        """Say something and remember the answer; of one that thinks the second half, as if that were behind `</think>`:
        a program sends no thinking back.
        """
        self._messages.append({"role": role, "content": words(self._rng, new_tokens)})
        reply = await chat(self._server, self._messages, tokens=self._answer, thinks=self._thinks)
        said = reply.text[len(reply.text) // 2 :] if self._thinks else reply.text
        self._messages.append({"role": "assistant", "content": said})
        self.read += reply.read
        self.sent += reply.prompt
