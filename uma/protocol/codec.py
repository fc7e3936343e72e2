"""Parses payloads to messages, and encodes events as frames: the one place where the wire's JSON is read and written.

Token events are by far the most frequent, so they are encoded and parsed by hand; everything else uses the converter.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, get_args

import orjson

from uma import json_bytes
from uma.constraints import MAX_LINES, already_checked, hints_of, problems, show
from uma.errors import BadRequest, InvalidJson
from uma.protocol.converter import cut, structure, unknown_fields, unstructure
from uma.protocol.frames import encode_frame
from uma.protocol.messages import (
    Cancel,
    ClientMessage,
    EmbedQuery,
    Encoding,
    EndThinking,
    Generate,
    Hello,
    MetricsEvent,
    Query,
    Sender,
    ServerEvent,
    TokenEvent,
    TokenizeQuery,
    UnknownEvent,
    WholeQuery,
)
from uma.protocol.wire import (
    COMMANDS,
    EVENTS,
    FIELDS_OF_1_0,
    REQUESTS,
    SAMPLING_FIELDS,
    TOKENIZE_FIELDS,
    name_of,
    unknown_to,
)
from uma.types import (
    PROMPT_FIELDS,
    Embeddings,
    Logprobs,
    Request,
    SamplingParams,
    Token,
    TokenLogprob,
    prompt_problem,
)

_EVENT_NAMES = {cls: name for name, cls in EVENTS.items()}
_METADATA = hints_of(Request)["metadata"]
_LOGPROB_FIELDS = tuple(hints_of(TokenLogprob))
_PLAIN: Mapping[str, type[Any]] = {name_of(cls): cls for cls in (Hello, *get_args(Query))}
_WHOLE = frozenset(map(name_of, get_args(WholeQuery)))
_HELP = "a cancel is {'event': 'cancel', 'id': ...}"


def read_object(payload: bytes) -> dict[str, Any]:
    """The JSON object of a payload. Raises `InvalidJson` where it is not one."""
    try:
        value = json_bytes.loads(payload)
    except orjson.JSONDecodeError as error:
        raise InvalidJson(f"the frame {json_bytes.fault(error)}") from None
    if not isinstance(value, dict):
        raise InvalidJson(f"the frame is not a JSON object, but {show(value)}")
    return value


def message_of(
    fields: dict[str, Any],
    *,
    strict: bool = False,
    n_vocab: int | None = None,
    version: str | None = None,
) -> ClientMessage:
    """A client's message, in a session of this `version` (None: the newest). Consumes `fields`.

    Unknown fields are ignored and named in the message's `warnings`; `strict` refuses them. `n_vocab` bounds
    `token_ids`.

    Raises `BadRequest` with a line for each wrong field. Where a key comes twice, the last value counts.
    """
    if "type" not in fields and "event" in fields:
        return _parse_command(fields, strict, version)
    kind = fields.pop("type", "generate")
    later = unknown_to(version)
    known = [word for word in REQUESTS if word not in later.requests]
    if not isinstance(kind, str) or kind not in known:
        raise BadRequest.at("type", f"expected one of {', '.join(known)}, not {show(kind)} ({_HELP})")
    cls = REQUESTS[kind]
    newer = list(_without_newer(fields, kind, later.fields))
    flat = structure(fields, cls, lambda: _rules(fields, kind, strict, n_vocab, newer))
    warnings = _warnings(fields, cls, newer)
    if kind == "generate":
        return _generate(flat, warnings)
    if kind == "tokenize":
        fields = _own_fields(flat)
        pieces = fields.pop("pieces")
        return TokenizeQuery(_request(**fields), pieces, warnings)
    query, fields = _PLAIN[kind], _own_fields(flat)
    message: ClientMessage = _whole(query, fields, warnings) if kind in _WHOLE else query(**fields, warnings=warnings)
    return message


def id_and_metadata_of(fields: Mapping[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
    """Id and metadata of a refused message, for its error; None for what is invalid."""
    id, metadata = fields.get("id"), fields.get("metadata")
    return (
        id if isinstance(id, str) and 1 <= len(id) <= 128 else None,
        metadata if isinstance(metadata, dict) and not any(problems(metadata, _METADATA, "metadata")) else None,
    )


def encode_message(message: ClientMessage) -> bytes:
    """A client's message as a frame. Raises `BadRequest` for text that UTF-8 cannot encode (a lone surrogate)."""
    return _frame(_message_fields(message))


def parse_event(payload: bytes) -> ServerEvent:
    """A server's event. Unknown fields and events are ignored: the server can be newer.

    Raises `InvalidJson` or `BadRequest`, as `read_object` and `message_of` do.
    """
    fields = read_object(payload)
    name = fields.pop("event", None)
    if name == "token":
        return _parse_token(fields)
    if not isinstance(name, str):
        raise BadRequest.at("event", f"expected a string, not {show(name)}")
    if name == "metrics":
        return _parse_metrics(fields)
    cls: type[ServerEvent] | None = EVENTS.get(name)
    if cls is None:
        id = fields.get("id")
        return UnknownEvent(name, id if isinstance(id, str) else None)
    return structure(fields, cls)


