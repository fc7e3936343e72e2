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
    """What a stream has said of the likelihood of tokens that are no text yet."""

    _pending: PendingLogprobs = attrs.field(factory=PendingLogprobs, init=False)
    _decoder: codecs.IncrementalDecoder = attrs.field(
        factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"), init=False
    )
    _begun: float = attrs.field(default=0.0, init=False)
    """Likelihood of the parts of a character that is not whole."""

    def take(self, token: Token) -> list[TokenLikelihood]:
        """What is complete with the next token; nothing where that has no log probability."""
        return [found for position in self._pending.take(token) for found in self._whole(position)]

    def aside(self) -> None:
        """A piece of thinking has come, whose tokens are no text."""
        self._pending.aside()

    def _whole(self, position: Logprobs) -> list[TokenLikelihood]:
        self._begun += position.chosen.logprob
        text = self._decoder.decode(bytes(position.chosen.bytes))
        if not text:
            return []
        logprob, self._begun = round(self._begun, 4), 0.0
        return [(text, logprob, [(other.text, round(other.logprob, 4)) for other in position.top])]
