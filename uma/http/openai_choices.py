"""What OpenAI's two older endpoints share: answers as numbered choices, streamed as chunks of one shape."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import orjson

from uma.http.dialect import Writer, dumps
from uma.http.usage import finish_reason, openai_usage, stop_reason, timings
from uma.types import Finished
from uma.version import __version__

Choice = dict[str, Any]

FINGERPRINT = f"build-uma-{__version__}"
"""OpenAI's `system_fingerprint`: which program answers. Clients of llama-server know it by its first letter."""


@attrs.define
class ChoicesWriter(Writer):
    """One or more prompts, each with as many choices as it has answers. The choices of one prompt are neighbours."""

    kind: ClassVar[str]
    """A chunk's `object`."""
    text_key: ClassVar[bytes]
    """The key under which a choice of `delta` has its text."""

    prefix: ClassVar[str]
    """What an answer's id begins with."""

    include_usage: bool
    created: int = attrs.field(factory=lambda: int(time.time()), init=False)
    _frames: dict[int, tuple[bytes, bytes]] = attrs.field(factory=dict, init=False)
    """Frames by choice: an event up to the token's text, and what follows it: all of it but the text stays the same."""

    @abstractmethod
    def delta(self, place: int, text: str = "", reason: str | None = None) -> Choice:
        """A choice in a chunk: `text` is its next piece. With a `reason` it is the last of its choice."""

    def place(self, index: int, answer: int) -> int:
        """The number among all choices of an answer to the prompt `index`."""
        return index * self.requests[0].sampling.n + answer

    def progress(self, index: int, fields: Mapping[str, Any]) -> bytes:
        return self.chunk([self.delta(self.place(index, 0))], **fields)

    def piece(self, place: int, text: str, fields: Mapping[str, Any]) -> bytes:
        """A chunk with nothing but a piece of text, and `fields`."""
        if fields:
            return self.chunk([self.delta(place, text)], **fields)
        before, after = self._frames.get(place) or self._frame(place)
        return before + orjson.dumps(text) + after

    def _frame(self, place: int) -> tuple[bytes, bytes]:
        before, key, after = self.chunk([self.delta(place)]).partition(self.text_key + b'""')
        frame = self._frames[place] = before + key[:-2], after
        return frame

    def finished(self, index: int, finished: Finished) -> bytes:
        """The last of a prompt's choices carries its timings and warnings."""
        *others, last = [
            {**self.delta(self.place(index, each.index), reason=finish_reason(each)), **stop_reason(each)}
            for each in finished.every_answer
        ]
        account = {
            **self._shown(),
            "timings": timings(finished),
            **self.warnings([finished]),
        }
        return b"".join([*(self.chunk([each]) for each in others), self.chunk([last], **account)])

    def end(self, results: Sequence[Finished]) -> bytes:
        usage = b""
        if self.include_usage:
            usage = self.chunk([], usage=openai_usage(results), timings=timings(results[0]))
        return usage + b"data: [DONE]\n\n"

    def head(self, kind: str) -> dict[str, Any]:
        """What every chunk, and the whole answer, begins with."""
        return {
            "id": self.prefix + self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def chunk(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> bytes:
        """One event of the stream."""
        usage = {"usage": None} if self.include_usage and "usage" not in more else {}
        return b"data: " + dumps({**self.head(self.kind), **usage, **more, "choices": choices}) + b"\n\n"

    def account(self, results: Sequence[Finished]) -> dict[str, Any]:
        """What the whole answer ends with."""
        usage = openai_usage(results)
        return {**self._shown(), "usage": usage, "timings": timings(results[0]), **self.warnings(results)}

    def _shown(self) -> dict[str, Any]:
        """llama-server's `__verbose`, where it is asked for: what the model reads."""
        return {} if self.shown_prompt is None else {"__verbose": {"prompt": self.shown_prompt}}
