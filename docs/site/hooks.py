"""The docs site's front page is README, and links to files that are no part of the site are plain text there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]*)\)")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?!https?:|#|mailto:)[^)\s]*)\)")
"""A link to another file, which is no picture."""


def on_files(files: Files, config: Any) -> Files:
    """Add the front page, and its pictures from outside docs/."""
    text = README.read_text(encoding="utf-8").replace("](docs/", "](").replace('src="docs/', 'src="')
    text = text.replace('srcset="docs/', 'srcset="')
    files.append(File.generated(config, "index.md", content=text))
    for path in PICTURE.findall(text):
        if files.get_file_from_path(path) is None and (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Files) -> str:
    """Unlink what is not there."""

    def known(link: re.Match[str]) -> str:
        path = link[2].partition("#")[0]
        return link[0] if not path or files.get_file_from_path(path) is not None else link[1]

    return LINK.sub(known, text)
