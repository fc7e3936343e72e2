"""Building blocks of proofs: a question as the wire has it, its reply, and checks of a reply.

Nothing here does I/O: a proof yields questions and is sent the replies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Any

import attrs

PROMPT = "Once upon a time, there was a little fox who lived in the forest. One day the fox said:"
TOKENS = 24
"""Length of an answer: enough tokens for a parameter to show its effect, few enough for a slow model."""
REFUSALS = ("E_PROTO_BAD_REQUEST", "E_LIMIT_PROMPT_TOO_LARGE")
NOT_SHOWN = "accepted, effect not shown"
TRIES = 8
"""Number of attempts to get two equal answers. With flash attention on a CPU, logits differ in the third digit with the
other rows of a batch, and with the cached part of the prompt; where two logits are nearly equal, that changes the
token."""


@attrs.frozen
class Question:
    """A message to the server, as the wire has it."""

    fields: dict[str, Any]
    cancel_after: int | None = None
    """Number of token events after which the request is cancelled."""


@attrs.frozen
class ServerReply:
    """All events of the reply to a question."""

    events: tuple[dict[str, Any], ...]

    @property
    def tokens(self) -> list[dict[str, Any]]:
        """The token events."""
        return [event for event in self.events if event["event"] == "token"]

    @property
    def last(self) -> dict[str, Any]:
        """The last event."""
        return self.events[-1] if self.events else {"event": "nothing"}

    @property
    def text(self) -> str:
        """The whole output."""
        whole = self.last.get("text")
        return whole if isinstance(whole, str) else "".join(token["text"] for token in self.tokens)

    @property
    def token_ids(self) -> list[int]:
        """Ids of the output's tokens, without the event that only carries remaining text."""
        count = self.last.get("usage", {}).get("completion_tokens", 0)
        return [token["token_id"] for token in self.tokens][:count]

    @property
    def error(self) -> str | None:
        """`CODE: message` where the request was refused or failed."""
        return f"{self.last['code']}: {self.last['message']}" if self.last["event"] == "error" else None

    def warns_of(self, field: str) -> bool:
        """Whether a warning says that `field` was ignored or changed."""
        return any(re.search(rf"\b{re.escape(field)}\b", warning) for warning in self.last.get("warnings", ()))


Proof = Generator[Question, ServerReply, str]
"""Asks questions, and returns a summary of what it found. Raises `DisprovenError` where the claim is false."""


class DisprovenError(Exception):
    """A claim is false. The message says what was observed instead."""


@attrs.frozen
class Claim:
    """A statement of a server about itself, or about what it refuses, and its proof."""

    name: str
    declared: str
    prove: Callable[[], Proof]


def ask(**fields: Any) -> Question:
    """A greedy generation of `TOKENS` tokens; `fields` override its own."""
    plain = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    return Question(plain | fields)


def with_ids(ids: list[int]) -> dict[str, Any]:
    """Fields of such a generation, from token ids."""
    return {name: value for name, value in ask(token_ids=ids).fields.items() if name != "prompt"}


def answered(reply: ServerReply, *, ignoring: str | None = None) -> ServerReply:
    """`reply`, if it is an answer without a warning about `ignoring`. Raises `DisprovenError` otherwise."""
    if reply.error is not None:
        raise DisprovenError(f"refused with {reply.error}")
    if reply.last["event"] == "nothing":
        raise DisprovenError("the server closed without an answer")
    if ignoring is not None and reply.warns_of(ignoring):
        raise DisprovenError(f"ignored: {reply.last['warnings']}")
    return reply


def demand(is_so: bool, otherwise: str) -> None:
    """Raise `DisprovenError` with the message `otherwise`, unless `is_so`."""
    if not is_so:
        raise DisprovenError(otherwise)


def refused(fields: dict[str, Any], naming: str) -> Proof:
    """Prove that a question is refused with an error that names the field, or that a warning names it as ignored."""
    reply = yield Question(fields)
    if reply.error is None:
        demand(reply.warns_of(naming), f"{naming} was neither refused nor named in warnings")
        return "ignored, and named in warnings"
    demand(reply.last["code"] in REFUSALS, f"refused with {reply.error}, which is no refusal of the request")
    demand(naming in reply.last["message"], f"refused with {reply.error}, which does not name {naming}")
    return f"refused: {reply.last['message'].splitlines()[0]}"
