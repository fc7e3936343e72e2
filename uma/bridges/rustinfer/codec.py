"""Parses requests and encodes answers: JSON or MessagePack, detected by the first byte, and answered in the same form.

A JSON message begins with `{`, `"` or white space. In MessagePack these bytes are small integers, which no message is.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import attrs
import msgpack
import orjson

from uma.bridges.rustinfer.messages import ANSWER_VARIANTS, METRICS_QUERY, Answer, InferenceRequest, by_name
from uma.constraints import show
from uma.contracts.parse import parse
from uma.errors import BadRequest, InvalidJson

JSON_STARTS = frozenset(b'{"[ \t\r\n')
SEARCHED_BYTES = 512
"""Bytes at either end of an oversized message that are searched for the request's id."""


class WireForm(Enum):
    """Encoding of a peer's messages."""

    JSON = "JSON"
    NAMED = "MessagePack, structs as maps"
    COMPACT = "MessagePack, structs as lists"


class RustInferMetricsQuery:
    """Request for `EngineMetrics`."""


@attrs.frozen
class BadMessageError(Exception):
    """A message that is refused. `request_id` is the id that it names, if it can be found."""

    reason: str
    form: WireForm
    request_id: str | None = None


def decode(data: bytes) -> tuple[InferenceRequest | RustInferMetricsQuery, WireForm]:
    """A server's message, and its encoding. Raises `BadMessageError`."""
    form = WireForm.JSON if data[:1] and data[0] in JSON_STARTS else WireForm.NAMED
    try:
        value = orjson.loads(data) if form is WireForm.JSON else msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise BadMessageError(f"the message is no {form.name.replace('NAMED', 'MessagePack')}: {error}", form) from None
    except RecursionError:
        raise BadMessageError("the message is nested too deep", form) from None
    if value in (METRICS_QUERY, {METRICS_QUERY: None}):
        return RustInferMetricsQuery(), form
    return _inference(value, form)


def _inference(value: Any, form: WireForm) -> tuple[InferenceRequest, WireForm]:
    if not isinstance(value, dict) or set(value) != {"Inference"}:
        expected = f'expected {{"Inference": …}} or "{METRICS_QUERY}", not {show(value)}'
        raise BadMessageError(expected, form, _id_in(value))
    fields = value["Inference"]
    if isinstance(fields, list) and form is WireForm.NAMED:
        form, fields = WireForm.COMPACT, by_name(fields, InferenceRequest)
    try:
        return parse(fields, InferenceRequest, strict=False), form
    except (BadRequest, InvalidJson) as error:
        raise BadMessageError(error.message, form, _id_in(fields)) from None


def _id_in(value: Any) -> str | None:
    """The id of a request, wherever it is in a message that is otherwise wrong."""
    if not isinstance(value, dict):
        return None
    found = value.get("request_id")
    if isinstance(found, str):
        return found[:128]
    return next((id for member in value.values() if (id := _id_in(member)) is not None), None)


_JSON_ID = re.compile(rb'"request_id"\s*:\s*"([^"\\]{1,128})"')
_PACKED_ID = re.compile(rb"request_id(?:[\xa1-\xbf]|\xd9.)", re.DOTALL)
"""Key `request_id` and the header of the string after it; the last byte of the match has the string's length."""


def refuse_oversized(data: bytes, limit: int) -> BadMessageError:
    """Refusal of a message that is too large to be parsed, with the id found near its beginning or end."""
    form = WireForm.JSON if data[:1] and data[0] in JSON_STARTS else WireForm.NAMED
    ends = (data[:SEARCHED_BYTES], data[-SEARCHED_BYTES:])
    id = next((id for end in ends if (id := _id_near(end, form)) is not None), None)
    return BadMessageError(f"the message has {len(data):,} bytes; at most {limit:,} are taken", form, id)


def _id_near(data: bytes, form: WireForm) -> str | None:
    if form is WireForm.JSON:
        found = _JSON_ID.search(data)
        return found[1].decode("utf-8", "replace") if found else None
    found = _PACKED_ID.search(data)
    if found is None:
        return None
    last = found[0][-1]
    size = last & 0x1F if len(found[0]) == len(b"request_id") + 1 else last
    return data[found.end() : found.end() + min(size, 128)].decode("utf-8", "replace")


def encode(answer: Answer, form: WireForm) -> bytes:
    """An answer in the encoding of its request."""
    # serde writes a struct as a map of all its fields, or compactly as a list of their values.
    body = attrs.astuple(answer) if form is WireForm.COMPACT else attrs.asdict(answer)
    variant = ANSWER_VARIANTS.get(type(answer))
    whole = body if variant is None else {variant: body}
    if form is WireForm.JSON:
        return orjson.dumps(whole)
    packed: bytes = msgpack.packb(whole)
    return packed
