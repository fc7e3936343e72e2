"""Writes docs/api.md, the API reference, and the tables of other pages: `python docs/make_api.py`.

griffe reads signatures and docstrings from the source files; bounds and defaults of fields come from the classes
themselves, so the page says what the constructors check.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import attrs
import griffe

import uma
from uma import errors
from uma.config import OF_MODEL, settings
from uma.constraints import hints_of
from uma.http.prometheus import exposition
from uma.llm.arguments import KEYWORDS
from uma.metrics import EngineMetrics
from uma.metrics.metrics import OF_SEVERAL
from uma.net.quota import USE

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
TABLES = {"settings": "## All settings", "observability": "## All metrics"}
"""Pages that end with a table made here, and the heading over it."""

CHAPTERS = {
    "The library": ("uma.llm", ("LLM", "LLMStream", "RequestOutput", "Completion")),
    "Under Trio": ("uma", ("open_engine", "connect", "Engine", "Client")),
    "The interface of engine and client": ("uma.types.source", ("Source", "EventStream")),
    "Requests": ("uma.types.request", ()),
    "Sampling": ("uma.types.sampling", ()),
    "Events": ("uma.types.events", ()),
    "Embeddings and rankings": ("uma.types.embedding", ()),
    "Decisions": ("uma.types.decision", ()),
    "Where a request's time went": ("uma.types.explained", ()),
    "What a server tells of itself": ("uma.types.server", ()),
}
"""For each chapter its module, and the names it has in their order; without names, all classes of the module."""

SOURCES = ("Engine", "Client")
"""Classes whose public methods are those of `Source`, which lists them once."""
WITH_ATTRIBUTES = ("EventStream", "LLMStream")
"""Classes without attrs that have public attributes."""

INTRODUCTION = """\
# API reference

For Python programmers who know [the first steps](python.md). Made from the docstrings by `python docs/make_api.py`.
Names in `uma` are imported from there (`from uma import LLM`), all others from the module that their chapter names.
"""

WIDTH = 120
OF_THE_USER = {
    "model": "`builtin` for `LLM`; for commands [as above](#ways-to-name-models)",
    "socket": "`$XDG_RUNTIME_DIR/uma/uma.sock`, else `uma-UID/uma.sock` in `/tmp` or `$TMPDIR`",
    "http_jobs": "`~/.local/share/uma/jobs`",
}
"""Defaults that differ by command, or by the user who asks."""
OF_SERVER = (
    *("active_sessions", "sessions_total", "sessions_refused_total", "log_lines_lost_total", "memory_budget_bytes"),
    *(f"{holder}_{name}_total" for holder in ("key", "user") for name in USE),
)
"""Figures of a server that are none of its engine's."""


def page() -> str:
    """The whole page."""
    chapters = (*CHAPTERS, "Settings", "Errors")
    links = (f"- [{each}](#{re.sub('[^a-z-]', '', each.lower().replace(' ', '-'))})" for each in chapters)
    parts = [INTRODUCTION, *links, ""]
    for title, (module, names) in CHAPTERS.items():
        chosen = [_definition(module, name) for name in names] or _classes(_read(module))
        parts += [f"## {title}\n", f"`{module}`\n", *(_entry(each) for each in chosen)]
    return "\n".join([*parts, _settings(), _errors()])


@cache
def _read(module: str) -> Any:
    """A module as griffe reads its file."""
    path = Path(inspect.getfile(import_module(module)))
    return griffe.visit(module, filepath=path, code=path.read_text(encoding="utf-8"))


def _definition(module: str, name: str) -> Any:
    """The definition of `module.name`, wherever the module has it from."""
    return _read(getattr(import_module(module), name).__module__).members[name]


def _classes(module: Any) -> list[Any]:
    return [
        each
        for each in module.members.values()
        if not each.is_alias and each.is_class and not each.name.startswith("_")
    ]


def _entry(entry: Any) -> str:
    if entry.is_function:
        return f"### {entry.name}\n\n" + _code(_signature(entry)) + _text(entry)
    cls = getattr(import_module(entry.module.path), entry.name)
    if entry.name in SOURCES:
        return f"### {entry.name}\n\n{_doc(entry)}\n"
    fields = _fields(cls, entry) if attrs.has(cls) else ""
    shown = [each for each in entry.members.values() if not each.is_alias and _is_shown(entry, each)]
    attributes = "".join(_bullet(f"{each.name}: {each.annotation}", _doc(each)) for each in shown if each.is_attribute)
    methods = "".join("\n" + _code(_signature(each)) + _text(each) for each in shown if each.is_function)
    start = entry.members.get("__init__")
    made = _code(_signature(start, entry.name)) if start is not None and entry.name == "LLM" else ""
    listed = "\n" + fields + attributes if fields or attributes else ""
    return f"### {entry.name}\n\n" + made + _text(entry) + listed + methods


def _is_shown(owner: Any, member: Any) -> bool:
    """Public members with a docstring, but for the fields of an attrs class: `_fields` has them."""
    is_field = member.is_attribute and "property" not in member.labels and owner.name not in WITH_ATTRIBUTES
    return not member.name.startswith("_") and member.docstring is not None and not is_field


def _signature(function: Any, name: str = "") -> str:
    signature: str = function.signature(name=name or function.name).removesuffix(" -> None")
    signature = re.sub(r"\(self(, )?", "(", signature)
    if "asynccontextmanager" in {each.callable_path.rpartition(".")[2] for each in function.decorators}:
        return "async with " + re.sub(r" -> AsyncIterator\[(.*)\]$", r" -> \1", signature)
    return ("async " if "async" in function.labels else "") + signature


