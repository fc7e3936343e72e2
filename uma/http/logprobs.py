"""Log probabilities in OpenAI's two forms: a chat's list of objects, and a completion's four parallel lists."""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import attrs

from uma.types import Answer, Finished, Logprobs, Token, TokenLogprob


def chat_form(positions: Sequence[Logprobs] | None) -> dict[str, Any] | None:
    """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`; None where none were asked for."""
    return None if positions is None else {"content": entries(positions), "refusal": None}


def entries(positions: Iterable[Logprobs]) -> list[dict[str, Any]]:
    """The list in it by itself, which other dialects have too."""
    return [{**_token(each.chosen), "top_logprobs": [_token(top) for top in each.top]} for each in positions]


def spelling(positions: Sequence[Logprobs], text: str, after: str = "") -> Sequence[Logprobs]:
    """Neighbouring `positions` that spell `text`, where it stands behind `after`; all where it is not there,
    such as after a character that is broken.
    """
    if not text:
        return ()
    ends = list(accumulate(len(each.chosen.bytes) for each in positions))
    data = b"".join(bytes(each.chosen.bytes) for each in positions)
    begin = max(0, data.find(after.encode()))
    start = data.find(text.encode(), begin + len(after.encode()))
    if start < 0:
        return positions
    return positions[bisect_right(ends, start) : bisect_left(ends, start + len(text.encode())) + 1]


@attrs.define
class PendingLogprobs:
    """The log probabilities of a stream's tokens whose text has not come yet. Thinking and calls are told apart from
    the text, just before the token that ends their piece; their tokens have no text, and are left out.
    """

    _positions: list[Logprobs] = attrs.field(factory=list, init=False)
    _sent_bytes: int = attrs.field(default=0, init=False)
    """Bytes of the first of them whose text has come, where it has been told already."""
    _is_aside: bool = attrs.field(default=False, init=False)

    def aside(self) -> None:
        """A piece of something else has come."""
        self._positions.clear()
        self._sent_bytes = 0
        self._is_aside = True

    def take(self, token: Token) -> Sequence[Logprobs]:
        """Log probabilities of the tokens that spell this one's text, itself mostly, but for one that was told with the
        text before; none where it has no text.
        """
        is_aside, self._is_aside = self._is_aside and not token.text, False
        if token.logprobs is not None and not is_aside:
            self._positions.append(token.logprobs)
        return self._take(token.text.encode()) if token.text and self._positions else ()

    def _take(self, text: bytes) -> Sequence[Logprobs]:
        positions, sent = self._positions, min(1, self._sent_bytes)
        start = b"".join(bytes(each.chosen.bytes) for each in positions).find(text, self._sent_bytes)
        if start < 0:  # such as after a character that is broken
            self._positions, self._sent_bytes = [], 0
            return positions[sent:]
        ends, stop = list(accumulate(len(each.chosen.bytes) for each in positions)), start + len(text)
        last = bisect_left(ends, stop)
        is_whole = ends[last] == stop
        self._positions = positions[last + is_whole :]
        self._sent_bytes = 0 if is_whole else stop - (ends[last - 1] if last else 0)
        return positions[max(sent, bisect_right(ends, start)) : last + 1]


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


@attrs.define
class Place:
    """Where the next token's text begins, by characters. A character in two tokens counts with the one that ends it."""

    chars: int = 0
    _decoder: codecs.IncrementalDecoder = attrs.field(
        factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"), init=False
    )

    def pass_by(self, data: bytes) -> None:
        """A token of these bytes stands there."""
        self.chars += len(self._decoder.decode(data))


@attrs.define
class Unshown:
    """The tokens of a plain text that wait until some of their text is shown: what a stop string cuts away whole is
    never told.
    """

    _waiting: deque[tuple[int, Logprobs]] = attrs.field(factory=deque, init=False)
    """Each with the place where its text begins."""
    _place: Place = attrs.field(factory=Place, init=False)
    _shown_chars: int = attrs.field(default=0, init=False)

    def take(self, token: Token) -> list[Logprobs]:
        """Log probabilities of the tokens whose text is shown with this one, itself mostly."""
        if token.logprobs is not None:
            self._waiting.append((self._place.chars, token.logprobs))
            self._place.pass_by(bytes(token.logprobs.chosen.bytes))
        self._shown_chars += len(token.text)
        shown = []
        while self._waiting and self._waiting[0][0] < self._shown_chars:
            shown.append(self._waiting.popleft()[1])
        return shown

    def rest(self, ended: Finished | Answer) -> list[Logprobs]:
        """Log probabilities without a text that are left at the end, unless a stop string has cut them away."""
        return [] if ended.stop_string is not None else [each for _, each in self._waiting]


def shown(ended: Finished | Answer) -> list[Logprobs]:
    """The tokens of a whole plain text, without those that a stop string has cut away."""
    unshown = Unshown()
    token = Token("", "", 0)
    for each in ended.logprobs or ():
        unshown.take(attrs.evolve(token, logprobs=each))
    return unshown.take(attrs.evolve(token, text=ended.text or "")) + unshown.rest(ended)


def completion_form(positions: Iterable[tuple[str, Logprobs | None]], place: Place) -> dict[str, Any]:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}` of tokens and their texts, the first at `place`,
    which goes on with them.

    A prompt's first token has no log probability. As OpenAI has it, the token itself is always among its likeliest.
    """
    form: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for text, each in positions:
        form["tokens"].append(text)
        form["text_offset"].append(place.chars)
        form["token_logprobs"].append(None if each is None else each.chosen.logprob)
        form["top_logprobs"].append(
            None if each is None else {top.text: top.logprob for top in (*each.top, each.chosen)}
        )
        place.pass_by(text.encode() if each is None else bytes(each.chosen.bytes))
    return form
