"""Sandbox for chat templates, and the program of the child process for templates that can take long.

Templates come in model files, so they are untrusted programs: they run in jinja2's sandbox, with the few names that
Hugging Face's templates expect and nothing else. This module is also a program, `main`. It imports next to nothing but
jinja2 and the standard library, so that the child starts in a fraction of the time that all of UMA would need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2 import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from uma import json_text
from uma.child import serve

MAX_STEPS = 1_000_000
"""Maximum steps of all `range` loops of one rendering together."""
MAX_REPEATED = 1_000_000
"""Maximum length of a string or list that `*` makes."""
MAX_POWER_BITS = 4096
"""Maximum size of an integer that `**` makes."""
MAX_TEXT_CHARS = 16_000_000
"""Maximum length of a rendered text."""
MAX_MEMORY_BYTES = 2**30
"""Address space of the child process, where the system can limit it."""
DATE_FORM = "%d %b %Y"
"""Format of `date_string`, as in Llama's templates. Without that variable the templates of Llama 3.1 and 3.3 tell the
model that it is the 26th of July 2024."""
DATETIME_FORM = "%b %d %Y"
"""Format of `datetime`, as in Firefunction's templates."""


class UnusableError(Exception):
    """A template is broken, fails, or refuses the messages. The message is the end of a sentence about it."""


class RefusedError(UnusableError):
    """A template called `raise_exception`: it expects messages in another form."""


def compiled(source: str) -> Template:
    """A compiled template. Raises `UnusableError`."""
    try:
        return environment().from_string(source)
    except TemplateSyntaxError as error:
        raise UnusableError(f"is broken: line {error.lineno}: {error.message}") from error
    except _FAULTS as error:
        raise UnusableError(f"is broken: {error}") from error


def rendered(template: Template, conversation: dict[str, Any], bos: str, eos: str) -> str:
    """Text of a conversation: its `messages`, its `tools` or None, the template's `switches`, and with `opens_answer`
    the beginning of the assistant's answer. A switch cannot replace one of these names.

    Raises `UnusableError`.
    """
    tools = conversation["tools"]
    try:
        text = _attempt(template, conversation, bos, eos, tools)
    except RefusedError:
        raise
    except UnusableError:
        if tools is not None:
            raise
        # Templates that are only for use with tools, such as Hermes', iterate over them without a check.
        text = _attempt(template, conversation, bos, eos, [])
    if len(text) > MAX_TEXT_CHARS:
        raise UnusableError(f"fails: it gives more than {MAX_TEXT_CHARS:,} characters")
    return text


def _attempt(
    template: Template, conversation: dict[str, Any], bos: str, eos: str, tools: list[dict[str, Any]] | None
) -> str:
    try:
        return template.render(
            {
                "documents": None,
                "functions": "",
                "date_string": _strftime_now(DATE_FORM),
                "datetime": _strftime_now(DATETIME_FORM),
                **conversation["switches"],
                "messages": conversation["messages"],
                "add_generation_prompt": conversation["opens_answer"],
                "bos_token": bos,
                "eos_token": eos,
                "tools": tools,
                "range": _bounded_range(),
            }
        )
    except _RaisedError as error:
        raise RefusedError(f"refuses them: {error}") from None
    except _FAULTS as error:
        raise UnusableError(f"fails{_line_of(error)}: {error or type(error).__name__}") from error


_FAULTS = (JinjaError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""All exceptions that a program in the sandbox can raise."""


class _RaisedError(JinjaError):
    """A template called `raise_exception`, as Jinja passes it on."""


def _line_of(error: BaseException) -> str:
    """` in line N` of the innermost template code that was running; empty where none was."""
    line, frame = 0, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return f" in line {line}" if line else ""


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox in which a short expression also cannot make a huge value. Lists are mutable, as Kimi K2's templates need
    them: a template gets its own copies.
    """

    intercepted_binops = frozenset(("*", "**"))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template can use an attribute of a value."""
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse operations with a huge result."""
        if operator == "**" and isinstance(left, int) and left.bit_length() * abs(right) > MAX_POWER_BITS:
            raise OverflowError(f"the power has more than {MAX_POWER_BITS:,} bits")
        if operator == "*":
            for thing, times in ((left, right), (right, left)):
                if isinstance(thing, str | bytes | list | tuple) and len(thing) * times > MAX_REPEATED:
                    raise OverflowError(f"repeating gives more than {MAX_REPEATED:,} items")
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's words for training; here it is only its
    content.
    """

    tags = {"generation"}  # noqa: RUF012  (as its base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> _Environment:
    """Sandbox as Hugging Face's templates expect it: their whitespace rules, loop controls, and three functions."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    environment.filters["tojson"] = _tojson
    environment.filters["safe"] = str  # no `Markup`: nothing is escaped here, and text added to a `Markup` would be
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]
    return environment


def _bounded_range() -> Callable[..., range]:
    """`range` for one rendering, with at most `MAX_STEPS` steps in total, so that nested loops also end."""
    left = MAX_STEPS

    def bounded(*bounds: int) -> range:
        nonlocal left
        steps = range(*bounds)
        left -= len(steps)
        if left < 0:
            raise OverflowError(f"its loops have more than {MAX_STEPS:,} steps")
        return steps

    return bounded


def _raise_exception(message: str) -> NoReturn:
    raise _RaisedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja2's own filter: that one escapes for HTML, which models were not trained on.
    # Filters such as `map` return iterators, which templates treat as lists.
    value = list(value) if isinstance(value, Iterator) else value
    return json_text.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def main() -> None:
    """Take a template, then render conversations until the parent closes the connection."""
    serve(_renderer, MAX_MEMORY_BYTES)


def _renderer(setup: list[str]) -> Callable[[dict[str, Any]], dict[str, str]]:
    source, bos, eos = setup
    template: Template | None = None

    def render(conversation: dict[str, Any]) -> dict[str, str]:
        nonlocal template
        try:
            template = template or compiled(source)
            return {"text": rendered(template, conversation, bos, eos)}
        except RefusedError as error:
            return {"refusal": str(error)}
        except UnusableError as error:
            return {"problem": str(error)}

    return render


if __name__ == "__main__":
    main()
