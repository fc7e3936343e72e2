"""The docs site has every page in its navigation; `mkdocs build --strict` in `.ci/run` finds dead links."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = yaml.safe_load((ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    named = [page for entry in navigation for page in entry.values()]
    assert sorted(named) == sorted(["index.md", *(path.name for path in (ROOT / "docs").glob("*.md"))])
