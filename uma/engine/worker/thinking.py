"""A bound on one sequence's thinking: its tokens are counted, and where they are enough the closing mark is given.

It reads the output with a parser of its own, token by token as they are sampled, so that a stride of several steps or
a draft cannot go beyond the bound. Belongs to the decode thread once its sequence is submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from uma.chat.steps import StepParser
from uma.engine.delivery.detokenize import TextStream
from uma.llama.grammar import GrammarState

MAX_COMPLETING = 3
"""Maximum tokens beyond the bound by which a character is completed: as many bytes can follow its first one."""


@attrs.define(slots=True, eq=False)
class ThinkingBound:
    """Where one sequence is in its thinking, and what closes it."""

    parser: StepParser
    piece: Callable[[int], bytes]
    """A token's bytes as the parser reads them."""
    closings: Sequence[Sequence[int]]
    """Tokens that close the thinking: the first that the sequence's grammar allows. Each further time begins with the
    next, until the last."""
    limit: int | None
    """Maximum tokens of thinking; None: as many as come, until `close`."""
    warning: str = ""
    """Warning for the last event that the thinking was ended; empty where it was not."""
    _thought: int = attrs.field(default=0, init=False)
    """Tokens of thinking that were read."""
    _times: int = attrs.field(default=0, init=False)
    """How often the thinking was closed here."""
    _is_asked: bool = attrs.field(default=False, init=False)
    _text: TextStream = attrs.field(factory=TextStream, init=False)

    def read(self, token: int) -> None:
        """Take a token into account that the sequence continues with."""
        was_thinking = self.parser.is_thinking
        self.parser.push(self._text.push(self.piece(token)))
        self._thought += was_thinking and self.parser.is_thinking

    def read_all(self, tokens: Iterable[int]) -> None:
        """Read all that came before there was a bound; these tokens are not counted."""
        self.parser.push(self._text.push(b"".join(map(self.piece, tokens))))

    def close(self) -> None:
        """End the thinking with the next token, on request; also what begins later."""
        self.limit, self._is_asked = 0, True

    def closing(self, grammar: GrammarState | None) -> list[int]:
        """The tokens that must come next, because the thinking has come to its bound; mostly none."""
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
_AT_BOUND = "max_reasoning_tokens: the thinking was ended by its bound of {:,} tokens"
