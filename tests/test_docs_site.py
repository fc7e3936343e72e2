"""README and the pages of docs/: each is found, says for whom it is, and names commands and options that there are.

`mkdocs build --strict` in `.ci/run` finds dead links.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import re
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import attrs
import pytest
import yaml
from page_browser import chromium
from playwright.sync_api import Page

from harness import run_to_end
from uma.cli.checks import GPU_TRACES
from uma.cli.parser import build_parser
from uma.cli.slash import ALIASES, COMMANDS
from uma.config import load, settings
from uma.http import ollama
from uma.http.fields import DRAWN
from uma.llama.header import TRIED
from uma.llama.library import rebuild_command
from uma.types import CHAT_SAMPLING, SamplerSettings

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *PAGES)}
OF_OTHERS = ("comparison.md", "many-machines.md")
"""Pages that name options of other programs, too."""


OUTSIDE = {
    *("index.md", "changelog.md", "contributing.md", "security.md", "license.md", "benchmarks/index.md"),
    *("examples/index.md", "examples/batch_file.md", "examples/plain_client.md", "examples/race.md"),
}
"""Pages of the site that are made of files from outside docs/."""
LINKED = re.compile(r"(?<!!)\[([^\]`]+)\]\(((?!https?:)[^)]+)\)")
"""The text and the file of a link."""


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert yaml.safe_load(navigation)
    assert sorted(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)) == sorted(
        [*OUTSIDE, *(path.name for path in PAGES)]
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("the extra `docs` is not installed")
    settings, folder = ROOT / "docs" / "site" / "mkdocs.yml", tmp_path_factory.mktemp("site")
    built = run_to_end(sys.executable, "-m", "mkdocs", "build", "-q", "-f", str(settings), "-d", str(folder))
    assert built.returncode == 0, built.stderr
    return folder


def test_on_the_site_readme_is_the_front_page_to_which_pages_link(site: Path) -> None:
    linked = [path for path in PAGES if "](../README.md" in TEXTS[path.name]]
    assert len(linked) >= 3
    for page in linked:
        html = (site / page.stem / "index.html").read_text(encoding="utf-8")
        for section in set(re.findall(r"\]\(\.\./README\.md(#[\w-]+)?\)", TEXTS[page.name])):
            assert f'href="../{section}"' in html, page


def test_on_the_site_every_link_of_readme_and_of_the_pages_from_outside_docs_is_a_link(site: Path) -> None:
    pages = {
        "README.md": "index.html",
        "SECURITY.md": "security/index.html",
        "CONTRIBUTING.md": "contributing/index.html",
    }
    for source, page in pages.items():
        html = (site / page).read_text(encoding="utf-8")
        for text, path in LINKED.findall((ROOT / source).read_text(encoding="utf-8")):
            words = r"\s+".join(map(re.escape, text.split()))
            found = re.search(rf'<a href="([^"#]*)[^"]*">{words}</a>', html)
            assert found, f"{source}: {text} ({path})"
            target = (site / page).parent / found[1]
            assert target.exists() and (target.is_file() or (target / "index.html").is_file()), path


def test_the_site_has_the_pictures_of_its_pages(site: Path) -> None:
    for page in ("index.html", "benchmarks/index.html"):
        html = (site / page).read_text(encoding="utf-8")
        pictures = re.findall(r'(?:src|srcset)="([^"]+\.png)"', html)
        assert len(pictures) > 3
        assert [path for path in pictures if not (site / page).parent.joinpath(path).is_file()] == []


@pytest.fixture(scope="module")
def site_page(site: Path) -> Iterator[tuple[Page, str]]:
    """A browser's page, as narrow as a phone, and the address of the built site."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium() as browser:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield browser.new_page(viewport={"width": 390, "height": 844}), f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("searched", "place"),
    [
        ("install", "questions/#how-do-i-install-it"),
        ("out of memory", "questions/#what-do-i-do-when-it-runs-out-of-memory"),
        ("windows", "questions/#does-it-run-on-windows"),
        ("uninstall", "questions/#how-do-i-uninstall-it"),
        ("javascript", "http/#a-client-in-javascript"),
        ("cuda", "tuning/#gpu"),
        ("supported models", "models/#supported-models"),
        ("license", "license/"),
        ("changelog", "changelog/"),
        ("security", "security/"),
    ],
)
def test_the_site_s_search_has_the_right_page_first(site_page: tuple[Page, str], searched: str, place: str) -> None:
    page, url = site_page
    page.goto("about:blank")
    page.goto(f"{url}/?q={searched}")
    first = page.locator(".md-search-result__item").first
    first.wait_for(state="attached")
    links = first.locator("a").evaluate_all("links => links.map(link => link.pathname + link.hash)")
    assert f"/{place}" in links


@pytest.mark.parametrize("name", ["http", "settings", "tuning", "questions"])
def test_on_a_phone_no_table_of_the_site_scrolls_sideways(site_page: tuple[Page, str], name: str) -> None:
    page, url = site_page
    page.goto(f"{url}/{name}/")
    wide = "tables => tables.filter(each => each.scrollWidth > each.clientWidth).map(each => each.innerText)"
    tables = page.locator(".md-typeset__scrollwrap")
    assert tables.count() > 0
    assert tables.evaluate_all(wide) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_begins_with_its_readers_and_a_long_one_with_its_sections(page: Path) -> None:
    text = TEXTS[page.name]
    _, first, *_ = text.split("\n\n")
    assert re.search(r"\bfor\b", first, re.IGNORECASE)
    assert text.count("\n") <= 100 or len(re.findall(r"\]\(#", text.partition("\n## ")[0])) >= 3


