"""Nothing that reaches a terminal is obeyed by it, or looks like what it is not."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import clean_environ, run_to_end, running_server, uma_command
from models import write_model
from uma.cli.sanitize import json_text, sanitize, sanitize_line, toml_text
from uma.errors import BadRequest
from uma.llm.batch import tell_of_failures
from uma.llm.results import failed
from uma.net.controls import TABLE
from uma.net.logfmt import logfmt

EVIL = "a\x1b]0;owned\x07b\x9b31mc\u202ed\u200be\u2028f\U000e0041g"
TEXT = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from([chr(code) for code in TABLE if code < 0xD800])
)


def is_clean(text: str) -> bool:
    return not any(ord(char) in TABLE for char in text)


@given(TEXT)
def test_no_text_gets_through_with_a_harmful_character_and_the_rest_stays(text: str) -> None:
    assert is_clean(sanitize(text))
    assert sanitize(sanitize(text)) == sanitize(text)
    innocent = "".join(char for char in text if ord(char) not in TABLE)
    assert sanitize(innocent) == innocent
    assert len(sanitize_line(text).splitlines()) <= 1


def test_what_stands_for_each_kind() -> None:
    assert sanitize("\x1b[2J\r\x7f") == "␛[2J␍␡"
    assert sanitize("\x9b\u202e\u2066\u2028\u061c") == "\ufffd" * 5
    assert sanitize("a\u200b\u200d\ufeff\u00ad\U000e0020b") == "ab"
    assert sanitize("tab\tline\nä 漢 👍🏽 é") == "tab\tline\nä 漢 👍🏽 é"


@given(TEXT)
def test_json_toml_and_the_log_carry_the_same_data_without_a_harmful_character(text: str) -> None:
    assert is_clean(json_text({"x": text}, indent=2))
    assert json.loads(json_text(text)) == text
    assert is_clean(toml_text(text))
    assert tomllib.loads(f"x = {toml_text(text)}")["x"] == text
    line = logfmt({"x": text + " "})
    assert is_clean(line)
    assert json.loads(line.removeprefix("x=")) == text + " "


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A sound model whose header speaks to terminals."""
    return write_model(
        tmp_path / f"{EVIL.replace(chr(47), '')}.gguf", metadata={"general.name": EVIL, "general.description": EVIL}
    )


def test_the_banner_of_a_server_is_clean(evil: Path, socket_dir: Path) -> None:
    with running_server(socket_dir / "s", "--model", str(evil)) as server:
        chat = run_to_end(
            *uma_command("chat", "--socket", str(server.socket), "--max-tokens", "2"), stdin="hi\n/stats\n"
        )
        ps = run_to_end(*uma_command("ps", "--socket", str(server.socket)))
        said = server.log.text
    assert "model   a␛]0;owned␇b" in said
    for text in (said, chat.stderr, ps.stdout):
        assert "owned" in text
        assert is_clean(text)


def test_where_a_key_is_kept_is_told_clean(tmp_path: Path) -> None:
    done = run_to_end(*uma_command("key", "new", "n", "--keys", str(tmp_path / EVIL.replace("/", ""))))
    assert done.returncode == 0
    assert "holds its hash" in done.stderr
    assert is_clean(done.stderr)


def test_the_warning_of_a_batch_is_clean() -> None:
    with pytest.warns(UserWarning, match="owned") as warned:
        tell_of_failures([failed("a prompt", BadRequest(EVIL))])
    assert is_clean(str(warned[0].message))


def test_help_shows_the_places_of_the_environment_clean() -> None:
    done = run_to_end(*uma_command("run", "--help-all"), environ=clean_environ(XDG_RUNTIME_DIR=f"/tmp/{EVIL}"))
    assert done.returncode == 0
    assert "owned" in done.stdout
    assert is_clean(done.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "hello", "--local", "--model", f"/{EVIL}"),
        ("run", "--socket", f"/proc/{EVIL}/x"),
        ("run", f"--n-ctxx{EVIL}"),
        ("run", "--n-ctx", EVIL),
        (EVIL,),
        ("chat", "--load", EVIL),
        ("config", "--config", EVIL),
        ("schema", EVIL),
        ("models", EVIL),
    ],
)
def test_errors_are_clean_and_take_one_line(arguments: tuple[str, ...], socket_dir: Path) -> None:
    done = run_to_end(*uma_command(*arguments))
    assert done.returncode in (1, 2)
    assert is_clean(done.stderr)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("Try ")]
    assert len(errors) == 1
    assert errors[0].startswith("uma: error: ")


def test_listings_are_clean(tmp_path: Path) -> None:
    folder = tmp_path / EVIL.replace("/", "")
    folder.mkdir()
    write_model(folder / "m\u202e.gguf", architecture="llama", metadata={"general.name": EVIL})
    strange = write_model(folder / "strange.gguf", architecture=EVIL)
    (folder / f"torn{EVIL}.gguf").write_bytes(b"GGUF")
    environ = clean_environ(UMA_MODELS=str(folder), UMA_CACHE_DIR=EVIL)
    for arguments in (("models",), ("models", "--json"), ("config",), ("config", "--json"), ("config", "--toml")):
        done = run_to_end(*uma_command(*arguments), environ=environ)
        assert done.returncode == 0, done.stderr
        assert "owned" in done.stdout
        assert is_clean(done.stdout + done.stderr)
    done = run_to_end(*uma_command("generate", "hello", "--local", "--model", str(strange)))
    assert "owned" in done.stderr, "it does not say which architecture"
    assert is_clean(done.stderr)
