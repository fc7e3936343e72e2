"""A bound on one sequence's thinking: its tokens are counted, and at the bound the closing mark is forced.

It parses the output itself, token by token as they are sampled, so that neither a stride nor a draft passes the bound.
Belongs to the decode thread once its sequence is submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from uma.chat.steps import StepParser
from uma.engine.delivery.detokenize import TextStream
from uma.llama.grammar import GrammarState

MAX_COMPLETING = 3
"""Maximum tokens beyond the bound that complete a character, whose first byte at most three can follow."""


@attrs.define(slots=True, eq=False)
class ThinkingBound:
    """State of one sequence's thinking, and the marks that close it."""

    parser: StepParser
    piece: Callable[[int], bytes]
    """Bytes of a token, as the parser reads them."""
    closings: Sequence[Sequence[int]]
    """Marks that close the thinking, as tokens; the first that the grammar allows is used. The second closing begins
    with the second mark, and so on, up to the last."""
    limit: int | None
    """Maximum tokens of thinking; None: no bound, until `close`."""
    warning: str = ""
    """Warning for the last event if thinking was closed here; else empty."""
    _thought: int = attrs.field(default=0, init=False)
    """Tokens of thinking that were read."""
    _times: int = attrs.field(default=0, init=False)
    """Number of times that thinking was closed here."""
    _is_asked: bool = attrs.field(default=False, init=False)
    _text: TextStream = attrs.field(factory=TextStream, init=False)

    def read(self, token: int) -> None:
        """Take in a token that the sequence continues with."""
        was_thinking = self.parser.is_thinking
        self.parser.push(self._text.push(self.piece(token)))
        self._thought += was_thinking and self.parser.is_thinking

    def read_all(self, tokens: Iterable[int]) -> None:
        """Take in all tokens before there was a bound; they are not counted."""
        self.parser.push(self._text.push(b"".join(map(self.piece, tokens))))

    def close(self) -> None:
        """Close this thinking with the next token, and any later one at once."""
        self.limit, self._is_asked = 0, True

    def closing(self, grammar: GrammarState | None) -> list[int]:
        """Tokens of the mark that must come next, because thinking has reached its bound; usually none."""
        if self.limit is None or self._thought < self.limit or not self.parser.is_thinking:
            return []
        if self._text.holds and self._thought < self.limit + MAX_COMPLETING:
            return []
        first = min(self._times, len(self.closings) - 1)
        for tokens in (*self.closings[first:], *self.closings[:first]):
            if grammar is None or grammar.common(list(tokens)) == len(tokens):
                self._times += 1
                self.warning = _ON_REQUEST if self._is_asked else _AT_BOUND.format(self.limit)
                return list(tokens)
        self.limit = None
        self.warning = "max_reasoning_tokens: the grammar has no place for the end of the thinking here"
        return []


_ON_REQUEST = "thinking: it was ended on request"
_AT_BOUND = "max_reasoning_tokens: the thinking was ended by its limit of {:,} tokens"
