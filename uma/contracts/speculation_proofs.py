"""Proof of the claim about speculative decoding: that the server drafts, or that it never does."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial

from uma.contracts.proofs import NOT_SHOWN, Claim, Proof, Question, ServerReply, answered, ask, demand
from uma.types import ServerInfo

REPEATED_TOKENS = 64
"""Length of an answer that repeats one token, which any drafter can guess."""


def about_speculation(info: ServerInfo) -> Iterator[Claim]:
    """The claim about speculative decoding, where the server has that capability."""
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
    # No draft at all is allowed: the server drafts only where its batch costs promise a gain.
    return f"{drafted} tokens drafted, {held} of them held" if drafted else f"{NOT_SHOWN}: no draft paid here"


def _drafted() -> Generator[Question, ServerReply, tuple[int, int]]:
    """Ask for a repetitive text. Returns the drafted and the accepted tokens since the server's start."""
    token = answered((yield ask(max_tokens=1))).token_ids[0]
    again = answered((yield ask(max_tokens=REPEATED_TOKENS, logit_bias={str(token): 100})))
    demand(set(again.token_ids) == {token}, "a draft let a token come that the bias excludes")
    found = answered((yield Question({"type": "metrics"}))).last
    return int(found.get("draft_tokens_total", 0)), int(found.get("draft_accepted_total", 0))
