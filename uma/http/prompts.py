"""Prompts as the completions and embeddings of OpenAI and llama-server have them: a string, a list of token ids, a list
of either, and llama-server's further forms: texts among token ids, `{"prompt_string": …}`, with pictures and sounds in
`multimodal_data`, and `{"content": [parts]}`.
"""

from __future__ import annotations

from typing import Any

import attrs

from uma.constraints import show
from uma.errors import BadRequest
from uma.http import abilities
from uma.http.media import MediaReader
from uma.http.reader import Reader, checked_text
from uma.types import Media, Request, Source, Tokenized, joined

PROMPTS = "a string, a list of token ids, or a list of these"
MEDIA_MARKER = "<__media__>"
"""What stands for a picture or a sound in the text beside `multimodal_data`: llama.cpp's own."""
MAX_PROMPTS = 2048
"""OpenAI's own bound of prompts in one request."""
MAX_TEXTS_AMONG_IDS = 1024
"""Maximum texts of a body's prompts that stand among token ids: each is tokenized by itself."""


def has_mixed(value: Any, *, in_one_kind: bool = False) -> bool:
    """Whether some of the prompts of a body's field mix texts with token ids, for `with_ids`.

    `in_one_kind`: also where a list has prompts of both kinds.
    """
    found = _each(value)
    return any(map(_is_mixed, found)) or (in_one_kind and len({isinstance(each, list) for each in found}) > 1)


async def with_ids(source: Source, id: str, value: Any, field: str, *, in_one_kind: bool = False) -> Any:
    """The prompts of a body's field, with token ids in place of those that mix texts with these; with `in_one_kind` in
    place of all. Raises what `Source.tokenize` does, and `BadRequest`.
    """
    return await _Tokenizer(source, id, field).ids_of_all(value, in_one_kind)


def _each(value: Any) -> list[Any]:
    """The prompts of a body's field, of which one by itself can be a list."""
    return value if isinstance(value, list) and not is_one_prompt(value) and not _is_mixed(value) else [value]


def _is_mixed(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int, str}


@attrs.define
class _Tokenizer:
    """Makes token ids of prompts that mix them with texts."""

    source: Source
    id: str
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
            raise BadRequest.at(self.field, f"more than {MAX_TEXTS_AMONG_IDS:,} texts stand among token ids; join them")
        tokenized = await self._tokenized(checked_text(text, self.field))
        if is_first:
            return tokenized.token_ids
        return tokenized.token_ids[tokenized.added_tokens : len(tokenized.token_ids) - await self._added_behind()]

    async def _added_behind(self) -> int:
        """How many tokens a model that embeds wants behind a text."""
        if self.source.info.capabilities.generate:
            return 0
        around = await self._tokenized("")
        return len(around.token_ids) - around.added_tokens

    async def _tokenized(self, text: str) -> Tokenized:
        return await self.source.tokenize(Request(self.id, prompt=text, parse_special=True))


def prompts(reader: Reader, value: Any, field: str, *, with_media: bool = True) -> list[dict[str, Any]]:
    """Each prompt as `Request` takes it, with pictures and sounds where these can be. Raises `BadRequest` for what is
    none.
    """
    if is_one_prompt(value):
        return [_prompt(reader, value, field, with_media)]
    if not isinstance(value, list) or not value:
        raise BadRequest.at(field, f"expected {PROMPTS}, not {show(value)}")
    if len(value) > MAX_PROMPTS:
        raise BadRequest.at(field, f"{len(value):,} prompts are more than {MAX_PROMPTS:,}")
    return [_prompt(reader, each, f"{field}[{index}]", with_media) for index, each in enumerate(value)]


def is_one_prompt(value: Any) -> bool:
    """Whether this is a prompt by itself and no list of prompts."""
    return isinstance(value, str | dict) or _is_ids(value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


def _prompt(reader: Reader, value: Any, field: str, with_media: bool) -> dict[str, Any]:
    shown: tuple[Media, ...] = ()
    if isinstance(value, dict):
        if with_media and reader.media.takes_any and value.get("multimodal_data") is not None:
            value, shown = _marked(value, field, reader.media)
            field = f"{field}.prompt_string"
        else:
            value, field = _text_of(value, field)
    if isinstance(value, str):
        if "\0" in value:
            raise BadRequest.at(field, "holds a NUL character, which no tokenizer takes")
        return {"prompt": value, "media": shown} if shown else {"prompt": value}
    if not _is_ids(value):
        raise BadRequest.at(field, f"expected a string or a list of token ids, not {show(value)}")
    vocab_size = reader.info.model.vocab_size
    if (wrong := min(value)) < 0 or (wrong := max(value)) >= vocab_size:
        raise BadRequest.at(field, f"{wrong} is not in the vocabulary of {vocab_size:,} tokens")
    return {"token_ids": tuple(value)}


def _marked(value: dict[str, Any], field: str, media: MediaReader) -> tuple[str, tuple[Media, ...]]:
    """The text of llama-server's object without its marks, and what stands in their places."""
    text, data = value.get("prompt_string"), value["multimodal_data"]
    if not isinstance(text, str):
        raise BadRequest.at(f"{field}.prompt_string", f"expected a string beside multimodal_data, not {show(text)}")
    field = f"{field}.multimodal_data"
    if not isinstance(data, list) or not all(isinstance(each, str) for each in data):
        raise BadRequest.at(field, f"expected a list of files as base64, not {show(data)}")
    head, *rest = text.split(MEDIA_MARKER)
    if len(rest) != len(data):
        raise BadRequest.at(
            field, f"{len(data)} files for {len(rest)} marks {MEDIA_MARKER} in prompt_string; give as many"
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
        raise BadRequest.at(field, f"expected prompt_string (a string) or content (a list of parts), not {show(value)}")
    return "".join(_part(part, f"{field}.content[{at}]") for at, part in enumerate(parts)), f"{field}.content"


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind.startswith(("image", "input_")):
            abilities.media(kind, path)
        raise BadRequest.at(path, f"expected a part with type text, not {show(part)}")
    if not isinstance(text := part.get("text"), str):
        raise BadRequest.at(f"{path}.text", f"expected a string, not {show(text)}")
    return text
