"""Prompts as the completions and embeddings of OpenAI and llama-server have them: a string, a list of token ids, a list
of either, and llama-server's further forms: texts among token ids, `{"prompt_string": …}`, with pictures and sounds in
`multimodal_data`, and `{"content": [parts]}`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import attrs

from uma.constraints import Text, show
from uma.errors import BadRequest
from uma.http import abilities
from uma.http.exchange import Exchange
from uma.http.gateway import Gateway
from uma.http.generation import small_work
from uma.http.media import MediaReader
from uma.types import Media, Request, SamplingParams, Tokenized, joined

T = TypeVar("T")

PROMPTS = "a string, a list of token ids, or a list of these"
MEDIA_MARKER = "<__media__>"
"""What stands for a picture or a sound in the text beside `multimodal_data`: llama.cpp's own."""
MAX_PROMPTS = 2048
"""OpenAI's own bound of prompts in one request."""
MAX_TEXTS_AMONG_IDS = 1024
"""Maximum texts of a body's prompts that stand among token ids: each is tokenized by itself."""


async def built_with_ids(
    gateway: Gateway,
    http: Exchange,
    names: Sequence[str],
    build: Callable[[dict[str, Any]], T],
    *,
    in_one_kind: bool = False,
) -> T:
    """What `build` makes of the body, where texts among token ids have become token ids in the first of the fields
    `names` that it has.

    `in_one_kind`: so have texts in a list that has token ids too. Raises what `Exchange.built` and `Source.tokenize`
    do.
    """

    def is_asked(value: Any) -> bool:
        found = _each(value)
        return any(map(_is_mixed, found)) or (in_one_kind and len({isinstance(each, list) for each in found}) > 1)

    def begin(fields: dict[str, Any]) -> tuple[dict[str, Any] | None, list[T]]:
        return (fields, []) if is_asked(fields.get(named(fields))) else (None, [build(fields)])

    def named(fields: dict[str, Any]) -> str:
        return next((name for name in names if fields.get(name) is not None), names[0])

    fields, made = await http.built(begin)
    if fields is None:
        return made[0]
    field = named(fields)
    reader = _Reader(gateway, http, field)
    return build({**fields, field: await small_work(http, partial(reader.ids_of_all, fields[field], in_one_kind))})


def _each(value: Any) -> list[Any]:
    """The prompts of a body's field, of which one by itself can be a list."""
    return value if isinstance(value, list) and not is_one_prompt(value) and not _is_mixed(value) else [value]


def _is_mixed(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int, str}


@attrs.define
class _Reader:
    """Makes token ids of prompts that mix them with texts."""

    gateway: Gateway
    http: Exchange
    field: str
    _texts: int = attrs.field(default=0, init=False)

    async def ids_of_all(self, value: Any, in_one_kind: bool) -> Any:
        """`value` with token ids in place of such prompts; with `in_one_kind` of all of them."""
        if _is_mixed(value):
            return await self._ids(value)
        return [await self._settled(each, in_one_kind) for each in value]

    async def _settled(self, prompt: Any, in_one_kind: bool) -> Any:
        if _is_mixed(prompt):
            return await self._ids(prompt)
        if not in_one_kind or isinstance(prompt, list):
            return prompt
        text = _text_of(prompt, self.field)[0] if isinstance(prompt, dict) else prompt
        return await self._ids([text]) if isinstance(text, str) else prompt

    async def _ids(self, parts: list[Any]) -> list[int]:
        """What a model wants around a text is there where the prompt begins with one."""
        found: list[int] = []
        for at, part in enumerate(parts):
            if isinstance(part, int):
                found.append(part)
            elif part:
                found += await self._text_ids(part, is_first=at == 0)
        return found

    async def _text_ids(self, text: str, *, is_first: bool) -> tuple[int, ...]:
        self._texts += 1
        if self._texts > MAX_TEXTS_AMONG_IDS:
            raise BadRequest(f"{self.field}: more than {MAX_TEXTS_AMONG_IDS:,} texts stand among token ids; join them")
        if problem := Text().problem(text):
            raise BadRequest(f"{self.field}: {problem}")
        tokenized = await self._tokenized(text)
        if is_first:
            return tokenized.token_ids
        return tokenized.token_ids[tokenized.added_tokens : len(tokenized.token_ids) - await self._added_behind()]

    async def _added_behind(self) -> int:
        """How many tokens a model that embeds wants behind a text."""
        if self.gateway.source.info.capabilities.generate:
            return 0
        around = await self._tokenized("")
        return len(around.token_ids) - around.added_tokens

    async def _tokenized(self, text: str) -> Tokenized:
        return await self.gateway.source.tokenize(Request(self.http.id, prompt=text, parse_special=True))