def encode_event(event: ServerEvent, version: str | None = None) -> bytes:
    """A server's event as a frame, for a session of this `version` (None: the newest)."""
    if isinstance(event, TokenEvent):
        return encode_token(event.token, event.metadata)
    if isinstance(event, MetricsEvent):
        return _frame({**event.snapshot, "event": "metrics", **_if_any(id=event.id, warnings=event.warnings)})
    if isinstance(event, UnknownEvent):
        return _frame({"event": event.event, **_if_any(id=event.id)})
    name, fields = _EVENT_NAMES[type(event)], unstructure(event)
    for field in unknown_to(version).event_fields.get(name, ()):
        fields.pop(field, None)
    return _frame({"event": name, **(_as_of_1_0(name, fields) if version == "1.0" else fields)})


def _as_of_1_0(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of an event, or of the object at `path` in it, that version 1.0 has."""
    names = FIELDS_OF_1_0.get(path)
    if names is None:
        return fields
    kept = {name: field for name, field in fields.items() if name in names}
    for name, field in kept.items():
        if isinstance(field, dict):
            kept[name] = _as_of_1_0(f"{path}.{name}", field)
    if "sampling_params" in kept:
        later = unknown_to("1.0").fields["generate"]
        kept["sampling_params"] = [field for field in kept["sampling_params"] if field not in later]
    return kept


def encode_token(token: Token, metadata: Mapping[str, Any] | orjson.Fragment | None = None) -> bytes:
    """A token event as a frame. `metadata` can be encoded already (`fragment`)."""
    fields: dict[str, Any] = {"id": token.id, "event": "token", "text": token.text, "token_id": token.token_id}
    if token.index:
        fields["index"] = token.index
    if token.logprobs is not None:
        fields["logprobs"] = unstructure(token.logprobs)
    if metadata is not None:
        fields["metadata"] = metadata
    return encode_frame(orjson.dumps(fields, default=json_bytes.as_written))


MAX_INLINE_FIGURES = 4_096
"""Maximum numbers in embeddings that are written as JSON on the Trio thread, which takes about 0.2 ms."""


def written_embeddings(embeddings: Embeddings, encoding: Encoding) -> orjson.Fragment:
    """JSON of the numbers of an `embed` event: the slow part of its frame. Any thread."""
    if encoding == "base64":
        return orjson.Fragment(
            orjson.dumps(
                [None if vector is None else b64encode(vector).decode("ascii") for vector in embeddings.vectors]
            )
        )
    # Only servers write figures; clients import this module too, and start without numpy.
    import numpy as np  # noqa: PLC0415

    rows = [None if vector is None else np.frombuffer(vector, np.float32) for vector in embeddings.vectors]
    return orjson.Fragment(orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY))


def encode_embeddings(
    embeddings: Embeddings, written: orjson.Fragment, warnings: tuple[str, ...], metadata: Mapping[str, Any] | None
) -> bytes:
    """An embed event as a frame, with numbers that `written_embeddings` has encoded."""
    head = {"event": "embed", "id": embeddings.id, "embeddings": written, "prompt_tokens": embeddings.prompt_tokens}
    warnings += embeddings.warnings
    return encode_frame(json_bytes.dumps({**head, **_if_any(warnings=warnings, metadata=metadata)}))


def fragment(metadata: Mapping[str, Any]) -> orjson.Fragment:
    """`metadata` encoded once, for many events."""
    return orjson.Fragment(json_bytes.dumps(metadata))


def _frame(fields: Mapping[str, Any]) -> bytes:
    try:
        return encode_frame(json_bytes.dumps(fields))
    except orjson.JSONEncodeError as error:
        raise BadRequest(f"the message cannot be written as JSON: {error}") from None


def _parse_command(fields: dict[str, Any], strict: bool, version: str | None) -> ClientMessage:
    name = fields.pop("event")
    known = [word for word in COMMANDS if word not in unknown_to(version).commands]
    if name not in known:
        raise BadRequest.at("event", f"expected {' or '.join(map(repr, known))}, not {show(name)}")
    message, flat = COMMANDS[name]
    made: ClientMessage = message(**_own_fields(structure(fields, flat, lambda: _rules(fields, name, strict, None))))
    return made


def _rules(
    fields: dict[str, Any], kind: str, strict: bool, n_vocab: int | None, newer: Iterable[str] = ()
) -> Iterator[str]:
    """Lines for rules that span fields, or depend on the session. `newer` are fields that its version does not have."""
    if kind in ("generate", "tokenize"):
        if problem := prompt_problem([name for name in PROMPT_FIELDS if fields.get(name) is not None]):
            yield problem
        if n_vocab is not None:
            yield from _outside_vocabulary(fields.get("token_ids"), n_vocab)
    if strict:
        cls = COMMANDS[kind][1] if kind in COMMANDS else REQUESTS[kind]
        unknown = chain(newer, unknown_fields(fields, cls))
        yield from (f"{path}: unknown field, and the session is strict" for path in unknown)


def _without_newer(fields: dict[str, Any], kind: str, later: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """Remove fields of later versions, and yield their paths."""
    for name in later.get(kind, frozenset()) & fields.keys():
        del fields[name]
        yield name
    of_message = later.get("messages", frozenset())
    messages = fields.get("messages") if of_message else None
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            for name in of_message & message.keys():
                del message[name]
                yield f"messages[{index}].{name}"


def _outside_vocabulary(token_ids: Any, n_vocab: int) -> Iterator[str]:
    if not isinstance(token_ids, list) or not set(map(type, token_ids)) <= {int} or max(token_ids, default=0) < n_vocab:
        return  # wrong types are told by the converter
    for index, token in enumerate(token_ids):
        if token >= n_vocab:
            yield f"token_ids[{index}]: {token} is not in the vocabulary (0 to {n_vocab - 1:,})"


def _warnings(fields: dict[str, Any], cls: type, newer: Iterable[str]) -> tuple[str, ...]:
    unknown = islice(chain(newer, unknown_fields(fields, cls)), MAX_LINES + 1)
    return tuple(cut([f"{path}: unknown field, ignored" for path in unknown], "unknown"))


def _own_fields(flat: Any) -> dict[str, Any]:
    """An instance's fields as they are (`attrs.asdict` would take the inner ones apart too)."""
    return {name: getattr(flat, name) for name in hints_of(flat.__class__)}


def _generate(flat: Any, warnings: tuple[str, ...]) -> Generate:
    fields = _own_fields(flat)
    keep_alive, sender = fields.pop("keep_alive"), fields.pop("sender")
    sampling = {name: fields.pop(name) for name in SAMPLING_FIELDS}
    return Generate(_request(**fields, sampling=sampling), keep_alive, sender, warnings)


def _whole(query: type[Any], fields: dict[str, Any], warnings: tuple[str, ...]) -> Any:
    beside = {name: fields.pop(name) for name in ("encoding", "sender") if name in fields}
    with already_checked():
        return query(hints_of(query)["request"](**fields), **beside, warnings=warnings)


def _request(*, sampling: dict[str, Any] | None = None, **fields: Any) -> Request:
    with already_checked():  # by `structure`
        return Request(**fields, sampling=SamplingParams(**(sampling or {})))


def _message_fields(message: ClientMessage) -> dict[str, Any]:
    if isinstance(message, Cancel | EndThinking):
        return {"event": "cancel" if isinstance(message, Cancel) else "answer", "id": message.id}
    if isinstance(message, Generate | TokenizeQuery):
        request = unstructure(message.request)
        request.pop("sampling", None)
        if isinstance(message, TokenizeQuery):
            pieces = {"pieces": True} if message.pieces else {}
            return {"type": "tokenize"} | {name: request[name] for name in TOKENIZE_FIELDS if name in request} | pieces
        keep_alive = {"keep_alive": True} if message.keep_alive else {}
        return request | unstructure(message.request.sampling) | keep_alive | _sender(message.sender)
    if isinstance(message, WholeQuery):
        encoding = {"encoding": message.encoding} if isinstance(message, EmbedQuery) else {}
        return {"type": name_of(type(message)), **unstructure(message.request)} | encoding | _sender(message.sender)
    fields = unstructure(message)
    fields.pop("warnings", None)
    return {"type": name_of(type(message))} | fields


def _sender(sender: Sender | None) -> dict[str, Any]:
    return {} if sender is None else {"sender": unstructure(sender)}


def _parse_token(fields: dict[str, Any]) -> TokenEvent:
    id, text, token_id = fields.get("id"), fields.get("text"), fields.get("token_id")
    metadata = fields.get("metadata")
    index, known = fields.get("index", 0), fields.get("logprobs")
    is_plain = type(index) is int and (metadata is None or type(metadata) is dict)
    if is_plain and type(id) is str and type(text) is str and type(token_id) is int:
        if known is None:
            return TokenEvent(id, text, token_id, metadata, index)
        if (logprobs := _plain_logprobs(known)) is not None:
            return TokenEvent(id, text, token_id, metadata, index, logprobs)
    return structure(fields, TokenEvent)  # says what is wrong


def _plain_logprobs(value: Any) -> Logprobs | None:
    """Log probabilities of the form that this side writes itself; None for any other."""
    try:
        return Logprobs(_plain_logprob(value["chosen"]), tuple(map(_plain_logprob, value["top"])))
    except (KeyError, TypeError):
        return None


def _plain_logprob(value: Any) -> TokenLogprob:
    token_id, text, data, logprob, rank = (value[name] for name in _LOGPROB_FIELDS)
    if (type(token_id), type(text), type(data), type(logprob), type(rank)) != (int, str, list, float, int):
        raise TypeError
    if set(map(type, data)) - {int}:
        raise TypeError
    return TokenLogprob(token_id, text, tuple(data), logprob, rank)


def _parse_metrics(fields: dict[str, Any]) -> MetricsEvent:
    own: dict[str, Any] = {name: fields.pop(name) for name in ("id", "warnings") if name in fields}
    return structure({"snapshot": fields, **own}, MetricsEvent)


def _if_any(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}
