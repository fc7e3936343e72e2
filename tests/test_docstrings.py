"""A docstring names its subject: it can be read alone, where an editor or a search shows it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
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


def sentence(text: str) -> str:
    return re.split(r"(?<=[.;])\s", " ".join(text.split()), maxsplit=1)[0]


def tells_of_two(text: str) -> bool:
    """Whether its first sentence counts what it is of, or names two constants: each has a text of its own."""
    ordinals = {
        word.lower() for word in re.findall(r"\bthe (first|second|third|former|latter)\b", sentence(text), re.I)
    }
    return len(ordinals) > 1 or len(set(re.findall(r"`_?[A-Z][A-Z0-9]*_[A-Z0-9_]+`", sentence(text)))) > 1


def pairs(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts below several constants that are assigned at once, with their lines."""
    for node in ast.walk(tree):
        body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
        for above, below in pairwise(body):
            value = below.value if isinstance(below, ast.Expr) else None
            is_pair = isinstance(above, ast.Assign) and isinstance(above.targets[0], ast.Tuple)
            if is_pair and isinstance(value, ast.Constant):
                yield below.lineno, str(value.value)


def lacks_subject(text: str) -> bool:
    first, second, *_ = [*text.split(), "", ""]
    return first in NO_SUBJECT or (first, second) == ("The", "same")


@pytest.mark.parametrize("package", sorted({path.relative_to(SOURCES).parts[0] for path in SOURCES.rglob("*.py")}))
def test_a_docstring_names_its_one_subject(package: str) -> None:
    files = [SOURCES / package] if package.endswith(".py") else sorted((SOURCES / package).rglob("*.py"))
    found = list[str]()
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        wrong = [place for place in texts(tree) if lacks_subject(place[1]) or tells_of_two(place[1])]
        # Several constants can share a text that holds for all of them, and none that says "this, and that".
        wrong += [place for place in pairs(tree) if re.search(r"\band\b", sentence(place[1]))]
        found += [f"{file.relative_to(SOURCES)}:{line}: {text.splitlines()[0]}" for line, text in wrong]
    assert found == []