def requests_for(
    gateway: Gateway, http: Exchange, value: Any, params: SamplingParams, *, stream: bool, **how: Any
) -> list[Request]:
    """A request for each prompt of the field `prompt`, with `how` as further fields. Raises as `prompts`."""
    media = MediaReader(gateway.source.info.capabilities)
    requests = [
        Request(
            f"{http.id}-{index}" if index else http.id,
            sampling=params,
            stream=stream,
            parse_special=True,
            **how,
            **prompt,
        )
        for index, prompt in enumerate(prompts(gateway, value, "prompt", media))
    ]
    media.name_in_prompts(http.names, requests)
    return requests


def prompts(gateway: Gateway, value: Any, field: str, media: MediaReader | None = None) -> list[dict[str, Any]]:
    """Each prompt as `Request` takes it, with what `media` reads of it. Raises `BadRequest` for what is none."""
    vocab_size = gateway.source.info.model.vocab_size
    if is_one_prompt(value):
        return [_prompt(value, field, vocab_size, media)]
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{field}: expected {PROMPTS}, not {show(value)}")
    if len(value) > MAX_PROMPTS:
        raise BadRequest(f"{field}: {len(value):,} prompts are more than {MAX_PROMPTS:,}")
    return [_prompt(each, f"{field}[{index}]", vocab_size, media) for index, each in enumerate(value)]


def is_one_prompt(value: Any) -> bool:
    """Whether this is a prompt by itself and no list of prompts."""
    return isinstance(value, str | dict) or _is_ids(value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


def _prompt(value: Any, field: str, vocab_size: int, media: MediaReader | None) -> dict[str, Any]:
    shown: tuple[Media, ...] = ()
    if isinstance(value, dict):
        if media is not None and media.takes_any and value.get("multimodal_data") is not None:
            value, shown = _marked(value, field, media)
            field = f"{field}.prompt_string"
        else:
            value, field = _text_of(value, field)
    if isinstance(value, str):
        if "\0" in value:
            raise BadRequest(f"{field}: holds a NUL character, which no tokenizer takes")
        return {"prompt": value, "media": shown} if shown else {"prompt": value}
    if not _is_ids(value):
        raise BadRequest(f"{field}: expected a string or a list of token ids, not {show(value)}")
    if (wrong := min(value)) < 0 or (wrong := max(value)) >= vocab_size:
        raise BadRequest(f"{field}: {wrong} is not in the vocabulary of {vocab_size:,} tokens")
    return {"token_ids": tuple(value)}


def _marked(value: dict[str, Any], field: str, media: MediaReader) -> tuple[str, tuple[Media, ...]]:
    """The text of llama-server's object without its marks, and what stands in their places."""
    text, data = value.get("prompt_string"), value["multimodal_data"]
    if not isinstance(text, str):
        raise BadRequest(f"{field}.prompt_string: expected a string beside multimodal_data, not {show(text)}")
    field = f"{field}.multimodal_data"
    if not isinstance(data, list) or not all(isinstance(each, str) for each in data):
        raise BadRequest(f"{field}: expected a list of files as base64, not {show(data)}")
    head, *rest = text.split(MEDIA_MARKER)
    if len(rest) != len(data):
        raise BadRequest(
            f"{field}: {len(data)} files for {len(rest)} marks {MEDIA_MARKER} in prompt_string; give as many"
        )
    files = (media.take(each, f"{field}[{at}]") for at, each in enumerate(data))
    return joined([head, *(part for pair in zip(files, rest, strict=True) for part in pair)])


def _text_of(value: dict[str, Any], field: str) -> tuple[str, str]:
    """The text of llama-server's objects, and where it stands. Raises `Unsupported` for images and sounds."""
    if value.get("multimodal_data") is not None:
        abilities.media("multimodal_data", field)
    if isinstance(text := value.get("prompt_string"), str):
        return text, f"{field}.prompt_string"
    parts = value.get("content")
    if not isinstance(parts, list) or not parts:
        raise BadRequest(f"{field}: expected prompt_string (a string) or content (a list of parts), not {show(value)}")
    return "".join(_part(part, f"{field}.content[{at}]") for at, part in enumerate(parts)), f"{field}.content"


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind.startswith(("image", "input_")):
            abilities.media(kind, path)
        raise BadRequest(f"{path}: expected a part with type text, not {show(part)}")
    if not isinstance(text := part.get("text"), str):
        raise BadRequest(f"{path}.text: expected a string, not {show(text)}")
    return text
