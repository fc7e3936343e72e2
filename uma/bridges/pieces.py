"""Separates tokens from text that comes without a token, for protocols in which ids and text go together."""

from __future__ import annotations

import attrs

from uma.types import Token


@attrs.define
class TokenFollower:
    """Follows the `Token` events of one stream.

    Text that the engine still holds when the output ends comes in one more event with the last token's id. That event
    looks like a repetition of the last token. Only what follows tells the two apart, so an event with the id of the one
    before is held back until then.
    """

    _count: int = attrs.field(default=0, init=False)
    _last_id: int = attrs.field(default=-1, init=False)
    _held_back: Token | None = attrs.field(default=None, init=False)

    def take(self, event: Token) -> tuple[Token, ...]:
        """The events that are certainly tokens, now that `event` has come."""
        ready = () if self._held_back is None else (self._held_back,)
        self._count += len(ready)
        self._held_back = None
        if event.token_id == self._last_id and event.text:
            self._held_back = event
            return ready
        self._last_id = event.token_id
        self._count += 1
        return (*ready, event)

    def finish(self, completion_tokens: int) -> tuple[Token | None, str]:
        """The event that was held back, at the stream's end: a token, or text without a token."""
        event, self._held_back = self._held_back, None
        if event is None:
            return None, ""
        return (event, "") if self._count < completion_tokens else (None, event.text)
