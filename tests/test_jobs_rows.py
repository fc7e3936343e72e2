"""What a row can be: lines of OpenAI's batches, plain rows, columns in a template, compressed or not, or no row."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from uma.errors import ConfigError
from uma.http.jobs import FIELDS
from uma.jobs import BadInput, BadRow, JobRow, RowForm, judge_rows, read_rows, rows
from uma.jobs.rows import MAX_ROW_BYTES, PATHS, filled
from uma.jobs.runner import together, work_of

CHAT = "/v1/chat/completions"


def row(data: Any) -> JobRow:
    """A row of the first line."""
    return next(iter(read_rows(io.BytesIO(data if isinstance(data, bytes) else json.dumps(data).encode() + b"\n"))))


def asked(data: Any, **form: Any) -> tuple[str, Any, str]:
    """The path, the body and the id of what a row asks."""
    found = RowForm(**form).asked(row(data))
    return found.path, found.body, found.custom_id


@pytest.mark.parametrize("path", sorted(PATHS))
def test_openai_s_line_is_its_body_as_it_stands(path: str) -> None:
    body = {"model": "m", "input": ["a"], "temperature": 0.5}
    line = {"custom_id": "q-1", "method": "POST", "url": path, "body": body}
    assert asked(line, system="Be brief.", schema={"type": "object"}) == (path, body, "q-1")


def test_options_fill_in_what_a_body_that_generates_leaves_open() -> None:
    options = {"defaults": {"max_tokens": 9, "temperature": 0}}
    body = {"messages": [], "temperature": 1}
    assert asked({"url": CHAT, "body": body}, **options)[1] == {**body, "max_tokens": 9}
    ended = {"messages": [], "max_completion_tokens": 5}
    assert asked({"url": CHAT, "body": ended}, **options)[1] == {**ended, "temperature": 0}
    told = asked({"url": "/v1/responses", "body": {"input": "a"}}, **options)[1]
    assert told == {"input": "a", "max_output_tokens": 9, "temperature": 0}
    turn = {"messages": [{"role": "user", "content": "a"}]}
    assert asked({"url": "/v1/messages", "body": turn}, **options)[1] == {**turn, "max_tokens": 9, "temperature": 0}
    lane = {"defaults": {"max_tokens": 9, "priority": 0, "model": "m"}}
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/decisions", "/v1/systemone"):
        assert asked({"url": path, "body": {"input": "a"}}, **lane)[1] == {"input": "a", "priority": 0, "model": "m"}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"])
def test_vllm_s_names_of_rankings_are_one_endpoint(path: str) -> None:
    body = {"query": "a", "documents": ["b"]}
    assert asked({"url": path, "body": body})[:2] == (f"/v1/{path.rpartition('/')[2]}", body)


def test_rows_are_counted_and_their_wrong_lines_named_however_far_behind(tmp_path: Path) -> None:
    good = b'{"prompt": "a"}\n\n  \n' * 999
    assert judge_rows(RowForm(), read_rows(io.BytesIO(good + b'{"prompt": "b"}'))) == 1_000
    for packed in (good, gzip.compress(good)):
        assert judge_rows(RowForm(), read_rows(io.BufferedReader(io.BytesIO(packed)))) == 999
    assert judge_rows(RowForm(), read_rows(io.BufferedReader(io.BytesIO(packed[:-20])))) is None, "told behind results"
    with pytest.raises(ConfigError, match=r"line 2,998: prompt: expected a text, not 7$"):
        judge_rows(RowForm(), read_rows(io.BytesIO(good + b'{"prompt": 7}')))
    many = b"".join(b'{"prompt": %d}\n' % number for number in range(12)) + b'{"prompt": 0}\n' * 12
    with pytest.raises(ConfigError, match=r"(?s)24 of 24 rows are wrong:\nlines 1, 13, .* …: .*and 2 more, for other"):
        judge_rows(RowForm(), read_rows(io.BytesIO(many)))


def test_a_plain_prompt_is_a_user_s_message_and_raw_it_is_continued() -> None:
    line = {"id": 7, "prompt": "Hi", "max_tokens": 3}
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Hi"}
    assert asked(line, system="Be brief.") == (CHAT, {"messages": [system, user], "max_tokens": 3}, "7")
    assert asked(line, is_raw=True) == ("/v1/completions", {"prompt": "Hi", "max_tokens": 3}, "7")
    assert asked({"messages": [user]}, system="Be brief.")[1] == {"messages": [system, user]}
    assert asked({"messages": [user]})[2] == "row-1"


def test_a_schema_is_asked_of_plain_rows() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = asked({"prompt": "Hi"}, schema=schema)[1]["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["schema"] == schema


def test_a_template_takes_columns_and_nothing_else_of_the_row() -> None:
    line = {"custom_id": "a", "text": "It rains.", "n": 3, "tags": ["x"], "body": {}, "url": "u"}
    path, body, custom_id = asked(line, template="{n} words on {text} {{{tags}}}")
    assert (path, custom_id) == (CHAT, "a")
    assert body == {"messages": [{"role": "user", "content": '3 words on It rains. {["x"]}'}]}
    with pytest.raises(BadRow, match=r"no column 'txt' in the row; it has text"):
        filled("{txt}", {"text": "a"})
    assert filled("{a.b} {a}", {"a.b": "1", "a": "2"}) == "1 2"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"not json\n", "not JSON: .*; each line must be a JSON object of its own"),
        (b"[1]\n", r"must be a JSON object, not \[1\]"),
        (b'{"prompt": "\xff"}\n', "not UTF-8; write the file in that encoding"),
        (b'{"prompt": ' + 2_000 * b"[" + 2_000 * b"]" + b"}\n", "the row is nested too deep: over 1,024 lists"),
        ({"question": "?"}, "the row has question"),
        ({"prompt": 7}, "prompt: expected a text, not 7"),
        ({"url": "/v1/files", "body": {}}, "url: expected one of"),
        ({"url": "/v1/audio/translations", "body": {}}, 'transcriptions, .*not "/v1/audio/translations"'),
        ({"body": {}}, "url: expected .* not null$"),
        ({"prompt": "a", "url": "https://a.b"}, 'not "https://a.b" .--template makes a prompt of columns'),
        ({"url": CHAT, "body": []}, "body: expected a JSON object"),
        ({"url": CHAT, "method": "GET", "body": {}}, "method: expected POST"),
        (b'"' + b"x" * MAX_ROW_BYTES + b'"\n', "is over"),
    ],
)
def test_a_row_that_can_be_no_request_says_why(line: Any, why: str) -> None:
    with pytest.raises(BadRow, match=why):
        asked(line)


OF_OTHERS = {
    CHAT: "store prediction verbosity web_search_options metadata prompt_cache_key safety_identifier service_tier user "
    "top_a models provider enable_thinking stop_token_ids topic title label",
    "/v1/responses": "max_tool_calls stream_options prompt_cache_retention verbosity context_management",
    "/v1/messages": "speed cache_control container inference_geo mcp_servers metadata betas",
    "/v1/embeddings": "input_type truncate_prompt_tokens user task",
}
"""Fields that other servers have, and columns of tables: none of them is one of UMA's, misspelt."""


