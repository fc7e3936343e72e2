"""Proofs of claims about the chat template and thinking (reasoning)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from uma.chat.families import THINKING
from uma.contracts.proofs import (
    NOT_SHOWN,
    TRIES,
    Claim,
    DisprovenError,
    Proof,
    Question,
    ServerReply,
    answered,
    demand,
    refused,
)
from uma.types import ServerInfo

ASKED = "Hello!"
PLAIN = f"User: {ASKED}\n\nAssistant:"
"""Prompt that the plain template makes, for a model without a chat template."""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": ASKED}]}
THOUGHT_TOKENS = 64
"""Maximum tokens within which a thinking model begins to think."""


def about_chat(info: ServerInfo) -> Iterator[Claim]:
    """Claims about the chat template and about thinking."""
    capabilities = info.capabilities
    if capabilities.tokenize:
        yield Claim("chat", "yes" if capabilities.chat else "no", partial(_renders, capabilities.chat))
    wanted = {**CHAT, "reasoning": "auto", "temperature": 0.0, "max_tokens": THOUGHT_TOKENS}
    if capabilities.reasoning:
        yield Claim("reasoning", "yes", partial(_thinks, wanted))
    else:
        yield Claim("reasoning", "no", partial(refused, wanted, "reasoning"))
    if capabilities.reasoning_switch:
        yield Claim("reasoning_switch", "yes", partial(_switches_off, wanted))


def _renders(has_own: bool) -> Proof:
    """Prove that the prompt is rendered by the model's own template, or by the plain one."""
    text = answered((yield Question({"type": "tokenize", **CHAT}))).last.get("text", "")
    if not has_own:
        demand(text == PLAIN, f"{text!r}, which the plain template does not make of it")
        return f"plain: {text!r}"
    demand(ASKED in text, f"{text!r}, which does not have the message")
    demand(text != PLAIN, f"{text!r}, as the plain template has it")
    return repr(text)


def _thinks(wanted: dict[str, Any]) -> Proof:
    """Prove that thinking is separated from the text, equally in a stream and in one piece, and is counted."""
    for _ in range(TRIES):
        streamed = answered((yield Question(wanted)), ignoring="reasoning")
        whole = answered((yield Question({**wanted, "stream": False})), ignoring="reasoning")
        thought = _thinking_of(streamed)
        if (streamed.text, thought) == (whole.text, whole.last.get("reasoning") or ""):
            break
    else:
        raise DisprovenError(f"streamed {thought!r}, whole {whole.last.get('reasoning')!r}")
    marks = [mark for switch in THINKING for mark in (switch.open, switch.close) if mark in streamed.text]
    demand(not marks, f"{marks} in the text {streamed.text!r}, and not told apart")
    counted = streamed.last["usage"].get("reasoning_tokens", 0)
    demand((counted > 0) == bool(thought), f"{counted} tokens of thinking counted for {thought!r}")
    return f"{counted} tokens of thinking, told apart" if thought else f"{NOT_SHOWN}: no thinking came"


def _switches_off(wanted: dict[str, Any]) -> Proof:
    """Prove that with `reasoning` off the model answers without thinking, because the prompt is another one."""
    usage_on = answered((yield Question({**wanted, "max_tokens": 1})), ignoring="reasoning").last["usage"]
    reply = answered((yield Question({**wanted, "reasoning": "off"})), ignoring="reasoning")
    demand(not _thinking_of(reply), f"thinking {_thinking_of(reply)!r}, which was switched off")
    usage = reply.last["usage"]
    counted = usage.get("reasoning_tokens", 0)
    demand(not counted, f"{counted} tokens of thinking counted, which was switched off")
    tokens, tokens_off = usage_on["prompt_tokens"], usage["prompt_tokens"]
    return NOT_SHOWN if tokens == tokens_off else f"a prompt of {tokens_off} tokens, and not of {tokens}"


def _thinking_of(reply: ServerReply) -> str:
    return "".join(event["text"] for event in reply.events if event["event"] == "reasoning")
