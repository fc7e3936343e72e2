"""The docs site's front page is README, and links to files that are no part of the site are plain text there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]*)\)")
STYLE = """/* A word of code in a table is not broken, as Material has it: its column is as wide as the word. */
.md-typeset td code { word-break: normal; overflow-wrap: break-word; }
/* On a phone the text of a table needs the space. */
@media (max-width: 44.9em) {
  .md-typeset table:not([class]) th { min-width: 0; }
  .md-typeset table:not([class]) :is(th, td) { padding: .6em; }
}
"""
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?!https?:|#|mailto:)[^)\s]*)\)")
"""A link to another file, which is no picture."""


def on_files(files: Files, config: Any) -> Files:
    """Add the front page, its pictures from outside docs/, and the site's style."""
    files.append(File.generated(config, "site.css", content=STYLE))
    text = README.read_text(encoding="utf-8").replace("](docs/", "](").replace('src="docs/', 'src="')
    text = text.replace('srcset="docs/', 'srcset="')
    files.append(File.generated(config, "index.md", content=text))
    for path in PICTURE.findall(text):
        if files.get_file_from_path(path) is None and (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Files) -> str:
    """Link README as the front page, and unlink what is not there."""
    text = text.replace("](../README.md", "](index.md")

    def known(link: re.Match[str]) -> str:
        path = link[2].partition("#")[0]
        return link[0] if not path or files.get_file_from_path(path) is not None else link[1]

    return LINK.sub(known, text)