def test_a_misspelt_name_is_no_request_and_another_server_s_field_is_left_to_the_endpoint() -> None:
    assert set(FIELDS) >= PATHS
    for url, names in OF_OTHERS.items():
        body: dict[str, Any] = {"model": "m"} | dict.fromkeys(names.split(), 1)
        assert asked({"url": url, "body": body}, fields=FIELDS)[1] == body
    with pytest.raises(BadRow, match=r"body\.tempature: no field of /v1/responses; did you mean temperature\?"):
        asked({"url": "/v1/responses", "body": {"tempature": 1}}, fields=FIELDS)
    with pytest.raises(BadRow, match=r"promt: expected a prompt, .*; did you mean prompt\?"):
        asked({"promt": "a"})
    assert asked({"text": "a", "mesages": 1}, template="{text}", fields=FIELDS), "a template's columns are its own"


def test_the_columns_of_a_table_are_compared_with_the_fields_once_and_not_for_each_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = list[str]()
    compare = rows.get_close_matches  # type: ignore[attr-defined]

    def counted(name: str, *given: Any, **more: Any) -> Any:
        compared.append(name)
        return compare(name, *given, **more)

    monkeypatch.setattr(rows, "get_close_matches", counted)
    for prompt in "abc":
        asked({"prompt": prompt, "country of the customer": "", "region of the customer": ""}, fields=FIELDS)
    assert compared == ["country of the customer", "region of the customer"]


def test_the_result_of_a_row_that_can_be_no_request_has_the_row_s_own_id() -> None:
    form = RowForm(template="{nothing}")
    for data, name in (({"id": "a", "text": "b"}, "a"), (b"not json\n", "row-1")):
        ended = work_of(row(data), form).ended
        assert ended is not None
        assert json.loads(ended.line)["custom_id"] == name


@pytest.mark.parametrize("name", ["custom_id", "id"])
@pytest.mark.parametrize("is_csv", [False, True])
def test_a_row_with_an_earlier_row_s_id_fails_and_tells_both(is_csv: bool, name: str) -> None:
    lines = b'{"custom_id": "a"}\n\n{}\n{"custom_id": "b"}\n{"custom_id": "a"}\n{}\n'.replace(
        b"custom_id", name.encode()
    )
    table = b"%s,x\na,1\n,2\nb,3\na,4\n,5\n" % name.encode()
    rows = list(read_rows(io.BytesIO(table if is_csv else lines), is_csv=is_csv))
    told = f'{name}: "a" is that of line {2 if is_csv else 1} and of line 5; ids must be unique: change one'
    assert [row.fault for row in rows] == ["", "", "", told, ""]
    ended = work_of(rows[3], RowForm(template="{x}")).ended
    assert ended is not None
    assert json.loads(ended.line)["custom_id"] == "row-4", "a join by id finds the good result alone"


