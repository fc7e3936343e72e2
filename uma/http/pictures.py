"""Pictures among the parts of a message, as each dialect has them: base64, where the model sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from uma.constraints import show
from uma.errors import BadRequest
from uma.http.problem import Unsupported
from uma.types import MAX_PICTURES, Message, Picture

KINDS = ("image_url", "input_image", "image")
"""Types of parts that are pictures: OpenAI's two, and Anthropic's."""


@attrs.define
class Pictures:
    """What of a request's pictures is read, in order."""

    sees: bool
    """Whether the model takes any; else `content` says what becomes of them."""
    _places: list[str] = attrs.field(factory=list)

    def read(self, part: dict[str, Any], path: str, ignored: list[str]) -> Picture:
        """The picture that a part of one of `KINDS` is. Raises `BadRequest`, and `Unsupported` for one elsewhere."""
        kind = part["type"]
        if kind == "image":
            return self.take(*_of_anthropic(part.get("source"), f"{path}.source"))
        if part.get("detail") is not None:
            ignored.append(f"{path}.detail")
        value, field = part.get("image_url"), f"{path}.image_url"
        if kind == "input_image" and value is None and part.get("file_id") is not None:
            raise Unsupported(f"{path}.file_id: files are not read; send the picture itself as a data URL")
        if isinstance(value, dict):
            ignored += [f"{field}.{name}" for name in value if name != "url"]
            value, field = value.get("url"), f"{field}.url"
        if not isinstance(value, str):
            raise BadRequest(f"{field}: expected a data URL, not {show(value)}")
        return self.take(_of_url(value, field), field)

    def take(self, data: str, place: str) -> Picture:
        """A picture as base64, and where the body has it. Raises `BadRequest` for one too many, and for nothing."""
        if len(self._places) == MAX_PICTURES:
            raise BadRequest(f"{place}: more than {MAX_PICTURES} pictures in one request")
        if not data:
            raise BadRequest(f"{place}: is empty")
        self._places.append(place)
        return Picture(data)

    def name(self, names: dict[str, str], messages: Sequence[Message]) -> None:
        """Tell in `names` where the body has the pictures of its `messages`."""
        places = iter(self._places)
        for index, message in enumerate(messages):
            for at in range(len(message.pictures)):
                names[f"messages[{index}].pictures[{at}].data"] = next(places)


def _of_url(url: str, field: str) -> str:
    scheme, _, rest = url.partition(":")
    if scheme.lower() != "data":
        raise Unsupported(f"{field}: this server fetches nothing; send the picture itself as a data URL")
    head, comma, data = rest.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise BadRequest(f"{field}: expected data:image/...;base64, and the picture's file")
    return data


def _of_anthropic(source: Any, field: str) -> tuple[str, str]:
    if not isinstance(source, dict):
        raise BadRequest(f"{field}: expected an object of type base64, not {show(source)}")
    if source.get("type") != "base64":
        raise Unsupported(f"{field}.type: {show(source.get('type'))} cannot be read; send the picture itself as base64")
    data = source.get("data")
    if not isinstance(data, str):
        raise BadRequest(f"{field}.data: expected base64, not {show(data)}")
    return data, f"{field}.data"
