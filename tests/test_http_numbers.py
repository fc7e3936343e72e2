"""Numbers pass as they are written, whatever they are: in a model's calls, in earlier calls, and in tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from chat_templates import HERMES_CALLS
from http_server import HostedHttp, events_of, hosted_http, running_gateway, running_http
from hypothesis import given, settings
from hypothesis import strategies as st
from script_model import write_script_model

from harness import short_directory
from uma import json_bytes, json_text
from uma.config import RuntimeConfig
from uma.errors import InvalidJson
from uma.protocol.codec import read_object

DIGITS = "9" * 4_400
"""More than Python reads as an integer."""
ARGUMENTS = (
    '{"order": 48102938475610293847561, "ratio": 1e999, "least": -1E+400, '
    f'"digits": {DIGITS}, "price": 1.10, "hundred": 1E2, "pi": 3.14159265358979323846, "none": -0, '
    '"n": [18446744073709551616]}'
)
TEMPLATE = (
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    + HERMES_CALLS.replace("{% endfor %}", "{{ c.function.arguments.order }}{% endfor %}")
    + "\n{% endfor %}assistant{{ '\\n' }}"
)
NUMBER = {"type": "number"}
NAMES = ("order", "ratio", "least", "digits", "price", "hundred", "pi", "none")
SCHEMA = {
    "type": "object",
    "properties": {**dict.fromkeys(NAMES, NUMBER), "n": {"type": "array", "items": NUMBER}},
    "required": [*NAMES, "n"],
}
SAID = f'<tool_call>\n{{"name": "book", "arguments": {ARGUMENTS}}}\n</tool_call>'
FUNCTION = {"name": "book", "description": "Books.", "parameters": SCHEMA}
OPENAI = [{"type": "function", "function": FUNCTION}]
ASKED = [{"role": "user", "content": "Book."}]
WIDE_SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 48102938475610293847561}}}'


@pytest.fixture(scope="module")
def booker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedHttp]:
    """A model that calls a tool with such numbers, whatever it is asked."""
    path = tmp_path_factory.mktemp("numbers") / "booker.gguf"
    model = write_script_model(path, SAID, template=TEMPLATE, context_length=32_768)
    config = RuntimeConfig(model=str(model), http="127.0.0.1:0", n_ctx=32_768, threads=1)
    with hosted_http(config) as hosted:
        yield hosted


def ask(hosted: HostedHttp, path: str, body: Any) -> bytes:
    """The answer's body."""
    answer = hosted.ask("POST", path, body)
    assert answer.status == 200, answer.body
    return answer.body


def test_a_call_s_numbers_come_as_the_model_wrote_them(booker: HostedHttp) -> None:
    chat = {"messages": ASKED, "tools": OPENAI, "max_tokens": 4000}
    whole = json.loads(ask(booker, "/v1/chat/completions", chat))
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == ARGUMENTS
    streamed = events_of(ask(booker, "/v1/chat/completions", {**chat, "stream": True}))
    deltas = [each["choices"][0]["delta"].get("tool_calls", [{}])[0] for each in streamed if each["choices"]]
    assert "".join(each.get("function", {}).get("arguments", "") for each in deltas) == ARGUMENTS

    flat = {"input": "Book.", "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 4000}
    (item,) = json.loads(ask(booker, "/v1/responses", flat))["output"]
    assert item["arguments"] == ARGUMENTS

    anthropic = {"messages": ASKED, "max_tokens": 4000, "tools": [{"name": "book", "input_schema": SCHEMA}]}
    assert f'"input":{ARGUMENTS}' in ask(booker, "/v1/messages", anthropic).decode()
    streamed = events_of(ask(booker, "/v1/messages", {**anthropic, "stream": True}))
    assert streamed[-1]["type"] == "message_stop"
    pieces = [each["delta"]["partial_json"] for each in streamed if each["type"] == "content_block_delta"]
    assert "".join(pieces) == ARGUMENTS

    ollama = {"messages": ASKED, "tools": OPENAI, "options": {"num_predict": 4000}}
    for stream in (False, True):
        said = ask(booker, "/api/chat", {**ollama, "stream": stream}).decode()
        assert f'"arguments":{ARGUMENTS}' in said
        assert json_text.loads(said.splitlines()[-1])["done"] is True


def test_a_call_that_is_cut_off_keeps_its_whole_numbers(booker: HostedHttp) -> None:
    anthropic = {"messages": ASKED, "max_tokens": 40, "tools": [{"name": "book", "input_schema": SCHEMA}]}
    whole = ask(booker, "/v1/messages", anthropic).decode()
    assert '"input":{"order": 48102938475610293847561, "ratio": 1e999, "least": -1E+400}' in whole


def test_earlier_calls_come_back_as_they_were_written(booker: HostedHttp) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "book", "arguments": ARGUMENTS}}
    openai = {"messages": [*ASKED, {"role": "assistant", "tool_calls": [call]}, *_result("c")], "max_tokens": 1}
    openai["tools"] = OPENAI
    tokens = json.loads(ask(booker, "/v1/chat/completions", openai))["usage"]["prompt_tokens"]
    prompt = json.loads(ask(booker, "/apply-template", openai))["prompt"]
    assert f"{ARGUMENTS}}}\n</tool_call>48102938475610293847561" in prompt

    tool = {"name": "book", "description": "Books.", "input_schema": SCHEMA}
    use = f'{{"type": "tool_use", "id": "c", "name": "book", "input": {ARGUMENTS}}}'
    result = '{"type": "tool_result", "tool_use_id": "c", "content": "Done."}'
    said = f'{{"role": "assistant", "content": [{use}]}}, {{"role": "user", "content": [{result}]}}'
    counted = json.loads(ask(booker, "/v1/messages/count_tokens", conversation([tool], said)))
    assert counted["input_tokens"] == tokens

    past = f'{{"function": {{"name": "book", "arguments": {ARGUMENTS}}}}}'
    said = f'{{"role": "assistant", "tool_calls": [{past}]}}, {{"role": "tool", "content": "Done."}}'
    assert json.loads(ask(booker, "/api/chat", conversation(OPENAI, said)))["prompt_eval_count"] == tokens


