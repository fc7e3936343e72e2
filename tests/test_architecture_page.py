"""What docs/architecture.md names is there, by that name."""

from __future__ import annotations

import re
from pathlib import Path

import uma
from uma.engine.intake.prompt import TOKENIZER_THREADS
from uma.engine.worker.status import HAS_SLOT, TRANSITIONS, Change, Status
from uma.errors import WIRE_ERRORS
from uma.version import __version__

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_it_names_is_there() -> None:
    named = set(re.findall(r"`((?:uma/)?(?:[a-z_]+/)*[a-z_]+\.py|engine/[a-z]+/)`", PAGE))
    assert len(named) > 8
    for name in named:
        inside = ROOT / "uma" / "engine"
        assert any((base / name).exists() for base in (ROOT, ROOT / "uma", inside, inside / "delivery")), name


def test_the_house_has_each_room_and_no_other() -> None:
    house = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\numa/\n")[2].partition("```")[0]
    rooms = {each.name + "/" * each.is_dir() for each in (ROOT / "uma").iterdir() if not each.name.startswith("_")}
    assert set(re.findall(r"^  (\S+)", house, re.MULTILINE)) == rooms - {"py.typed"}


def test_its_picture_has_every_state_and_every_change() -> None:
    words = set(re.findall(r"\b[A-Z_]{3,}\b", PAGE))
    assert {each.name for each in Status} | {each.name for each in Change} <= words
    told = re.search(r"Only (.*) have a slot", PAGE)
    assert told is not None
    assert set(re.findall("[A-Z]+", told[1])) - {"O"} == {each.name for each in HAS_SLOT}
    assert TRANSITIONS[Status.ENDED] == {}


def test_its_codes_and_numbers_are_the_code_s() -> None:
    assert set(re.findall(r"E_[A-Z_]+", PAGE)) <= WIRE_ERRORS.keys()
    assert f"tokenizer threads ({TOKENIZER_THREADS})" in PAGE


def test_the_version_is_written_in_one_place_and_types_are_published() -> None:
    assert uma.__version__ == __version__
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert not re.search(r"^version = ", project, re.MULTILINE)
    assert (ROOT / "uma" / "py.typed").is_file()
