"""A docstring names its subject: it can be read alone, where an editor or a search shows it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import uma

SOURCES = Path(uma.__file__).parent
NO_SUBJECT = frozenset({
    "Of", "Those", "These", "By", "As", "With", "Its", "It", "For", "From", "In", "On", "At", "Behind", "Beside",
})  # fmt: skip
"""First words of a text whose subject stands elsewhere; so does that of "The same"."""


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings, and texts below attributes and constants, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for each in node.body:
                if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                    value = each.value.value
                    if isinstance(value, str) and value.strip():
                        yield each.lineno, value


def lacks_subject(text: str) -> bool:
    first, second, *_ = [*text.split(), "", ""]
    return first in NO_SUBJECT or (first, second) == ("The", "same")


@pytest.mark.parametrize("package", sorted({path.relative_to(SOURCES).parts[0] for path in SOURCES.rglob("*.py")}))
def test_a_docstring_names_its_subject(package: str) -> None:
    files = [SOURCES / package] if package.endswith(".py") else sorted((SOURCES / package).rglob("*.py"))
    found = [
        f"{file.relative_to(SOURCES)}:{line}: {text.splitlines()[0]}"
        for file in files
        for line, text in texts(ast.parse(file.read_text(encoding="utf-8")))
        if lacks_subject(text)
    ]
    assert found == []