def conversation(tools: Any, said: str) -> bytes:
    """A body whose conversation goes on with `said`, which is JSON."""
    body = {"tools": tools, "stream": False, "options": {"num_predict": 1}, "messages": [*ASKED, "said"]}
    return json.dumps(body).replace('"said"', said).encode()


def _result(id: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": id, "content": "Done."}]


WIDE_TOOL = f'{{"type": "function", "function": {{"name": "book", "description": "", "parameters": {WIDE_SCHEMA}}}}}'
WIDE_BODY = json.dumps({"messages": ASKED, "tools": ["tool"]}).replace('"tool"', WIDE_TOOL).encode()


def test_a_schema_s_numbers_reach_the_prompt_as_they_are_written(booker: HostedHttp) -> None:
    assert WIDE_SCHEMA in json.loads(ask(booker, "/apply-template", WIDE_BODY))["prompt"]


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ('{"type": "integer", "maximum": 48102938475610293847561}', "maximum"),
        ('{"type": "number", "minimum": -1e999}', "minimum"),
        ('{"const": 48102938475610293847561}', "const"),
        ('{"enum": [5, {"a": [1e999]}]}', "enum"),
        ('{"type": "string", "maxLength": 18446744073709551616}', "maxLength"),
        ('{"type": "integer", "multipleOf": 48102938475610293847561}', "multipleOf"),
        ('{"type": "integer", "default": 48102938475610293847561, "examples": [1e999]}', None),
    ],
)
def test_a_schema_s_numbers_that_no_grammar_keeps_are_refused_by_name(
    booker: HostedHttp, schema: str, word: str | None
) -> None:
    whole = f'{{"type": "object", "properties": {{"n": {schema}}}, "required": ["n"]}}'
    body = f'{{"prompt": "a", "n_predict": 1, "json_schema": {whole}}}'
    answer = booker.ask("POST", "/completion", body.encode())
    assert answer.status == (200 if word is None else 400)
    assert word is None or f"json_schema.properties.n.{word}: " in answer.json["error"]["message"]


def test_a_gateway_passes_a_schema_s_numbers_on(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_script_model(tmp_path_factory.mktemp("numbers") / "booker.gguf", SAID, template=TEMPLATE)
    with (
        short_directory() as directory,
        running_http(directory, "--model", str(model)) as server,
        running_gateway(server.process) as gateway,
    ):
        told = [each.ask("POST", "/apply-template", WIDE_BODY).json["prompt"] for each in (server, gateway)]
    assert told[0] == told[1]
    assert WIDE_SCHEMA in told[0]


@pytest.mark.parametrize("number", ["48102938475610293847561", "-1e999", DIGITS])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "temperature"),
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/completions", "seed"),
        ("/v1/messages", "top_p"),
        ("/api/chat", "options"),
        ("/completion", "n_predict"),
        ("/completion", "logit_bias"),
        ("/v1/embeddings", "dimensions"),
    ],
)
def test_a_field_that_has_a_range_is_refused_by_name(booker: HostedHttp, path: str, field: str, number: str) -> None:
    start = json.dumps({"messages": ASKED, "max_tokens": 1, "prompt": "a", "input": "a"})[:-1]
    answer = booker.ask("POST", path, f'{start}, "{field}": {number}}}'.encode())
    assert answer.status == 400
    assert field in str(answer.json)


