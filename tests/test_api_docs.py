"""docs/api.md, the API reference, is what the docstrings say, and leaves nothing public out."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import uma

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "api.md").read_text(encoding="utf-8")


def test_the_reference_is_what_the_docstrings_say() -> None:
    make = runpy.run_path(str(DOCS / "make_api.py"))
    assert make["page"]() == PAGE, "run `python docs/make_api.py` and commit docs/api.md"


def test_every_public_name_has_an_entry() -> None:
    entries = set(re.findall(r"^(?:### |- `)(\w+)", PAGE, re.MULTILINE))
    assert set(uma.__all__) - {"__version__"} <= entries
