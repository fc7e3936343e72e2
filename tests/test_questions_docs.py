"""docs/questions.md is true: its commands are commands, with options that they take, and its settings are settings."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import attrs
import pytest

from uma.cli.parser import build_parser
from uma.config import RuntimeConfig

PAGE = (Path(__file__).parents[1] / "docs" / "questions.md").read_text(encoding="utf-8").replace("\n", " ")
COMMANDS = sorted(set(re.findall(r"`(uma [^`]+)`", PAGE)))
OPTIONS = sorted(set(re.findall(r"`(--[a-z-]+)", PAGE)))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_an_answer_is_one_that_uma_takes(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    build_parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_an_answer_is_a_setting(option: str) -> None:
    assert option.removeprefix("--").replace("-", "_") in {field.name for field in attrs.fields(RuntimeConfig)}


def test_there_are_25_questions() -> None:
    assert len(re.findall(r"\*\*(?:How do I|Why)", PAGE)) >= 25
