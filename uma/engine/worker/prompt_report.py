"""What a request wants to be told of its own prompt: its text and tokens, and how likely the model found each of them.

For log probabilities the logits of every prompt token are computed and read, a batch at a time, so these tokens are not
taken from the cache. The last token's row is not among them: it is the one that the first output token is sampled from.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from uma.types import Logprobs, Prompt


@attrs.define(slots=True, eq=False)
class PromptReport:
    """A prompt's report, as far as it is written. Belongs to the decode thread."""

    text: str
    count: int | None
    """Likeliest tokens told with each; None: no log probabilities."""
    is_told: bool = False
    _known: list[Logprobs | None] = attrs.field(init=False, factory=lambda: [None])

    def unread(self, prompt_tokens: int) -> int:
        """Prompt tokens whose logits are still to be read."""
        return 0 if self.count is None else prompt_tokens - len(self._known)

    @property
    def read(self) -> int:
        """Prompt tokens whose logits were read."""
        return len(self._known) - 1

    def add(self, positions: Sequence[Logprobs]) -> None:
        """The log probabilities of the next prompt tokens."""
        self._known += positions

    def event(self, id: str, token_ids: Sequence[int]) -> Prompt:
        """The report as an event."""
        return Prompt(id, self.text, tuple(token_ids), None if self.count is None else tuple(self._known))
