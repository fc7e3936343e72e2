"""README is short and true: its Python runs, and the table of commands beside it is the command line's own."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
from http_server import HttpServer

from harness import clean_environ, run_to_end
from uma.cli.parser import build_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
PYTHON = "".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("python", "http"))
SNIPPETS = re.findall(r"```python\n(.*?)```", README + PYTHON, re.DOTALL)
PLACE = "http://127.0.0.1:8080"
CLIENTS = [each for each in SNIPPETS if PLACE in each]
(LOOP,) = [each for each in SNIPPETS if "in llm.generate(" in each]
"""The first example: a loop over the results of a batch."""


@pytest.mark.parametrize("snippet", CLIENTS)
def test_each_client_needs_its_import_and_its_address(snippet: str, http_server: HttpServer) -> None:
    first, made, *asked = (line for line in snippet.splitlines() if line)
    assert first.startswith("import ")
    assert PLACE in made
    assert 1 <= len(asked) <= 4
    assert '"builtin"' not in snippet, "a server of another model refuses it"
    here = snippet.replace(PLACE, http_server.url).replace("qwen2.5-coder", "builtin")
    done = run_to_end(sys.executable, "-c", here)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 20


def run_example(snippet: str) -> tuple[str, str]:
    """What a Python example prints and warns of, on the built-in model."""
    code = re.sub(r"\bLLM\((?!socket)", "LLM(threads=1, ", snippet)
    code = code.replace("max_tokens=64", "max_tokens=64, temperature=0")  # what is drawn can be short
    done = run_to_end(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_every_snippet_runs_with_what_an_installation_has() -> None:
    assert [each for each in SNIPPETS if ".gguf" in each] == []


def test_every_snippet_of_the_library_passes_a_type_checker(tmp_path: Path) -> None:
    pytest.importorskip("mypy", exc_type=ImportError)
    pages = [ROOT / name for name in ("README.md", "docs/python.md", "docs/decisions.md")]
    blocks = [
        block for page in pages for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    ]
    files = [tmp_path / f"block_{index}.py" for index in range(len(blocks))]
    for file, block in zip(files, blocks, strict=True):
        file.write_text(block, encoding="utf-8")
    options = ("--config-file=", "--ignore-missing-imports", "--follow-imports=silent", f"--cache-dir={tmp_path}/cache")
    environ = {**clean_environ(), "MYPYPATH": str(ROOT)}
    done = run_to_end(sys.executable, "-m", "mypy", *options, *map(str, files), environ=environ)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_loop_tells_of_the_prompt_that_failed_and_goes_on() -> None:
    out, warned = run_example(LOOP.replace("prompts = [", 'prompts = ["word " * 9_000, '))
    failed, _, rest = out.partition("\n")
    assert failed.startswith("failed: ")
    assert "prompt too large" in failed
    assert "failed" not in rest
    assert len(rest.split()) > 60, "two answers to prompts, and what is streamed"
    assert warned.count("UserWarning") == 1


@pytest.mark.parametrize("snippet", [each for each in SNIPPETS if each not in (LOOP, *CLIENTS)])
def test_every_other_python_snippet_runs_and_prints(snippet: str) -> None:
    out, _ = run_example(snippet)
    assert len(out.strip()) > 20


@pytest.mark.parametrize(("max_tokens", "told"), [(6, " () None"), (12, " () weather")])
def test_a_call_of_the_tool_s_example_that_is_cut_is_none_to_run(max_tokens: int, told: str) -> None:
    (tool,) = (each for each in SNIPPETS if "tool_choice" in each)
    cut = tool.replace("max_tokens=256", f"max_tokens={max_tokens}, temperature=0")
    shown = "print(said.finish_reason, said.text, said.tool_calls, said.cut_call and said.cut_call.name)"
    out, _ = run_example(cut.replace("for call in", f"{shown}\nfor call in"))
    assert out.startswith("length ")
    assert told in out.partition("\n")[0]


def test_the_table_names_every_command_and_no_other() -> None:
    named = set(re.findall(r"^\| `uma ([\w-]+)` \|", COMMANDS, re.MULTILINE))
    subparsers = next(action for action in build_parser()._actions if action.choices)
    assert named == set(subparsers.choices or ())


def test_it_is_read_in_five_minutes() -> None:
    assert len(README.split()) <= 1_300


def test_start_begins_with_a_block_that_installs_uma_and_the_tests_have_a_line_below_code() -> None:
    start, code = (README.partition(head)[2] for head in ("## Start", "- **Code**"))
    block, tests = (re.findall(r"^```\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)[0] for part in (start, code))
    environment, install = block.splitlines()
    assert environment.endswith("&& . .venv/bin/activate")
    assert install.startswith("pip install . && uma generate ")
    assert re.fullmatch(r"pip install '\.\[test\]' && pytest .*\n", tests)
    assert README.count("pytest") == 1


def test_every_link_leads_somewhere() -> None:
    pictures = re.findall(r' (?:src|srcset)="([^"]+)"', README)
    assert {f"docs/page-{view}-{theme}.png" for view in ("chat", "live") for theme in ("dark", "light")} <= {*pictures}
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)", README)
    for target, section in (*((picture, "") for picture in pictures), *links):
        assert (ROOT / target).exists(), target
        if section:
            heads = re.findall(r"^#+ (.+)$", (ROOT / target).read_text(encoding="utf-8"), re.MULTILINE)
            assert section in {re.sub(r"[^\w-]", "", head.lower().replace(" ", "-")) for head in heads}


def test_start_leads_to_a_small_model_and_to_builds_for_any_cpu_and_for_nvidia_cards() -> None:
    start = README.partition("## Start")[2].partition("\n## ")[0]
    (repository,) = re.findall(r"\]\(https://huggingface\.co/([\w.-]+/[\w.-]+-GGUF)/tree/main\)", start)
    assert f"uma pull {repository} " in start
    # llama-cpp-python's own description has the index of its builds, and a line for each CUDA version there.
    description = str(importlib.metadata.metadata("llama-cpp-python").json["description"])
    (index, build) = re.findall(r"--extra-index-url (https://\S+/whl/)(cu\d+)`", start)[0]
    assert re.findall(r"--extra-index-url (https://\S+/whl/cpu)", start) == [f"{index}cpu"] * 3
    assert f"{index}cpu" in description
    # There is no release that a name would find.
    for line in re.findall("^(?:pip|uv|pipx) .*--extra.*", start, re.MULTILINE):
        assert re.search(r" install \. --", line), line
    assert f"{index}<cuda-version>" in description
    versions = dict(re.findall(r"^- `(cu\d+)`: CUDA ([\d.]+)$", description, re.MULTILINE))
    assert build in versions
    newest, oldest = (found(versions.values(), key=float) for found in (max, min))
    assert f"{oldest} to {newest}" in start
