"""Pictures and sounds among the parts of a message, as each dialect has them, where the model takes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import attrs

from uma.constraints import show
from uma.errors import BadRequest
from uma.http.ignored import Ignored
from uma.http.problem import Unsupported
from uma.types import MAX_MEDIA, Capabilities, Media, Message, Request

PICTURES = ("image_url", "input_image", "image")
"""Types of parts that are pictures: OpenAI's two, and Anthropic's."""
SOUNDS = ("input_audio", "audio_url")
"""Types of parts that are sounds: OpenAI's, and vLLM's."""

_IN_BASE64 = re.compile(r"(?i); *base64\s*$")
"""End of a data URL's head."""


@attrs.define
class MediaReader:
    """What of a request's pictures and sounds is read."""

    able: Capabilities
    _places: list[tuple[Media, str]] = attrs.field(factory=list, init=False)

    @property
    def takes_any(self) -> bool:
        """Whether the model takes pictures or sounds."""
        return self.able.vision or self.able.audio

    def takes(self, kind: Any) -> bool:
        """Whether the model takes parts of this type; else `content` says what becomes of them."""
        return (kind in PICTURES and self.able.vision) or (kind in SOUNDS and self.able.audio)

    def read(self, part: dict[str, Any], path: str, ignored: Ignored) -> Media:
        """The file that a part is whose type the model `takes`. Raises `BadRequest`, and `Unsupported` for one that
        lies elsewhere.
        """
        kind = part["type"]
        if kind == "image":
            return self._of_anthropic(part.get("source"), f"{path}.source")
        if kind == "input_audio":
            return self.take(*_of_audio(part.get(kind), f"{path}.{kind}", ignored))
        if part.get("detail") is not None:
            ignored.add(f"{path}.detail")
        name = "audio_url" if kind == "audio_url" else "image_url"
        value, field = part.get(name), f"{path}.{name}"
        if kind == "input_image" and value is None and part.get("file_id") is not None:
            raise Unsupported.at(f"{path}.file_id", "files are not read; send the picture itself as a data URL")
        if isinstance(value, dict):
            ignored.add_unknown(value, ("url",), field)
            value, field = value.get("url"), f"{field}.url"
        if not isinstance(value, str):
            raise BadRequest.at(field, f"expected a data URL, not {show(value)}")
        return self.of_url(value, field)

    def take(self, data: str, place: str) -> Media:
        """A file as base64, and where the body has it. Raises `BadRequest` for one too many, and for nothing."""
        if not data:
            raise BadRequest.at(place, "is empty")
        return self._took(Media(data), place)

    def _took(self, made: Media, place: str) -> Media:
        if len(self._places) == MAX_MEDIA:
            raise BadRequest.at(place, f"more than {MAX_MEDIA} pictures and sounds in one request")
        self._places.append((made, place))
        return made

    def of_url(self, url: str, field: str) -> Media:
        """The file at a URL that `field` has. Raises as `read`."""
        url = url.strip()
        scheme, _, rest = url.partition(":")
        if scheme.lower() in ("http", "https"):
            if not self.able.media_urls:
                raise Unsupported.at(
                    field, "this server fetches nothing (--media-urls); send the file itself as a data URL"
                )
            try:
                return self._took(Media(url=url), field)
            except ValueError as error:
                raise BadRequest.at(field, f"{error}") from None
        if scheme.lower() != "data":
            expected = "an http, https or data URL" if self.able.media_urls else "a data URL"
            raise BadRequest.at(field, f"expected {expected}, not {show(url)}")
        head, comma, data = rest.partition(",")
        if not comma or not _IN_BASE64.search(head):
            raise BadRequest.at(field, "expected data:...;base64, and the file")
        return self.take(unquote(data) if "%" in data else data, field)

    def _of_anthropic(self, source: Any, field: str) -> Media:
        if not isinstance(source, dict):
            raise BadRequest.at(field, f"expected an object of type base64, not {show(source)}")
        if source.get("type") == "url" and isinstance(source.get("url"), str):
            return self.of_url(source["url"], f"{field}.url")
        if source.get("type") != "base64":
            raise Unsupported.at(
                f"{field}.type", f"{show(source.get('type'))} cannot be read; send the picture itself as base64"
            )
        data = source.get("data")
        if not isinstance(data, str):
            raise BadRequest.at(f"{field}.data", f"expected base64, not {show(data)}")
        return self.take(data, f"{field}.data")

    def name(self, names: dict[str, str], messages: Sequence[Message]) -> None:
        """Tell in `names` where the body has the pictures and sounds of its `messages`."""
        for index, message in enumerate(messages):
            for at, media in enumerate(message.media):
                # A text is one object for as long as the request: its copies in messages have the very same.
                place = next(place for each, place in self._places if each.data is media.data and each.url is media.url)
                names[f"messages[{index}].media[{at}].data"] = names[f"messages[{index}].media[{at}].url"] = place

    def name_in_prompts(self, names: dict[str, str], requests: Sequence[Request]) -> None:
        """Name the field in errors about a prompt's files. Of several files the error does not name the one."""
        if len(requests) == 1:
            names.update((f"media[{at}].data", place) for at, (_, place) in enumerate(self._places))
        else:
            names["media"] = "multimodal_data"


def _of_audio(given: Any, field: str, ignored: Ignored) -> tuple[str, str]:
    """What `format` says is not asked: the file says it itself."""
    if not isinstance(given, dict) or not isinstance(data := given.get("data"), str):
        raise BadRequest.at(field, f"expected an object with data, a sound's file as base64, not {show(given)}")
    ignored.add_unknown(given, ("data", "format"), field)
    return data, f"{field}.data"
