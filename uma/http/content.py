"""Message contents, of all dialects: strings and lists of parts, to the text that a model reads.

A model reads text, pictures where it sees and sounds where it hears (`media`). What else there is in the question
itself is refused, so that nobody takes the answer for one about it. Elsewhere, in a tool's result or an earlier turn, a
text stands in its place: a program sends it again with every turn, and would never get an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import attrs

from uma import json_text
from uma.constraints import Json, Text, show
from uma.errors import BadRequest
from uma.http import abilities
from uma.http.reader import Reader, checked_text
from uma.types import Media, joined

_IMAGE, _SOUND = "[an image, which this model cannot see]", "[a sound, which this model cannot hear]"
_FILE, _VIDEO = "[a file, which this model cannot read]", "[a video, which this model cannot see]"
STAND_INS: Mapping[str, str] = {
    "image_url": _IMAGE,
    "input_image": _IMAGE,
    "image": _IMAGE,
    "input_audio": _SOUND,
    "audio_url": _SOUND,
    "file": _FILE,
    "input_file": _FILE,
    "document": _FILE,
    "video_url": _VIDEO,
}
"""What stands in the place of a part that is no text, by the part's type."""


@attrs.frozen(kw_only=True)
class _TextPart:
    type: str
    text: Annotated[str, Text()]
    annotations: Any = None
    """Annotations of a message that was an answer; it has the next two as well."""
    logprobs: Any = None
    citations: Any = None


@attrs.frozen(kw_only=True)
class _JsonPart:
    """What a program knows, as JSON: OpenAI's decisions have it."""

    type: str
    data: Annotated[dict[str, Any] | list[Any], Json(depth=32, le=262_144)]


@attrs.frozen(kw_only=True)
class _Refusal:
    """What OpenAI's models say instead of an answer."""

    type: str
    refusal: Annotated[str, Text()]


@attrs.frozen(kw_only=True)
class _Reference:
    """A tool that a search among tools found."""

    type: str
    tool_name: Annotated[str, Text()]


@attrs.frozen(kw_only=True)
class _SearchResult:
    type: str
    content: Any
    source: Annotated[str, Text()] | None = None
    title: Annotated[str, Text()] | None = None
    citations: Any = None


@attrs.frozen(kw_only=True)
class _Document:
    type: str
    source: dict[str, Any]
    title: Annotated[str, Text()] | None = None
    context: Annotated[str, Text()] | None = None
    citations: Any = None


def question_start(speakers: Sequence[str]) -> int:
    """Where the question begins in a conversation of these speakers: behind the last `assistant`; at the end where a
    `tool` speaks behind it, for then an answer has begun, and a program shows the model what its tools brought.
    """
    start = max((index for index, speaker in enumerate(speakers) if speaker == "assistant"), default=-1) + 1
    return len(speakers) if "tool" in speakers[start:] else start


def text_of(content: Any, path: str, reader: Reader, *, is_question: bool = False) -> str:
    """A message's content, a string or a list of parts, as one string; parts are lines.

    Fields of a part that are not known are ignored, and so are images, audio and files, in whose place one
    of `STAND_INS` stands. Raises `Unsupported` for these where the content is the question itself, and `BadRequest` for
    a type that is none of a part.
    """
    if isinstance(content, str):
        return checked_text(content, path)
    if content is None:
        return ""
    if not isinstance(content, list):
        raise BadRequest.at(path, f"expected a string or a list of parts, not {show(content)}")
    return "\n".join(
        part_text(part, f"{path}[{index}]", reader, is_question=is_question) for index, part in enumerate(content)
    )


def content_of(content: Any, path: str, reader: Reader, *, is_question: bool) -> tuple[str, tuple[Media, ...]]:
    """The text of a message and the pictures and sounds in it; see `text_of`."""
    if not isinstance(content, list):
        return text_of(content, path, reader, is_question=is_question), ()
    return joined(
        [part_of(part, f"{path}[{index}]", reader, is_question=is_question) for index, part in enumerate(content)]
    )


def part_of(part: Any, path: str, reader: Reader, *, is_question: bool) -> str | Media:
    """One part of a message: its text (see `text_of`), or a picture or a sound where the model takes it."""
    if isinstance(part, dict) and reader.media.takes(part.get("type")):
        return reader.media.read(part, path, reader.ignored)
    return part_text(part, path, reader, is_question=is_question)


def part_text(part: Any, path: str, reader: Reader, *, is_question: bool = False) -> str:
    """The text of one part; see `text_of`."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text", "summary_text", "reasoning_text"):
        return reader.part(part, _TextPart, path).text
    if kind == "input_json":
        return json_text.dumps(reader.part(part, _JsonPart, path).data, separators=(",", ":"))
    if kind == "refusal":
        return reader.part(part, _Refusal, path).refusal
    if kind == "tool_reference":
        return reader.part(part, _Reference, path).tool_name
    if kind == "search_result":
        found = reader.part(part, _SearchResult, path)
        return _lines(found.title, found.source, text_of(found.content, f"{path}.content", reader))
    if kind == "document" and (text := _document(part, path, reader, is_question=is_question)) is not None:
        return text
    if isinstance(kind, str) and kind in STAND_INS:
        return stand_in(kind, path, reader, is_question=is_question)
    raise BadRequest.at(path, f"expected a part with type text, not {show(part)}")


def stand_in(kind: str, path: str, reader: Reader, *, is_question: bool) -> str:
    """The text in the place of what is none; `path` is noted as ignored. Raises `Unsupported` in a question."""
    if is_question:
        abilities.media(kind, path)
    reader.ignored.add(path)
    return STAND_INS[kind]


def _document(part: Any, path: str, reader: Reader, *, is_question: bool) -> str | None:
    """The text of Anthropic's `document`; None for one that is no text."""
    found = reader.part(part, _Document, path)
    source, here = found.source, f"{path}.source"
    if source.get("type") == "text":
        text = text_of(source.get("data"), f"{here}.data", reader)
    elif source.get("type") == "content":
        text = text_of(source.get("content"), f"{here}.content", reader, is_question=is_question)
    else:
        return None
    return _lines(found.title, found.context, text)


def _lines(*texts: str | None) -> str:
    return "\n".join(text for text in texts if text)
