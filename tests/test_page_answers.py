"""The page's own endpoints: its files, and answers that can be picked up again."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import HttpServer

import uma.http.page
from harness import PATIENCE_SEC, is_settled, until

STATIC = Path(uma.http.page.__file__).parent / "static"
Event = tuple[str, str, dict[str, Any]]
"""Id, name and data of a server-sent event."""


@pytest.fixture
def client(http_server: HttpServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=http_server.url, timeout=PATIENCE_SEC) as one:
        yield one


def body(token: str | None = None, **sampling: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Tell me a story about a fox"}],
        "sampling": {"max_tokens": 400, "ignore_eos": True, **sampling},
        **({"token": token} if token else {}),
    }


def events(response: httpx.Response) -> Iterator[Event]:
    id = name = ""
    for line in response.iter_lines():
        key, _, value = line.partition(": ")
        if key == "id":
            id = value
        elif key == "event":
            name = value
        elif key == "data":
            yield id, name, json.loads(value)
            id = ""


def test_the_page_has_no_inline_script_or_style_and_a_policy_that_forbids_both(client: httpx.Client) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:|https?://", page.text)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", page.text))


def test_nothing_of_the_page_comes_from_elsewhere() -> None:
    for file in STATIC.glob("*.*"):
        text = re.sub(r"http://www\.w3\.org/(2000/svg|1998/Math/MathML)", "", file.read_text(encoding="utf-8"))
        assert "//cdn" not in text
        assert not re.search(r"https?://", text), file.name


def test_the_libraries_are_those_of_their_list_with_their_licences(client: httpx.Client) -> None:
    vendor = STATIC / "vendor"
    packages = json.loads((vendor / "list.json").read_text())
    listed = {name: file["sha256"] for package in packages for name, file in package["files"].items()}
    found = {
        place.name: hashlib.sha256(
            b"".join(each.read_bytes() for each in sorted(place.glob("*")) or [place])
        ).hexdigest()
        for place in vendor.iterdir()
    }
    del found["list.json"]
    assert found == listed
    for package in packages:
        assert any("LICENSE" in name for name in package["files"]), package["package"]
    scripts = [name for name in listed if name.endswith(".js") and name != "temml.js"]  # which the first formula loads
    assert re.findall(r'src="ui/vendor/([^"]+)"', client.get("/").text) == scripts
    assert client.get("/ui/vendor/cmaps/GBK-EUC-H.bcmap").content == (vendor / "cmaps/GBK-EUC-H.bcmap").read_bytes()
    for name in set(listed) - {"cmaps"}:
        assert client.get(f"/ui/vendor/{name}").content == (vendor / name).read_bytes()


def test_a_file_that_has_not_changed_is_not_sent_again(client: httpx.Client) -> None:
    first = client.get("/ui/main.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = client.get("/ui/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fendpoints.py", "%2e%2e/tsconfig.json", "__init__.py"])
def test_only_the_pages_own_files_can_be_had(client: httpx.Client, name: str) -> None:
    assert client.get(f"/ui/{name}").status_code == 404


def test_a_stream_that_broke_off_goes_on_where_it_was(client: httpx.Client, http_server: HttpServer) -> None:
    token = secrets.token_hex(16)
    begun = http_server.process.metrics()["requests_total"]
    text, last_id = "", ""
    with client.stream("POST", "/ui/api/answers", json=body(token)) as response:
        for id, name, data in events(response):
            if name == "update":
                text, last_id = text + data["text"], id
                if text:
                    break
    seen_chars = len(text)
    with client.stream("GET", f"/ui/api/answers/{token}", headers={"Last-Event-ID": last_id}) as response:
        for _, name, data in events(response):
            if name == "update":
                text += data["text"]
            last = (name, data)
    name, done = last
    assert name == "done"
    assert done["usage"]["completion_tokens"] == 400
    with client.stream("GET", f"/ui/api/answers/{token}") as response:
        (_, _, whole), (_, second_name, _) = events(response)
    assert second_name == "done"
    assert whole["text"] == text
    assert seen_chars < len(text)
    assert http_server.process.metrics()["requests_total"] == begun + 1


def test_what_is_not_asked_for_is_drawn_as_in_uma_chat(client: httpx.Client) -> None:
    def written(**sampling: Any) -> str:
        with client.stream("POST", "/ui/api/answers", json=body(max_tokens=40, seed=1, **sampling)) as response:
            return "".join(data["text"] for _, name, data in events(response) if name == "update")

    assert written() == written(temperature=0.7, top_p=0.95) != written(temperature=0)


def test_a_grammar_holds_for_a_reader_that_came_back(client: httpx.Client) -> None:
    token, form = secrets.token_hex(16), "([a-z]{3} ){40}end"
    asked = body(token, ignore_eos=False, temperature=1.5, seed=1, grammar={"regex": form})
    with client.stream("POST", "/ui/api/answers", json=asked) as response:
        id, text = next((id, data["text"]) for id, name, data in events(response) if name == "update" and data["text"])
    with client.stream("GET", f"/ui/api/answers/{token}", headers={"Last-Event-ID": id}) as response:
        text += "".join(data["text"] for _, name, data in events(response) if name == "update")
    assert re.fullmatch(form, text)


def test_without_a_token_an_answer_ends_with_its_reader(client: httpx.Client, http_server: HttpServer) -> None:
    before = http_server.process.metrics()["requests_cancelled"]
    with client.stream("POST", "/ui/api/answers", json=body(max_tokens=1_900)) as response:
        next(events(response))
    after = until(http_server.process.metrics, is_settled)
    assert after["requests_cancelled"] == before + 1


def test_with_a_token_it_goes_on_and_can_be_stopped_from_elsewhere(client: httpx.Client) -> None:
    token = secrets.token_hex(16)
    with client.stream("POST", "/ui/api/answers", json=body(token, max_tokens=1_900)) as response:
        next(events(response))
    assert client.delete(f"/ui/api/answers/{token}").status_code == 204
    with client.stream("GET", f"/ui/api/answers/{token}") as response:
        *_, (_, name, done) = events(response)
    assert (name, done["reason"]) == ("done", "cancelled")


@pytest.mark.parametrize("last_event_id", ["", "-1", "1e9", "999999999999999999999999", "²", "x" * 5_000])
def test_an_event_id_that_is_none_of_ours_gives_the_whole_answer(client: httpx.Client, last_event_id: str) -> None:
    token = secrets.token_hex(16)
    with client.stream("POST", "/ui/api/answers", json=body(token, max_tokens=8)) as response:
        text = "".join(data["text"] for _, name, data in events(response) if name == "update")
    headers = [(b"Last-Event-ID", last_event_id.encode())]
    with client.stream("GET", f"/ui/api/answers/{token}", headers=headers) as response:
        found = "".join(data["text"] for _, name, data in events(response) if name == "update")
    assert found == text


def test_what_is_wrong_with_a_question_is_said(client: httpx.Client) -> None:
    token = secrets.token_hex(16)
    assert client.get(f"/ui/api/answers/{token}").status_code == 404
    refused = client.post("/ui/api/answers", json={"messages": []})
    assert refused.status_code == 400
    assert "messages" in refused.json()["error"]["message"]
    refused = client.post("/ui/api/answers", json=body(n=2))
    assert (refused.status_code, "n and best_of" in refused.text) == (400, True)
    with client.stream("POST", "/ui/api/answers", json=body(token)) as response:
        next(events(response))
        again = client.post("/ui/api/answers", json=body(token))
        assert (again.status_code, "token" in again.text) == (400, True)
        client.delete(f"/ui/api/answers/{token}")


def test_a_prompt_that_is_too_long_fails_in_the_stream(client: httpx.Client) -> None:
    long = {**body(), "messages": [{"role": "user", "content": "word " * 20_000}]}
    with client.stream("POST", "/ui/api/answers", json=long) as response:
        *_, (_, name, failure) = events(response)
    assert (name, failure["code"]) == ("failed", "E_LIMIT_PROMPT_TOO_LARGE")
