"""A body that would keep the interpreter to itself while it is parsed is refused before; any other is counted right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from http_server import HttpServer
from hypothesis import given
from hypothesis import strategies as st

from uma.errors import BadRequest
from uma.json_bytes import BLOCK_BYTES
from uma.protocol.json_size import check_size
from uma.protocol.session import ServerSession, Unparsed

Values = st.recursive(
    st.none() | st.integers() | st.text('ab"\\[]{}:,é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('k"\\{,:'), inner),
)


def parts(value: Any) -> Iterator[Any]:
    """The value and all within it."""
    yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(each)


@given(value=Values, before=st.integers(BLOCK_BYTES - 40, BLOCK_BYTES + 2), escape=st.sampled_from(["\\", '"', "x"]))
def test_what_strings_hold_does_not_count_and_all_else_does(value: Any, before: int, escape: str) -> None:
    text = [escape * before, value]  # a string of escapes over the border between two blocks
    held = list(parts(text))
    exact: dict[str, Any] = {
        "MAX_CONTAINERS": sum(isinstance(each, list | dict) for each in held),
        "MAX_MEMBERS": sum(len(each) for each in held if isinstance(each, dict)),
        "MAX_COMMAS": sum(max(0, len(each) - 1) for each in held if isinstance(each, list | dict)),
    }
    data = json.dumps(text, ensure_ascii=False).encode()
    with patch.multiple("uma.protocol.json_size", **exact):
        check_size(data)
    for name, count in exact.items():
        bounds = exact | {name: count - 1}
        with patch.multiple("uma.protocol.json_size", **bounds), pytest.raises(BadRequest, match="the text holds more"):
            check_size(data)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"messages": [' + b"[]," * 2_700_000 + b"1]}", "65,536 lists and objects"),
        (b"{" + b",".join(b'"%x": 1' % number for number in range(600_000)) + b"}", "131,072 members"),
        (b'{"prompt": [' + b"1," * 4_000_000 + b"1]}", "524,288 items"),
    ],
)
def test_a_body_of_millions_of_parts_is_refused_before_it_is_parsed(
    http_server: HttpServer, body: bytes, what: str
) -> None:
    for path in ("/v1/chat/completions", "/v1/embeddings", "/api/chat", "/tokenize"):
        refused = http_server.ask("POST", path, body)
        assert refused.status == 400
        assert f"the text holds more than {what}" in str(refused.json["error"])


@pytest.mark.parametrize("text", [b"[" * 2_000, b"[" * 100_000, b'{"a":' * 100_000, b'{"a": [' + b"[]," * 100_000])
def test_text_that_is_no_json_is_told_so_however_much_it_holds(text: bytes) -> None:
    parsed = ServerSession().parse(text)
    assert isinstance(parsed, Unparsed)
    assert (parsed.error.code, "is not JSON" in parsed.error.message) == ("E_PROTO_INVALID_JSON", True)


def test_a_text_of_brackets_is_a_text(http_server: HttpServer) -> None:
    refused = http_server.ask("POST", "/v1/completions", {"prompt": "[{,:" * 1_000_000})
    assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")