def _code(signature: str) -> str:
    """A signature as a block of code; each parameter on a line of its own where it is too long."""
    if len(signature) > WIDTH:
        head, _, rest = signature.partition("(")
        inner, _, result = rest.rpartition(")")
        lines = "".join(f"    {each},\n" for each in _parameters(inner))
        signature = f"{head}(\n{lines}){result}"
    return f"```python\n{signature}\n```\n\n"


def _parameters(text: str) -> list[str]:
    """`a: X[b, c], d` at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


def _text(entry: Any) -> str:
    return _doc(entry) + "\n" if entry.docstring else ""


def _doc(entry: Any) -> str:
    return str(entry.docstring.value) if entry.docstring else ""


def _fields(cls: type, entry: Any) -> str:
    # Only classes that check themselves have bounds to tell; the annotations of the others are printed as written.
    hints = hints_of(cls) if "__attrs_post_init__" in entry.members else {}
    lines = []
    for field in attrs.fields(cls):
        member = entry.members[field.name]
        kind = _name(hints[field.name]) if hints else str(member.annotation)
        default = "" if field.default is attrs.NOTHING else f" = {_default(field)}"
        bounds = "; ".join(_bounds(hints.get(field.name)))
        said = " ".join(filter(None, [f"({bounds})" if bounds else "", _doc(member)]))
        lines.append(_bullet(f"{field.name}: {kind}{default}", said))
    return "".join(lines)


def _bullet(code: str, said: str) -> str:
    flat = " ".join(f"- `{code}` {said}".split())
    return textwrap.fill(flat, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


def _default(field: Any) -> str:
    default = field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]
    return f"{type(default).__name__}()" if attrs.has(type(default)) else repr(default)


def _name(hint: Any) -> str:
    """A type as it is written, without its constraints."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _name(arguments[0])
    if origin in (Union, types.UnionType):
        return " | ".join(map(_name, arguments))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if arguments:
        return f"{origin.__name__}[{', '.join(map(_name, arguments))}]"
    return {type(None): "None", ...: "..."}.get(hint, getattr(hint, "__name__", str(hint)))


def _bounds(hint: Any) -> Iterator[str]:
    """The constraints of a field itself; those of a list's items stay with the constructor's messages."""
    if get_origin(hint) is Annotated:
        yield from (str(each) for each in get_args(hint)[1:] if str(each) != "no NUL")
    elif get_origin(hint) in (Union, types.UnionType):
        for each in get_args(hint):
            yield from _bounds(each)


def _settings() -> str:
    told = _doc(_definition("uma.config", "RuntimeConfig"))
    return f"## Settings\n\n`uma`\n\n### RuntimeConfig\n\n{told}\n\n[All settings](settings.md#all-settings)\n"


def with_table(name: str) -> str:
    """The page docs/NAME.md, with the table that is made here at its end."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    head, heading, rest = text.partition(f"\n{TABLES[name]}\n")
    made = {"settings": settings_table, "observability": metrics_table}[name]()
    return head + heading + rest.partition("\n| ")[0].rstrip("\n") + "\n\n" + made


def settings_table() -> str:
    """All settings: default, what it is, and where else than for a server it can be set."""
    lines = ["| setting | default | what it does | also |", "| --- | --- | --- | --- |"]
    for each in settings().values():
        default = each.show(each.default)
        default = OF_THE_USER.get(each.name, f"`{default}`" if default else "")
        choices = ", ".join(f"`{word}`" for word in each.choices or ())
        said = "; ".join(filter(None, [each.help, choices or each.unit])).replace("|", r"\|").replace("*", r"\*")
        also = [word for word, names in (("LLM", KEYWORDS), ("Model", OF_MODEL)) if each.name in names]
        lines.append(f"| `{each.name}` | {default} | {said} | {', '.join(also)} |")
    return "\n".join(lines) + "\n"


def metrics_table() -> str:
    """What `/metrics` has under UMA's own names; each type and text is that of the exposition."""
    figures = EngineMetrics().snapshot() | dict.fromkeys((*OF_SERVER, *OF_SEVERAL), 0)
    gateway: Any = types.SimpleNamespace(
        began_sec=0.0,
        info=types.SimpleNamespace(model=types.SimpleNamespace(name="")),
        models=None,
        answers={200: 0},
        connections_total=0,
        connections_refused_total=0,
        keys=None,
        of_socket=dict,
    )
    told = re.findall(r"^# HELP (uma_\w+) (.*)\n# TYPE \w+ (\w+)$", exposition(figures, gateway, None), re.MULTILINE)
    rows = [f"| `{name}` | {kind} | {text} |" for name, text, kind in sorted(told)]
    return "\n".join(["| metric | type | meaning |", "| --- | --- | --- |", *rows]) + "\n"


def _errors() -> str:
    lines = [
        _bullet(each.name, f"(`{(getattr(errors, each.name, None) or getattr(uma, each.name)).code}`) {_doc(each)}")
        for each in (*_classes(_read("uma.errors")), _read("uma.jobs.journal")["JobChanged"])
    ]
    return "\n## Errors\n\n`uma.errors`; each class with its code on the wire.\n\n" + "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for name in TABLES:
        (ROOT / "docs" / f"{name}.md").write_text(with_table(name), encoding="utf-8")
    print(f"{PAGE}, {', '.join(TABLES)}: written")
