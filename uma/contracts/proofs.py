"""What proofs are made of: a question as the wire has it, its reply, and the demands that a reply must meet.

Nothing here does I/O: a proof yields questions and is sent the replies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Any

import attrs

PROMPT = "Once upon a time, there was a little fox who lived in the forest. One day the fox said:"
TOKENS = 24
"""Tokens of an answer: enough for a parameter to show, few enough for a slow model."""
REFUSALS = ("E_PROTO_BAD_REQUEST", "E_LIMIT_PROMPT_TOO_LARGE")
NOT_SHOWN = "accepted, effect not shown"
TRIES = 8
"""Times that two answers can differ which should be the same. With flash attention on a CPU logits differ in the third
digit with what else is in a batch, and with how much of a prompt was cached and where: near ties can turn a draw."""


@attrs.frozen
class Question:
    """A message to the server, as the wire has it."""

    fields: dict[str, Any]
    cancel_after: int | None = None
    """Cancel the request once so many token events have come."""


@attrs.frozen
class ServerReply:
    """All events that a question was answered with."""

    events: tuple[dict[str, Any], ...]

    @property
    def tokens(self) -> list[dict[str, Any]]:
        """The token events."""
        return [event for event in self.events if event["event"] == "token"]

    @property
    def last(self) -> dict[str, Any]:
        """The event that ended it."""
        return self.events[-1] if self.events else {"event": "nothing"}

    @property
    def text(self) -> str:
        """The output."""
        whole = self.last.get("text")
        return whole if isinstance(whole, str) else "".join(token["text"] for token in self.tokens)

    @property
    def token_ids(self) -> list[int]:
        """The ids of the output, without events that only carry held text."""
        count = self.last.get("usage", {}).get("completion_tokens", 0)
        return [token["token_id"] for token in self.tokens][:count]

    @property
    def error(self) -> str | None:
        """`CODE: message` where it was refused or failed."""
        return f"{self.last['code']}: {self.last['message']}" if self.last["event"] == "error" else None

    def warns_of(self, field: str) -> bool:
        """Whether the end names `field` as ignored or changed."""
        return any(re.search(rf"\b{re.escape(field)}\b", warning) for warning in self.last.get("warnings", ()))


Proof = Generator[Question, ServerReply, str]
"""Asks, and returns a word on how it went; raises `DisprovenError` where the claim is false."""


class DisprovenError(Exception):
    """A claim is false; the message says what was seen instead."""


@attrs.frozen
class Claim:
    """Something a server says of itself, or of what it cannot do, and the proof of it."""

    name: str
    declared: str
    prove: Callable[[], Proof]


def ask(**fields: Any) -> Question:
    """A greedy generation of `TOKENS` tokens, with `fields` in place of its own."""
    plain = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    return Question(plain | fields)


def with_ids(ids: list[int]) -> dict[str, Any]:
    """The fields of such a generation from tokens."""
    return {name: value for name, value in ask(token_ids=ids).fields.items() if name != "prompt"}


def answered(reply: ServerReply, *, ignoring: str | None = None) -> ServerReply:
    """`reply`, which must be an answer that does not name `ignoring` in its warnings. Raises `DisprovenError`."""
    if reply.error is not None:
        raise DisprovenError(f"refused with {reply.error}")
    if reply.last["event"] == "nothing":
        raise DisprovenError("the server closed without an answer")
    if ignoring is not None and reply.warns_of(ignoring):
        raise DisprovenError(f"ignored: {reply.last['warnings']}")
    return reply


def demand(is_so: bool, otherwise: str) -> None:
    """Raise `DisprovenError` with what was seen `otherwise`."""
    if not is_so:
        raise DisprovenError(otherwise)


def refused(fields: dict[str, Any], naming: str) -> Proof:
    """A question that must be refused, with an error that names the field."""
    reply = yield Question(fields)
    if reply.error is None:
        demand(reply.warns_of(naming), f"{naming} was neither refused nor named in warnings")
        return "ignored, and named in warnings"
    demand(reply.last["code"] in REFUSALS, f"refused with {reply.error}, which is no refusal of the request")
    demand(naming in reply.last["message"], f"refused with {reply.error}, which does not name {naming}")
    return f"refused: {reply.last['message'].splitlines()[0]}"
