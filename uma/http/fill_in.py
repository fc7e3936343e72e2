"""Filling in the middle: the prompt of a text before a gap and one behind it, for models that have tokens for that.

As llama-server lays it out: for `/infill` what other files hold, then the text before the gap, the text behind it, and
the mark behind which the model writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from uma.errors import BadRequest
from uma.http.exchange import Exchange
from uma.http.gateway import Gateway
from uma.http.generation import small_work
from uma.http.problem import Unsupported
from uma.http.reader import checked_text
from uma.types import Capabilities, FillIn, Request

_REPOSITORY, _FILE = "myproject\n", "filename\n"
"""llama-server's names for what has none."""
_SNIPPET = "\n\n--- snippet ---\n\n"
"""Before what another file holds, for a model without a token for that."""


@attrs.frozen
class Gap:
    """A place to fill in."""

    field: str
    """The body's field that errors are about."""
    behind: str
    before: str | None = None
    """None: the request's own prompt."""
    begun: str = ""
    """What stands in the gap already, which the answer goes on from."""
    files: Sequence[tuple[str, str]] | None = None
    """Names and texts of other files, the most important last; None: the text is no part of a repository."""


def check(able: Capabilities, field: str) -> FillIn:
    """The model's tokens. Raises `Unsupported`, which names the field, for a model without."""
    if able.fill_in is None:
        raise Unsupported.at(field, "this server's model has no tokens for filling in the middle; leave it out")
    return able.fill_in


async def filled(
    gateway: Gateway, http: Exchange, requests: Sequence[Request], gap: Gap
) -> tuple[list[Request], list[str]]:
    """The requests with the tokens of `gap` for their prompts, and what is to be told of it: files that do not fit the
    context are left out, from the first on. Raises what `Source.tokenize` does, and `BadRequest` for what is no text.
    """
    marks = check(gateway.info.capabilities, gap.field)
    made, notes = list[Request](), list[str]()

    async def read() -> None:
        for request in requests:
            prompt = _Prompt(gateway, http, marks, gap.field)
            before = _text_before(request) if gap.before is None else gap.before
            most = gateway.info.limits.n_ctx - _wanted(gateway, request)
            ids, left_out = await prompt.ids(gap, before, most)
            made.append(attrs.evolve(request, prompt=None, messages=None, parse_special=False, token_ids=tuple(ids)))
            if left_out:
                notes.append(f"input_extra: the first {left_out} of {len(gap.files or ())} do not fit the context")

    await small_work(http, read)
    return made, notes


def _wanted(gateway: Gateway, request: Request) -> int:
    """Tokens of the context that the answer is given before other files are, a quarter at most."""
    limits = gateway.info.limits
    asked = request.sampling.max_tokens
    return min(limits.default_max_tokens if asked is None else asked, limits.n_ctx // 4)


@attrs.define
class _Prompt:
    gateway: Gateway
    http: Exchange
    marks: FillIn
    field: str
    _bos: tuple[int, ...] = attrs.field(default=(), init=False)

    async def ids(self, gap: Gap, text: str, most: int) -> tuple[list[int], int]:
        """The prompt's tokens behind `text`, at most so many with the files, and how many of these are left out."""
        before = [self.marks.prefix, *await self._read(text), *await self._read(gap.begun)]
        behind = [self.marks.suffix, *await self._read(gap.behind)]
        core = [*before, *behind, self.marks.middle]
        if gap.files is None:
            return [*self._bos, *core], 0
        opening = [] if self.marks.repository is None else [self.marks.repository, *await self._read(_REPOSITORY)]
        own = [] if self.marks.file is None else [self.marks.file, *await self._read(_FILE)]
        files = [await self._file(name, text) for name, text in gap.files]
        left_out = 0
        while left_out < len(files) and len(opening) + len(own) + len(core) + sum(map(len, files[left_out:])) > most:
            left_out += 1
        others = [token for file in files[left_out:] for token in file]
        return [*opening, *others, *own, *self._bos, *core], left_out

    async def _file(self, name: str, text: str) -> list[int]:
        if self.marks.file is None:
            return [*await self._read(_SNIPPET), *await self._read(text)]
        return [self.marks.file, *await self._read(f"{name}\n"), *await self._read(text)]

    async def _read(self, text: str) -> tuple[int, ...]:
        """The tokens of a piece of text, without what the model wants before it."""
        if not text:
            return ()
        request = Request(self.http.id, prompt=checked_text(text, self.field))
        found = await self.gateway.source.tokenize(request)
        self._bos = found.token_ids[: found.added_tokens]
        return found.token_ids[found.added_tokens :]


def _text_before(request: Request) -> str:
    """The text of a request that is to be filled in behind. Raises `BadRequest` where it has none."""
    if request.prompt is None or request.media:
        raise BadRequest.at("suffix", "needs a prompt that is a string, without pictures and sounds")
    return request.prompt