def test_blank_lines_are_none_and_a_long_row_costs_the_next_nothing() -> None:
    lines = [b'{"prompt": "a"}\r\n', b"\n", b"  \n", b"x" * (2 * MAX_ROW_BYTES + 5) + b"\n", b'{"prompt": "b"}']
    rows = list(read_rows(io.BytesIO(b"".join(lines))))
    assert [each.number for each in rows] == [0, 1, 2]
    assert [bool(each.fault) for each in rows] == [False, True, False]
    assert [each.line for each in rows] == [1, 4, 5]
    assert rows[0].digest == row(b'{"prompt": "a"}').digest, "a newline is no part of the row"


def test_csv_and_gzip() -> None:
    text = '\ufeffid,text\n1,"two\nlines"\n2,"a ""b"" é"\n3\n'.encode()
    for data in (text, gzip.compress(text)):
        rows = list(read_rows(io.BufferedReader(io.BytesIO(data)), is_csv=True))
        assert [each.data for each in rows] == [
            {"id": "1", "text": "two\nlines"},
            {"id": "2", "text": 'a "b" é'},
            {"id": "3", "text": ""},
        ]
        assert len({each.digest for each in rows}) == 3
    packed = io.BufferedReader(io.BytesIO(gzip.compress(b'{"prompt": "a"}\n' * 1000)[:-20]))
    with pytest.raises(BadInput, match="compression is damaged"):
        list(read_rows(packed))


def test_a_text_as_windows_writes_it_has_its_first_row() -> None:
    assert next(iter(read_rows(io.BytesIO(b'\xef\xbb\xbf{"prompt": "a"}\r\n')))).data == b'{"prompt": "a"}\r\n'


def test_a_table_can_be_parted_by_semicolons_or_tabs_and_is_not_utf_16() -> None:
    for mark in ";\t":
        (one,) = read_rows(io.BytesIO(f'id{mark}text\n1{mark}"a, b{mark}"\n'.encode()), is_csv=True)
        assert one.data == {"id": "1", "text": f"a, b{mark}"}
    with pytest.raises(BadInput, match="is UTF-16; write it as UTF-8, as with iconv"):
        list(read_rows(io.BytesIO("id,text\n1,a\n".encode("utf-16")), is_csv=True))


def test_a_row_of_csv_with_a_comma_too_many_is_bad_and_not_cut_off() -> None:
    text = b'id,text\n1,"a, b"\n2,It rains, says the owl\n3,a,\n'
    one, two, three = read_rows(io.BytesIO(text), is_csv=True)
    for each in (one, three):  # a comma at the end is none too many
        assert RowForm(template="{text}").asked(each).custom_id == each.data["id"]  # type: ignore[call-overload]
    with pytest.raises(BadRow, match="not UTF-8; write the file in that encoding"):
        RowForm(template="{text}").asked(next(read_rows(io.BytesIO(b"text\ncaf\xe9\n"), is_csv=True)))
    with pytest.raises(BadRow, match=r"the row has 3 values, and the first line 2 names: .*quotes") as caught:
        RowForm(template="{text}").asked(two)
    assert caught.value.custom_id == "2"


def test_a_quote_that_is_never_closed_is_an_error_that_says_where() -> None:
    text = b'id,text\n1,"two\nlines"\n2,"It rains\n' + b"".join(b"%d,more\n" % number for number in range(3, 9))
    rows = read_rows(io.BytesIO(text), is_csv=True)
    assert next(rows).data == {"id": "1", "text": "two\nlines"}
    with pytest.raises(BadInput, match="a quote in the row of line 4 is never closed"):
        next(rows)
    whole = list(read_rows(io.BytesIO(b'id,text\n1,"a"'), is_csv=True))
    assert [each.data for each in whole] == [{"id": "1", "text": "a"}], "the last line needs no newline"


def test_rows_that_begin_alike_come_together_and_what_all_share_does_not_count() -> None:
    system = "You are a careful reader. " * 40
    documents = [f"{index} tale " * 100 for index in range(3)]
    prompts = [system + documents[number % 3] + f"Question {number}" for number in range(9)]
    block = [work_of(row({"prompt": each}), RowForm()) for each in prompts]
    ordered = [each.asked.body["messages"][0]["content"] for each in together(block) if each.asked]
    assert ordered == [prompts[number] for number in (0, 3, 6, 1, 4, 7, 2, 5, 8)]
    alike = [work_of(row({"prompt": f"Summarise: {number}"}), RowForm()) for number in range(20)]
    assert together(alike) == alike or {id(each) for each in together(alike)} == {id(each) for each in alike}
