"""The page for authors of clients says what is so, and its client works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import ServerProcess, run_to_end
from uma.protocol.messages import Generate
from uma.protocol.schema import schemas
from uma.protocol.session import Refused, ServerSession
from uma.protocol.states import AFTER_ERROR, After

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
CLIENT = ROOT / "examples" / "plain_client.py"
AFTER_WORDS = {After.CLOSED: "closes", After.OPEN: "stays open", After.CLOSED_IF_PLAIN: "closes if plain"}


def rows(heading: str) -> list[list[str]]:
    """The cells of the last table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_client_on_the_page_is_the_one_in_the_examples() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code == CLIENT.read_text(encoding="utf-8")


def test_the_client_needs_nothing_but_the_standard_library() -> None:
    imported = re.findall(r"^(?:import|from) (\w+)", CLIENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(imported) <= sys.stdlib_module_names


def run_client(server: ServerProcess, prompt: str) -> subprocess.CompletedProcess[str]:
    return run_to_end(sys.executable, str(CLIENT), str(server.socket), prompt)


def test_the_client_tells_a_story(server: ServerProcess) -> None:
    done = run_client(server, "Once upon a time")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) > 5


def test_the_client_says_what_is_wrong(server: ServerProcess) -> None:
    done = run_client(server, "word " * 20_000)
    assert done.returncode == 1
    assert done.stderr.startswith("E_LIMIT_PROMPT_TOO_LARGE: ")


def test_the_page_names_every_field_of_a_request() -> None:
    fields = {name for row in rows("Requests") for name in re.findall(r"`(\w+)`", row[0])}
    assert schemas()["generate"]["properties"].keys() <= fields | {"type"}


def test_the_page_has_each_fields_default() -> None:
    told = {name: row[2] for row in rows("Requests") if len(row) == 3 for name in re.findall(r"`(\w+)`", row[0])}
    for name, schema in schemas()["generate"]["properties"].items():
        if "default" in schema and name != "type":
            assert json.loads(told[name].strip("`")) == schema["default"], name


def test_the_page_tells_of_every_error_what_becomes_of_the_session() -> None:
    told = {row[0].strip("`"): row[2] for row in rows("Errors")}
    assert told.keys() == AFTER_ERROR.keys()
    for code, after in AFTER_ERROR.items():
        assert told[code].startswith(AFTER_WORDS[after]), code
        assert after is After.CLOSED_IF_PLAIN or "plain" not in told[code]


@pytest.mark.parametrize("line", re.findall(r"^    → (\{.*\})$", PAGE, re.MULTILINE))
def test_each_request_on_the_page_is_taken(line: str) -> None:
    payload = line.encode()
    session = ServerSession()
    session.receive(len(payload).to_bytes(4, "little") + payload)
    assert not isinstance(session.next_message(), Refused)


@pytest.mark.parametrize("line", re.findall(r"^    ← (\{.*\})$", PAGE, re.MULTILINE))
def test_each_event_on_the_page_has_the_fields_of_its_schema(line: str) -> None:
    event = json.loads(line.replace("{…}", "{}").replace(", …", ""))
    schema = schemas()[f"event.{event['event']}"]
    assert event.keys() <= schema["properties"].keys()
    assert "…" in line or event.keys() >= set(schema["required"])


def test_a_request_on_the_page_is_a_generation() -> None:
    session = ServerSession()
    payload = b'{"id": "1", "prompt": "Once upon a time", "max_tokens": 2}'
    assert payload.decode() in PAGE
    session.receive(len(payload).to_bytes(4, "little") + payload)
    assert isinstance(session.next_message(), Generate)
