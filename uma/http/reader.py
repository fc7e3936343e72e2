"""What a dialect reads a body with: objects of JSON become instances of classes; what is ignored is noted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from uma.constraints import Text, hints_of, show
from uma.errors import BadRequest
from uma.http.ignored import Ignored
from uma.http.media import MediaReader
from uma.http.problem import Unsupported
from uma.models.names import adapter_in
from uma.protocol.converter import structure, unknown_fields
from uma.types import Capabilities, ServerInfo
from uma.wrong import below

T = TypeVar("T")

SYNONYMS = (
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict"),
    ("stop", "stop_sequences", "stopping_strings"),
)
"""Names of one bound in several dialects and servers, which clients mix up: each endpoint takes all of them."""
_FORMS = ("response_format", "format", "output_format", "output_config", "text", "structural_tag", "regex", "ebnf")
_OTHER_BOUNDS = ("stop_token_ids", "allowed_token_ids", "bad_words")


def read(fields: Any, cls: type[T], ignored: Ignored, path: str = "") -> T:
    """`fields`, which the body has at `path`, as a `cls`; those that it does not have are added to `ignored`.

    Raises `BadRequest` with a line for each wrong field.
    """
    if not isinstance(fields, Mapping):
        raise BadRequest.at(path, f"expected an object, not {show(fields)}")
    try:
        found = structure(fields, cls)
    except BadRequest as error:
        raise BadRequest(*below(path, error.lines)) from None
    ignored.add_all(unknown_fields(fields, cls, f"{path}." if path else ""))
    return found


@attrs.define
class Reader:
    """Makes instances of a dialect's classes of one request's body, and notes which fields are ignored or renamed.

    Used in whichever thread: a long body is read in a thread of its own.
    """

    id: str
    """The request's id."""
    info: ServerInfo
    """The server and the model that the body is for."""
    ignored: Ignored
    """Fields that have no effect."""
    names: dict[str, str]
    """The body's names for fields that the engine calls otherwise; errors use them."""
    _check_model: Callable[[str | None], str]
    """See `ModelNames.check`."""
    load_ms: float = 0.0
    """See `Exchange.load_ms`."""
    model: str = attrs.field(default="", init=False)
    """The model's name as the answer has it, once the body is read."""
    media: MediaReader = attrs.field(init=False)
    """The body's pictures and sounds."""

    @media.default
    def _media(self) -> MediaReader:
        return MediaReader(self.able)

    @property
    def able(self) -> Capabilities:
        """What the model can do."""
        return self.info.capabilities

    @property
    def adapted_model(self) -> str | None:
        """The model's name where it asks for one of its adapters, for a request's `model`."""
        return None if adapter_in(self.model, self.able.adapters) is None else self.model

    def body(self, fields: Mapping[str, Any], cls: type[T]) -> T:
        """A whole body. Raises `BadRequest` with a line for each wrong field, and `UnknownModel`."""
        body = read(fields, cls, self.ignored)
        self.model = self._check_model(getattr(body, "model", None))
        return body

    def generating(self, fields: Mapping[str, Any], cls: type[T]) -> T:
        """A whole body that generates; a form or a bound that it asks for under another name is never ignored.

        Raises `Unsupported` for those that have no field in `cls`.
        """
        fields, own = self.as_own(fields, cls), hints_of(cls)
        for name in (*_FORMS, *_OTHER_BOUNDS):
            if name in own or not _asks(fields.get(name)):
                continue
            found = name
            if name in ("output_config", "text"):
                if not isinstance(fields[name], dict) or not _asks(fields[name].get("format")):
                    continue
                found = f"{name}.format"
            place = next((each for each in _FORMS if each in own), "json_schema") if name in _FORMS else "stop"
            raise Unsupported.at(found, f"is not supported by this endpoint; give {place} instead, or leave it out")
        return self.body(fields, cls)

    def part(self, part: Any, cls: type[T], path: str) -> T:
        """The part of the body at `path` as a `cls`. Raises `BadRequest`."""
        return read(part, cls, self.ignored, path)

    def as_own(self, fields: Mapping[str, Any], cls: type, path: str = "") -> Mapping[str, Any]:
        """`fields` with a bound that has another name of `SYNONYMS` under that of `cls`, where that is not given too.

        `path` is where the body has them.
        """
        for names in SYNONYMS:
            own = [name for name in names if name in hints_of(cls)]
            alias = next((name for name in names if name not in own and fields.get(name) is not None), None)
            if own and alias is not None and all(fields.get(name) is None for name in own):
                rest = {name: each for name, each in fields.items() if name not in (alias, own[0])}
                fields = {own[0]: fields[alias], **rest}
                self.names[path + own[0]] = alias
        return fields

    def first(self, *given: tuple[str, T | None]) -> T | None:
        """First of several fields that mean the same that the body has. The others that it has are ignored."""
        return self.named_first(*given)[1]

    def named_first(self, *given: tuple[str, T | None]) -> tuple[str, T | None]:
        """Name and value of the first of several fields that the body has; the name is empty where it has none."""
        there = [(name, value) for name, value in given if value is not None]
        self.ignored.add_all(name for name, _ in there[1:])
        return there[0] if there else ("", None)


def checked_text(text: str, path: str) -> str:
    """`text`. Raises `BadRequest` where it cannot be tokenized."""
    if (problem := Text().problem(text)) is not None:
        raise BadRequest.at(path, f"{problem}")
    return text


def _asks(value: Any) -> bool:
    """Whether a value asks for a form or a bound: text alone and what is empty do not."""
    return bool(value) and not (isinstance(value, dict) and value.get("type") == "text")
