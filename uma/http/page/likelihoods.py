"""The log probabilities of an answer's tokens, as the page shows them: each with the text that it completes."""

from __future__ import annotations

import codecs

import attrs

from uma.http.logprobs import PendingLogprobs
from uma.types import Logprobs, Token

TokenLikelihood = tuple[str, float, list[tuple[str, float]]]
"""A token's text, its log probability, and the likeliest tokens for its place with theirs. Tokens that are parts of one
character are one, as likely as all of them together."""


@attrs.define
class Likelihoods:
    """Likelihoods of a stream that have not been taken yet."""

    _pending: PendingLogprobs = attrs.field(factory=PendingLogprobs, init=False)
    _decoder: codecs.IncrementalDecoder = attrs.field(
        factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"), init=False
    )
    _begun: float = attrs.field(default=0.0, init=False)
    """Likelihood of the parts of a character that is not whole."""
    _ready: list[TokenLikelihood] = attrs.field(factory=list, init=False)

    def take(self, token: Token) -> None:
        """The next token; nothing where it has no log probability."""
        for position in self._pending.take(token):
            self._add(position)

    def aside(self) -> None:
        """A piece of thinking has come, whose tokens are no text."""
        self._pending.aside()

    def drain(self) -> list[TokenLikelihood]:
        """All that have come since the last time."""
        ready, self._ready = self._ready, []
        return ready

    def _add(self, position: Logprobs) -> None:
        self._begun += position.chosen.logprob
        text = self._decoder.decode(bytes(position.chosen.bytes))
        if text:
            others = [(each.text, round(each.logprob, 4)) for each in position.top]
            self._ready.append((text, round(self._begun, 4), others))
            self._begun = 0.0
