"""A proof of what a server says of drafts: that it makes some, or that it makes none."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial

from uma.contracts.proofs import NOT_SHOWN, Claim, Proof, Question, ServerReply, answered, ask, demand
from uma.types import ServerInfo

REPEATED_TOKENS = 64
"""Tokens of an answer that says one token again and again: any drafter guesses the next."""


def about_speculation(info: ServerInfo) -> Iterator[Claim]:
    """The claim of drafts, where the server knows of them at all."""
    claimed = info.capabilities.speculation
    if claimed:
        kind, _, reason = claimed.partition(": ")
        yield Claim("speculation", kind, partial(_none, reason) if kind == "none" else _drafts)


def _none(reason: str) -> Proof:
    demand(bool(reason), "none, without a reason")
    drafted, _ = yield from _drafted()
    demand(drafted == 0, f"{drafted} tokens were drafted")
    return f"nothing was drafted: {reason}"


def _drafts() -> Proof:
    drafted, held = yield from _drafted()
    demand(0 <= held <= drafted, f"{held} drafted tokens held, of {drafted}")
    # Whether a draft pays is the server's to decide, by what its batches cost.
    return f"{drafted} tokens drafted, {held} of them held" if drafted else f"{NOT_SHOWN}: no draft paid here"


def _drafted() -> Generator[Question, ServerReply, tuple[int, int]]:
    """Ask for a text that repeats itself: tokens that the server has drafted since its start, and those that held."""
    token = answered((yield ask(max_tokens=1))).token_ids[0]
    again = answered((yield ask(max_tokens=REPEATED_TOKENS, logit_bias={str(token): 100})))
    demand(set(again.token_ids) == {token}, "a draft let a token come that the bias excludes")
    found = answered((yield Question({"type": "metrics"}))).last
    return int(found.get("draft_tokens_total", 0)), int(found.get("draft_accepted_total", 0))
