"""Payloads to messages and events to frames: the one place where the wire's JSON is read and written."""

from __future__ import annotations

from uma.protocol.messages import ClientMessage, ServerEvent


def parse_message(
    payload: bytes, *, strict: bool = False, n_vocab: int | None = None, max_tokens: int | None = None
) -> ClientMessage:
    """A client's message. Raises `InvalidJson`, or `BadRequest` with a line for each wrong field."""
    raise NotImplementedError


def request_id_of(payload: bytes) -> str | None:
    """The id of a payload that was refused, where it has a usable one."""
    raise NotImplementedError


def encode_message(message: ClientMessage) -> bytes:
    """A client's message as a whole frame. Raises `BadRequest` for what is no JSON (a lone surrogate, a set …)."""
    raise NotImplementedError


def parse_event(payload: bytes) -> ServerEvent:
    """A server's event. Raises `InvalidJson` or `BadRequest`."""
    raise NotImplementedError


def encode_event(event: ServerEvent) -> bytes:
    """A server's event as a whole frame."""
    raise NotImplementedError