def test_every_command_that_can_be_pasted_is_one() -> None:
    parser = build_parser()
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```", "\n".join(TEXTS.values()), re.DOTALL | re.MULTILINE)
    pasted = "\n".join(block for language, block in blocks if language != "text")
    parts = re.split(r"\n(?:\$ )?| (?:&&|\|\||[|<>]) ?", pasted)
    commands = [shlex.split(part, comments=True)[1:] for part in parts if part.startswith("uma ")]
    assert len(commands) > 50
    for command in commands:
        parser.parse_args(command)


def test_every_example_in_python_imports_what_it_uses() -> None:
    examples = {name: re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.M) for name, text in TEXTS.items()}
    del examples["api.md"]  # its blocks are signatures
    assert sum(map(len, examples.values())) > 12
    for name, codes in examples.items():
        for code in codes:
            found = list(ast.walk(ast.parse(code)))
            known = {*dir(builtins)}
            known |= {(each.asname or each.name).partition(".")[0] for each in found if isinstance(each, ast.alias)}
            defined = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.ExceptHandler
            known |= {str(each.name) for each in found if isinstance(each, defined)}
            known |= {each.arg for each in found if isinstance(each, ast.arg)}
            names = [each for each in found if isinstance(each, ast.Name)]
            known |= {each.id for each in names if isinstance(each.ctx, ast.Store)}
            assert {each.id for each in names} - known == set(), f"{name}: {code}"


def test_every_option_that_is_named_is_one() -> None:
    parser = build_parser()
    commands = next(action for action in parser._actions if action.choices)
    parsers = [parser, *dict(commands.choices or {}).values()]
    known = {option for each in parsers for option in each._option_string_actions}
    named = {name: set(re.findall(r"`(?:uma [^`]*?)?(--[a-z][a-z-]*)", text)) for name, text in TEXTS.items()}
    assert {name: wrong for name in named.keys() - OF_OTHERS if (wrong := named[name] - known)} == {}


def test_the_table_of_settings_has_no_code_as_a_default_and_each_unit_has_a_noun() -> None:
    assert "()`" not in TEXTS["settings.md"]
    assert [each.name for each in settings().values() if re.search(r" (after|before|of|within)$", each.help)] == []


def test_the_whole_file_of_settings_can_be_copied_also_with_the_lines_that_are_off(tmp_path: Path) -> None:
    (whole,) = re.findall(r"^```toml\n(.*?)^```", TEXTS["settings.md"], re.MULTILINE | re.DOTALL)
    for text in (whole, re.sub(r"^# (?=\w+ = )", "", whole, flags=re.MULTILINE)):
        (tmp_path / "uma.toml").write_text(text, encoding="utf-8")
        loaded = load(environ={}, config_file=tmp_path / "uma.toml")
        named = re.findall(r"^(\w+) = ", text.partition("[models")[0], re.MULTILINE)
        assert named
        assert all("uma.toml" in loaded.origins[name] for name in named)


def test_the_exit_codes_are_those_of_the_help() -> None:
    told = dict(re.findall(r"^\| (\d+) \| (.*) \|$", TEXTS["commands.md"], re.MULTILINE))
    text = build_parser().format_help().partition("exit codes:")[2].partition("environment:")[0]
    assert set(told) == set(re.findall(r"\b(\d{1,3})(?= {2,}|: )", text))
    for code, meaning in re.findall(r"^  (\d+) +(\S.*)$", text, re.MULTILINE):
        assert told[code].startswith(re.split(r", | \(", meaning)[0])


def test_the_supported_architectures_are_those_that_uma_knows() -> None:
    _, _, named = TEXTS["models.md"].partition("**Not supported**")
    missing, _, listed = named.partition("uma models --json")
    assert sorted(re.findall(r"`([\w.-]+)`", missing + listed)) == sorted(TRIED)


def test_the_command_that_builds_for_a_gpu_has_the_version_that_uma_needs_and_the_options_of_doctor() -> None:
    (needed,) = re.findall(r'"(llama-cpp-python==[\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    section = TEXTS["tuning.md"].partition("\n## GPU\n")[2].partition("\n## ")[0]
    (command,) = re.findall(r"^CMAKE_ARGS=\S+ (python -m .*)$", section, re.MULTILINE)
    assert command.replace("python", sys.executable, 1) == rebuild_command()
    assert needed in command
    assert all(option in section for _, option in GPU_TRACES.values())


def test_the_page_of_the_chat_has_every_command_of_it_and_no_other() -> None:
    told = dict(re.findall(r"^\| `(/\S+)(?: (\S[^`]*))?` \|", TEXTS["chat.md"], re.MULTILINE))
    assert told == {name: command.argument for name, command in COMMANDS.items()}
    assert all(f"`{name}`" in TEXTS["chat.md"] for name in ALIASES)


def test_the_defaults_of_sampling_are_those_of_the_code() -> None:
    table = re.findall(
        r"^\| (.+?) \| ([\d.]+) \| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", TEXTS["fields.md"], re.M
    )
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    plain = attrs.asdict(SamplerSettings())
    told = [tuple(0.0 if figure == "off" else float(figure) for figure in figures) for _, *figures in table]
    own: tuple[Mapping[str, float], ...] = (DRAWN, ollama.DEFAULTS, CHAT_SAMPLING, {})
    assert told == [tuple(float({**plain, **each}[name]) for name in names) for each in own]
