"""docs/api.md, the API reference, is what the docstrings say, and leaves nothing public out."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import uma

DOCS = Path(__file__).parents[1] / "docs"
MAKE = runpy.run_path(str(DOCS / "make_api.py"))
PAGE = (DOCS / "api.md").read_text(encoding="utf-8")


def test_the_reference_is_what_the_docstrings_say() -> None:
    assert MAKE["page"]() == PAGE, "run `python docs/make_api.py` and commit docs/api.md"


@pytest.mark.parametrize("name", MAKE["TABLES"])
def test_a_table_that_is_made_is_what_the_code_says(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert MAKE["with_table"](name) == text, "run `python docs/make_api.py` and commit the page"
    assert text.count("\n| `") > 60


def test_every_public_name_has_an_entry() -> None:
    entries = set(re.findall(r"^(?:### |- `)(\w+)", PAGE, re.MULTILINE))
    assert set(uma.__all__) - {"__version__"} <= entries
