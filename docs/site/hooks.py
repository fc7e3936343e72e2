"""The docs site also has files from outside docs/ as pages, README as the front page. Links to other files are text."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = {f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted((ROOT / "examples").glob("*.py"))}
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "examples": "examples/index.md",
    **SCRIPTS,
}
"""Files of the project, and the page that each is on the site."""
BOOST = {"changelog.md": 0.3, "benchmarks/index.md": 0.3}
"""Weight in the site's search, if not 1: these long pages name everything."""
SOURCES = {page: source for source, page in PAGES.items()}
STYLE = """/* A word of code in a table is not broken, as Material has it: its column is as wide as the word. */
.md-typeset td code { word-break: normal; overflow-wrap: break-word; }
/* On a phone the text of a table needs the space: code breaks anywhere, but not the name that a row begins with. */
@media (max-width: 44.9em) {
  .md-typeset table:not([class]) { font-size: .57rem; }
  .md-typeset table:not([class]) :is(th, td) { padding: .5em .4em; min-width: 0; }
  .md-typeset td:not(:first-child) code { overflow-wrap: anywhere; }
  .md-typeset td code { padding: 0 .1em; }
}
"""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?!https?:|#|mailto:)[^)\s]*)\)")
"""A link to another file, or a picture (`!`)."""
ATTRIBUTE = re.compile(r'\b(src|srcset)="([^":]*)"')
"""The file of a picture in HTML."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures from outside docs/, and the site's style."""
    pictures: set[str] = set()
    files.append(File.generated(config, "site.css", content=STYLE))
    for source, page in PAGES.items():
        text = _text(source)
        files.append(File.generated(config, page, content=text))
        found = (_resolved(source, path) for picture, _, path in LINK.findall(text) if picture)
        pictures.update(path for path in found if not path.startswith("docs/"))
    for path in sorted(pictures):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def _text(source: str) -> str:
    """Markdown of a file from outside docs/."""
    if source == "examples":
        scripts = (f"- [{path}]({path.partition('/')[2]}): {_summary(path)}" for path in SCRIPTS)
        return "# Examples\n\nPython scripts that run as they are:\n\n" + "\n".join(scripts) + "\n"
    text = (ROOT / source).read_text(encoding="utf-8")
    if source in SCRIPTS:
        return f"# {source}\n\n```python\n{text}```\n"
    return text if source.endswith(".md") else f"# {source.capitalize()}\n\n```text\n{text.strip()}\n```\n"


def _summary(script: str) -> str:
    return (ROOT / script).read_text(encoding="utf-8").removeprefix('"""').partition("\n")[0].removesuffix('"""')


def _resolved(source: str, path: str) -> str:
    """Path from the project's root of what `path` names in the file `source`; that of `examples` names its scripts."""
    folder = source if source == "examples" else posixpath.dirname(source)
    return posixpath.normpath(posixpath.join(folder, path))


def on_page_markdown(text: str, page: Any, config: Any, files: Files) -> str:
    """Turn paths in the project into paths on the site, and links to what the site does not have into text."""
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")
    if here in BOOST:
        page.meta["search"] = {"boost": BOOST[here]}

    def on_the_site(path: str) -> str:
        """Empty if the site does not have the file."""
        name, hash_, section = path.partition("#")
        target = _resolved(source, name)
        target = PAGES.get(target, target.removeprefix("docs/"))
        known = files.get_file_from_path(target) is not None
        return posixpath.relpath(target, posixpath.dirname(here) or ".") + hash_ + section if known else ""

    def link(found: re.Match[str]) -> str:
        path = on_the_site(found[3])
        return f"{found[1]}[{found[2]}]({path})" if path else found[2]

    text = ATTRIBUTE.sub(lambda found: f'{found[1]}="{on_the_site(found[2]) or found[2]}"', text)
    return LINK.sub(link, text)
