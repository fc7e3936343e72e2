"""Depth of a grammar: the length of chains in which its rules or schemas refer to each other.

llguidance follows these by recursion, so too deep a grammar crashes the process: schemas did with a depth of some 900.
It also expands references to rules, which takes time cubic in the depth. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import unquote

T = TypeVar("T", bound=Hashable)

MAX_SCHEMAS = 500
"""Maximum objects of a JSON Schema in a chain of references; all objects of a cycle count."""
MAX_EXPANDED = 500_000
"""Maximum of a grammar's number of rules times its depth, so the depth is at most 707. A grammar at this limit takes
some 2 s to compile."""
_RULE = re.compile(r"^[ \t]*[?!]*([A-Za-z_][\w-]*)[ \t]*(?:\[[^\n]*?\][ \t]*|::[^\n:]*)?:", re.MULTILINE)
_NO_NAMES = re.compile(r'(?://|#)[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/[a-z]*|%json\s*', re.DOTALL)
"""Parts of Lark's notation that do not refer to rules, and the keyword before JSON."""
_GBNF_RULE = re.compile(r"([\w-]+)\s*::=")
_GBNF_NO_NAMES = re.compile(r'#[^\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', re.DOTALL)
_NAME = re.compile(r"[\w-]+")


def too_deep(schema: Any) -> str:
    """Why a JSON Schema cannot be compiled; empty where it can."""
    leads, weights = _leads(schema)
    depth = longest_chain(leads, weights)
    if depth <= MAX_SCHEMAS:
        return ""
    return f"{depth:,} of its schemas lead from one to the next, over {MAX_SCHEMAS:,}; give one that is less deep"


def too_deep_rules(lark: str) -> str:
    """Why a grammar in Lark's notation cannot be compiled; empty where it can."""
    bare, schemas = _bare(lark)
    for schema in schemas:
        if reason := too_deep(schema):
            return f"%json: {reason}"
    return _too_deep(bare, _RULE)


def too_deep_gbnf(gbnf: str) -> str:
    """Why a grammar in llama.cpp's notation cannot be compiled; empty where it can. Translating it takes time quadratic
    in its depth.
    """
    return _too_deep(_GBNF_NO_NAMES.sub(" ", gbnf), _GBNF_RULE)


def _too_deep(bare: str, rule: re.Pattern[str]) -> str:
    places = list(rule.finditer(bare))
    ends = [*(place.start() for place in places[1:]), len(bare)]
    bodies = {place[1]: bare[place.end(1) : end] for place, end in zip(places, ends, strict=False)}
    leads = {name: list({*_NAME.findall(body)} & bodies.keys()) for name, body in bodies.items()}
    depth = longest_chain(leads, dict.fromkeys(leads, 1))
    if depth * len(leads) <= MAX_EXPANDED:
        return ""
    return f"{depth:,} of its {len(leads):,} rules lead from one to the next; give fewer, or less deep ones"


def _bare(lark: str) -> tuple[str, list[Any]]:
    """A grammar without comments, strings, regular expressions and the JSON behind `%json`; and that JSON."""
    bare, schemas, at = list[str](), list[Any](), 0
    while (found := _NO_NAMES.search(lark, at)) is not None:
        bare.append(lark[at : found.start()])
        at = found.end()
        if found[0].startswith("%json"):
            # Invalid JSON is left for llguidance to refuse.
            with suppress(ValueError, RecursionError):
                schema, at = json.JSONDecoder().raw_decode(lark, at)
                schemas.append(schema)
    return " ".join([*bare, lark[at:]]), schemas


def longest_chain(leads: Mapping[T, Sequence[T]], weights: Mapping[T, int]) -> int:
    """Largest total weight of a chain of references, in which all nodes of a cycle count (Tarjan 1972)."""
    seen: dict[T, int] = {}
    low: dict[T, int] = {}
    longest: dict[T, int] = {}
    waiting: list[T] = []
    path: list[tuple[T, Iterator[T]]] = []

    def enter(node: T) -> None:
        seen[node] = low[node] = len(seen)
        waiting.append(node)
        path.append((node, iter(leads[node])))

    for root in leads:
        if root not in seen:
            enter(root)
        while path:
            node, rest = path[-1]
            if (other := next((other for other in rest if other not in longest), None)) is not None:
                if other in seen:
                    low[node] = min(low[node], seen[other])
                else:
                    enter(other)
                continue
            path.pop()
            if path:
                low[path[-1][0]] = min(low[path[-1][0]], low[node])
            if low[node] == seen[node]:
                circle = [waiting.pop()]
                while circle[-1] != node:
                    circle.append(waiting.pop())
                below = max((longest.get(other, 0) for member in circle for other in leads[member]), default=0)
                longest |= dict.fromkeys(circle, below + sum(weights[member] for member in circle))
    return max(longest.values(), default=0)


def _leads(root: Any) -> tuple[dict[int, list[int]], dict[int, int]]:
    """References of each object and list of a schema, by `id`: its parts, and the targets of its `$ref`. A `$ref` that
    is not a pointer from the root is assumed to refer to the root.
    """
    leads: dict[int, list[int]] = {}
    weights: dict[int, int] = {}
    waiting, has_bases = [root], False
    pointers: list[tuple[int, str]] = []
    while waiting:
        node = waiting.pop()
        if id(node) in leads or not isinstance(node, dict | list | tuple):
            continue
        parts = list(node.values() if isinstance(node, dict) else node)
        leads[id(node)] = [id(part) for part in parts if isinstance(part, dict | list | tuple)]
        weights[id(node)] = int(isinstance(node, dict))
        waiting += parts
        if isinstance(node, dict):
            has_bases = has_bases or (
                node is not root and any(isinstance(node.get(word), str) for word in ("$id", "id"))
            )
            pointers += ((id(node), node[word]) for word in ("$ref", "$dynamicRef") if isinstance(node.get(word), str))
    for node_id, pointer in pointers:
        target = root if has_bases else _found(root, pointer)
        if id(target) in leads:
            leads[node_id].append(id(target))
    return leads, weights


def _found(root: Any, pointer: str) -> Any:
    """Target of a `$ref`; the root where it is not a pointer."""
    path, node = pointer.partition("#")[2], root
    if path and not path.startswith("/"):
        return root
    for spelled in unquote(path).split("/")[1:]:
        step = spelled.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and step in node:
            node = node[step]
        elif isinstance(node, list | tuple) and step.isdecimal() and int(step) < len(node):
            node = node[int(step)]
        else:
            return root
    return node
