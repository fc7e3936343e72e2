"""One meaning a word: no two files have a class of one name, and a loop's variable is called by what it is."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import uma

SOURCES = Path(uma.__file__).parent
LOOSE = ("http",)
"""Packages in which a variable can still be called `each`."""


def test_no_two_files_have_a_class_of_one_name() -> None:
    owners = defaultdict[str, list[str]](list)
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                owners[node.name].append(str(path.relative_to(SOURCES)))
    assert {name: paths for name, paths in owners.items() if len(paths) > 1} == {}


def test_a_variable_says_what_it_is() -> None:
    found = [
        f"{path.relative_to(SOURCES)}:{node.lineno}"
        for path in SOURCES.rglob("*.py")
        if path.relative_to(SOURCES).parts[0] not in LOOSE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id == "each" and isinstance(node.ctx, ast.Store)
    ]
    assert found == []
