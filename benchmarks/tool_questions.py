"""Does a small real model call the right tool? 36 questions at temperature 0, UMA beside llama-server.

    python -m benchmarks.build_peers
    python -m benchmarks.reference          # fetches the model
    python -m benchmarks.tool_questions     # some ten minutes on 2 cores

Each question is asked with `tool_choice: auto` and with `required`, over OpenAI's chat completions, and with
`parallel_tool_calls` where it is about several calls. An answer is right where its calls are those expected, in any
order, with arguments that are expected.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import attrs
import jsonschema
import trio
from rich.console import Console
from rich.table import Table

from benchmarks.reference import model_path
from benchmarks.repeats import PEER, UMA, serving
from benchmarks.targets.base import StartError
from benchmarks.targets.llama_server import is_built

CHOICES = ("auto", "required")
_TEXT, _NUMBER, _COUNT = {"type": "string"}, {"type": "number"}, {"type": "integer"}


def _tool(name: str, about: str, properties: dict[str, Any], optional: Sequence[str] = ()) -> dict[str, Any]:
    required = [key for key in properties if key not in optional]
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def _words(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(words)}


WEATHER = _tool(
    "get_weather", "The weather in a city now", {"city": _TEXT, "unit": _words("celsius", "fahrenheit")}, ["unit"]
)
ADD = _tool("add", "Add two numbers", {"a": _NUMBER, "b": _NUMBER})
MULTIPLY = _tool("multiply", "Multiply two numbers", {"a": _NUMBER, "b": _NUMBER})
ROOT = _tool("square_root", "The square root of a number", {"x": _NUMBER})
READ = _tool("read_file", "Read a file", {"path": _TEXT})
WRITE = _tool("write_file", "Write text to a file", {"path": _TEXT, "content": _TEXT})
LIST = _tool("list_folder", "List the files in a folder", {"path": _TEXT})
DELETE = _tool("delete_file", "Delete a file", {"path": _TEXT})
_WHEN = {
    "type": "object",
    "properties": {"date": _TEXT, "time": _TEXT},
    "required": ["date", "time"],
    "additionalProperties": False,
}
EVENT = _tool("create_event", "Put an event into the calendar", {"title": _TEXT, "when": _WHEN})
_PERSON = {
    "type": "object",
    "properties": {"name": _TEXT, "age": _COUNT},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONTACT = _tool("add_contact", "Add a person to the contacts", {"person": _PERSON})
ORDER = _tool(
    "order",
    "Order things from the shop",
    {
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": _TEXT, "count": _COUNT},
                "required": ["name", "count"],
                "additionalProperties": False,
            },
        }
    },
)
LIGHT = _tool(
    "set_light",
    "Turn a light on or off",
    {"room": _words("kitchen", "bedroom", "bathroom"), "state": _words("on", "off")},
)
MODE = _tool("set_mode", "Set the mode of the heating", {"mode": _words("eco", "comfort", "away")})
CALCULATOR, FILES, HOUSE = (ADD, MULTIPLY, ROOT), (READ, WRITE, LIST, DELETE), (LIGHT, MODE)
NESTED = (EVENT, CONTACT, ORDER)
_DEVICES = (
    "lamp",
    "fan",
    "door",
    "window",
    "oven",
    "heater",
    "alarm",
    "camera",
    "printer",
    "radio",
    "garage",
    "sprinkler",
)
FORTY = (
    *(
        _tool(f"{verb}_{device}", f"{verb.capitalize()} the {device}", {"room": _TEXT})
        for device in _DEVICES
        for verb in ("start", "stop", "inspect")
    ),
    WEATHER,
    ADD,
    READ,
    MODE,
)


@attrs.frozen
class Question:
    """One question, the tools that go with it, and the calls expected: each a name and its arguments, where a set has
    every value that will do and text is compared without regard to capitals."""

    kind: str
    text: str
    tools: Sequence[dict[str, Any]]
    calls: Sequence[tuple[str, dict[str, Any]]]


def _one(kind: str, text: str, tools: Sequence[dict[str, Any]], name: str, **arguments: Any) -> Question:
    return Question(kind, text, tools, [(name, arguments)])


QUESTIONS = (
    _one("weather", "What is the weather in Paris?", [WEATHER], "get_weather", city="Paris"),
    _one("weather", "Is it raining in Tokyo right now?", [WEATHER], "get_weather", city="Tokyo"),
    _one("weather", "How warm is it in Oslo, in celsius?", [WEATHER], "get_weather", city="Oslo", unit="celsius"),
    _one(
        "weather",
        "Give me the temperature in Boston in fahrenheit.",
        [WEATHER],
        "get_weather",
        city="Boston",
        unit="fahrenheit",
    ),
    _one("weather", "Do I need an umbrella in London?", [WEATHER], "get_weather", city="London"),
    _one("weather", "Tell me the weather in Madrid.", [WEATHER], "get_weather", city="Madrid"),
    _one("calculator", "What is 17 plus 25?", CALCULATOR, "add", a=17, b=25),
    _one("calculator", "Multiply 12 by 34.", CALCULATOR, "multiply", a=12, b=34),
    _one("calculator", "What is the square root of 144?", CALCULATOR, "square_root", x=144),
    _one("calculator", "Add 3.5 and 4.25.", CALCULATOR, "add", a=3.5, b=4.25),
    _one("calculator", "How much is 99 times 7?", CALCULATOR, "multiply", a=99, b=7),
    _one("calculator", "Compute the square root of 2.", CALCULATOR, "square_root", x=2),
    _one("files", "Read the file notes.txt.", FILES, "read_file", path="notes.txt"),
    _one("files", "What files are in the folder /tmp?", FILES, "list_folder", path="/tmp"),
    _one("files", "Delete the file old.log.", FILES, "delete_file", path="old.log"),
    _one(
        "files", "Write the text hello to the file hello.txt.", FILES, "write_file", path="hello.txt", content="hello"
    ),
    _one("files", "Show me what is in config.json.", FILES, "read_file", path="config.json"),
    _one("files", "List the folder /home/anna.", FILES, "list_folder", path="/home/anna"),
    _one(
        "nested",
        "Create an event called Lunch on 2026-05-04 at 12:30.",
        NESTED,
        "create_event",
        title="Lunch",
        when={"date": "2026-05-04", "time": "12:30"},
    ),
    _one(
        "nested",
        "Put a meeting titled Review into my calendar for 2026-06-01 at 09:00.",
        NESTED,
        "create_event",
        title={"Review"},
        when={"date": "2026-06-01", "time": {"09:00", "9:00"}},
    ),
    _one(
        "nested",
        "Add Anna, who is 31 years old, to my contacts.",
        NESTED,
        "add_contact",
        person={"name": "Anna", "age": 31},
    ),
    _one("nested", "Order 3 apples.", NESTED, "order", items=[{"name": {"apple", "apples"}, "count": 3}]),
    _one(
        "nested",
        "Order 2 pens and 5 notebooks.",
        NESTED,
        "order",
        items=[{"name": {"pen", "pens"}, "count": 2}, {"name": {"notebook", "notebooks"}, "count": 5}],
    ),
    _one("enums", "Turn on the light in the kitchen.", HOUSE, "set_light", room="kitchen", state="on"),
    _one("enums", "Switch the bedroom light off.", HOUSE, "set_light", room="bedroom", state="off"),
    _one("enums", "Set the heating to eco.", HOUSE, "set_mode", mode="eco"),
    _one("enums", "Put the heating into comfort mode.", HOUSE, "set_mode", mode="comfort"),
    _one("enums", "Turn off the light in the bathroom.", HOUSE, "set_light", room="bathroom", state="off"),
    _one("enums", "We are leaving: set the heating to away.", HOUSE, "set_mode", mode="away"),
    Question(
        "several",
        "What is the weather in Paris and in Rome?",
        [WEATHER],
        [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})],
    ),
    Question(
        "several",
        "Read the files a.txt and b.txt.",
        FILES,
        [("read_file", {"path": "a.txt"}), ("read_file", {"path": "b.txt"})],
    ),
    Question(
        "several",
        "Add 1 and 2, and multiply 3 by 4.",
        CALCULATOR,
        [("add", {"a": 1, "b": 2}), ("multiply", {"a": 3, "b": 4})],
    ),
    _one("40 tools", "Start the fan in the bedroom.", FORTY, "start_fan", room="bedroom"),
    _one("40 tools", "Stop the oven in the kitchen.", FORTY, "stop_oven", room="kitchen"),
    _one("40 tools", "What is the weather in Berlin?", FORTY, "get_weather", city="Berlin"),
    _one("40 tools", "Set the heating to eco.", FORTY, "set_mode", mode="eco"),
)


def fits(given: Any, expected: Any) -> bool:
    """Whether a value is one of those expected."""
    if isinstance(expected, set):
        return any(fits(given, word) for word in expected)
    if isinstance(expected, str):
        return isinstance(given, str) and given.strip().lower() == expected.lower()
    if isinstance(expected, dict):
        return (
            isinstance(given, dict)
            and expected.keys() == given.keys()
            and all(fits(given[key], expected[key]) for key in given)
        )
    if isinstance(expected, list):
        return isinstance(given, list) and len(given) == len(expected) and all(map(fits, given, expected))
    return bool(given == expected)


def _is_right(question: Question, calls: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    left = list(question.calls)
    for name, arguments in calls:
        # What the question leaves open is the model's choice.
        found = next(
            (
                at
                for at, (wanted, expected) in enumerate(left)
                if name == wanted
                and expected.keys() <= arguments.keys()
                and all(fits(arguments[key], value) for key, value in expected.items())
            ),
            None,
        )
        if found is None:
            return False
        del left[found]
    return not left


def _ask(port: int, question: Question, choice: str) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": question.text}],
        "tools": list(question.tools),
        "tool_choice": choice,
        "parallel_tool_calls": len(question.calls) > 1,
        "temperature": 0,
        "max_tokens": 160,
    }
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=3_600) as response:
        choice_given: dict[str, Any] = json.load(response)["choices"][0]
    message: dict[str, Any] = choice_given["message"]
    if choice_given["finish_reason"] == "length" and message.get("tool_calls"):
        message["tool_calls"].pop()  # it is cut off
    return message


@attrs.frozen
class Outcome:
    """What came of one question."""

    is_right: bool
    breaks_schema: bool
    message: dict[str, Any]


def _outcome(question: Question, message: dict[str, Any]) -> Outcome:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in question.tools}
    calls, breaks = [], False
    for call in message.get("tool_calls") or ():
        name = call["function"]["name"]
        try:
            arguments = json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, schemas[name])
        except (ValueError, KeyError, jsonschema.ValidationError):
            breaks = True
            continue
        calls.append((name, arguments))
    return Outcome(not breaks and bool(calls) and _is_right(question, calls), breaks, message)


async def measure(
    server: str, model: Path, asked: Sequence[Question], choices: Sequence[str]
) -> dict[str, list[Outcome]]:
    """The outcome of each question, by `tool_choice`."""
    found: dict[str, list[Outcome]] = {choice: [] for choice in choices}
    async with serving(server, model) as port:
        for choice in choices:
            for question in asked:
                message = await trio.to_thread.run_sync(_ask, port, question, choice)
                found[choice].append(outcome := _outcome(question, message))
                said = message.get("tool_calls") or message.get("content")
                print(
                    f"{server} {choice} {'right' if outcome.is_right else 'WRONG'} {question.text!r}: {said}",
                    file=sys.stderr,
                    flush=True,
                )
    return found


def _rows(asked: Sequence[Question], results: dict[str, dict[str, list[Outcome]]]) -> Iterator[tuple[str, ...]]:
    every = [found[choice] for found in results.values() for choice in found]
    kinds = Counter(question.kind for question in asked)
    for kind, count in kinds.items():
        yield (
            f"{kind} ({count})",
            *(
                str(sum(one.is_right for one, question in zip(outcomes, asked, strict=True) if question.kind == kind))
                for outcomes in every
            ),
        )
    yield f"all ({len(asked)})", *(str(sum(one.is_right for one in outcomes)) for outcomes in every)
    yield "calls that break their schema", *(str(sum(one.breaks_schema for one in outcomes)) for outcomes in every)


def main() -> int:
    """Measure, and print the table. Exit code 2: the model or the peer is missing, or a server failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tool_questions", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--only", choices=(UMA, PEER), help="one server alone")
    parser.add_argument("--choice", choices=CHOICES, help="one tool_choice alone")
    parser.add_argument(
        "--kind", choices=sorted({question.kind for question in QUESTIONS}), help="these questions alone"
    )
    args = parser.parse_args()
    model = model_path("qwen2.5-coder")
    servers = [args.only] if args.only else [UMA, PEER]
    if not model.exists() or (PEER in servers and not is_built()):
        print(
            "tool_questions: run `python -m benchmarks.reference` and `python -m benchmarks.build_peers`",
            file=sys.stderr,
        )
        return 2
    choices = [args.choice] if args.choice else CHOICES
    asked = [question for question in QUESTIONS if args.kind in (None, question.kind)]
    try:
        results = {server: trio.run(measure, server, model, asked, choices) for server in servers}
    except (StartError, URLError, TimeoutError) as error:
        print(f"tool_questions: {error}", file=sys.stderr)
        return 2
    shown = Table(title="Right answers to questions with tools, Qwen2.5-Coder 0.5B, temperature 0")
    shown.add_column("questions")
    for server, found in results.items():
        for choice in found:
            shown.add_column(f"{server}, {choice}", justify="right")
    for row in _rows(asked, results):
        shown.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