numbers = st.from_regex(r"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,4})?", fullmatch=True)
"""Each that JSON knows, up to a length."""


@given(st.recursive(numbers, lambda inner: st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")))
def test_a_number_is_written_as_it_was_read(text: str) -> None:
    for value in (json_text.loads(text), json_bytes.loads(text.encode())):
        assert json_text.dumps(value) == text
        assert json_bytes.dumps(value).decode() == text.replace(" ", "")


def test_what_is_nested_too_deep_is_told_as_that() -> None:
    def nested(depth: int) -> bytes:
        return depth * b"[" + depth * b"]"

    json_bytes.loads(nested(json_bytes.MAX_DEPTH))
    for text, told in (
        (nested(json_bytes.MAX_DEPTH + 1), "is nested too deep: over 1,024 lists and objects"),
        (b'{"limit": 1', "is not JSON: "),
        (b"\xff", "is not JSON: "),
    ):
        with pytest.raises(ValueError) as refused:
            json_bytes.loads(text)
        assert json_bytes.fault(refused.value).startswith(told)
    with pytest.raises(InvalidJson, match="the frame is nested too deep"):
        read_object(nested(2_000))


@settings(max_examples=10)
@given(st.lists(numbers, min_size=1, max_size=40))
def test_any_number_s_spelling_survives_from_the_request_to_the_prompt(booker: HostedHttp, spelled: list[str]) -> None:
    order, listed = spelled[0], f"[{', '.join(spelled)}]"
    arguments = f'{{"order": {order}, "n": {listed}}}'
    schema = f'{{"type": "object", "properties": {{"n": {{"default": {order}, "examples": {listed}}}}}}}'
    tool = f'{{"type": "function", "function": {{"name": "book", "description": "", "parameters": {schema}}}}}'
    call = json.dumps({"id": "c", "type": "function", "function": {"name": "book", "arguments": arguments}})
    messages = json.dumps([*ASKED, {"role": "assistant", "tool_calls": ["call"]}, *_result("c")])
    body = f'{{"tools": [{tool}], "messages": {messages}}}'.replace('"call"', call).encode()
    prompt = json.loads(ask(booker, "/apply-template", body))["prompt"]
    assert f'"parameters": {schema}' in prompt
    assert f'"arguments": {arguments}}}\n</tool_call>{order}' in prompt

    # The same prompt where the call's arguments are an object of the body.
    past = f'{{"role": "assistant", "tool_calls": [{{"function": {{"name": "book", "arguments": {arguments}}}}}]}}'
    said = conversation(["tool"], f'{past}, {{"role": "tool", "content": "Done."}}').replace(
        b'"tool"]', f"{tool}]".encode()
    )
    ollama = json.loads(ask(booker, "/api/chat", said))
    assert ollama["prompt_eval_count"] == len(json.loads(ask(booker, "/tokenize", {"content": prompt}))["tokens"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/completion"])
def test_a_field_with_such_a_number_means_what_it_says(booker: HostedHttp, path: str) -> None:
    start = json.dumps({"messages": ASKED, "prompt": "a"})[:-1]
    body = f'{start}, "max_tokens": 1, "temperature": 1E0, "top_p": 0.90, "logit_bias": {{"200": -5.0E0}}, "seed": 5}}'
    assert json.loads(ask(booker, path, body.encode()))


def test_a_schema_that_comes_as_text_keeps_its_numbers(booker: HostedHttp) -> None:
    schema = json.dumps('{"type": "integer", "maximum": 48102938475610293847561}')
    answer = booker.ask("POST", "/v1/completions", f'{{"prompt": "a", "guided_json": {schema}}}'.encode())
    assert (answer.status, "maximum" in answer.json["error"]["message"]) == (400, True)


def test_a_tool_s_schema_is_one_of_its_own_however_its_numbers_are_written(booker: HostedHttp) -> None:
    for number in ("1.10", "1.1", "48102938475610293847561"):
        schema = f'{{"type": "object", "properties": {{"n": {{"default": {number}, "not": {{"const": 5}}}}}}}}'
        tool = f'{{"type": "function", "function": {{"name": "book", "parameters": {schema}}}}}'
        body = f'{{"messages": {json.dumps(ASKED)}, "tools": [{tool}], "max_tokens": 1}}'.encode()
        assert booker.ask("POST", "/v1/chat/completions", body).status == 200
        assert f'"default": {number}' in json.loads(ask(booker, "/apply-template", body))["prompt"]
