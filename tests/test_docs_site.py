"""The docs site has every page in its navigation; `mkdocs build --strict` in `.ci/run` finds dead links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert yaml.safe_load(navigation)
    assert sorted(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)) == sorted(
        ["index.md", *(path.name for path in PAGES)]
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_begins_with_its_readers_and_a_long_one_with_its_sections(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    _, first, *_ = text.split("\n\n")
    assert re.search(r"\bfor\b", first, re.IGNORECASE)
    assert text.count("\n") <= 100 or len(re.findall(r"\]\(#", text.partition("\n## ")[0])) >= 3
