"""The command line's grammar: every command, every option, and what a typo is answered with.

Importing this module and building the parser stays cheap, so that `uma --help` and a mistyped option answer at once.
The work of a command is in the module of its name, imported only when it is called.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import attrs

from uma.cli import say
from uma.cli.agents import AGENTS
from uma.cli.answer_options import add_answer
from uma.cli.options import (
    DYNAMO_PLANES,
    GATEWAY,
    SAMPLING,
    add_flag,
    add_option,
    add_sampling,
    add_settings,
    plane_variable,
)
from uma.cli.sanitize import sanitize
from uma.cli.table import wrapped
from uma.config import HTTP, LOG, SERVER_ONLY, settings
from uma.types import MAX_PAUSE_SEC, MAX_TRACE_SEC, DecisionQuestion, Option
from uma.types.decision import MAX_LEVELS, MAX_OPTIONS, QuestionKind
from uma.version import __version__
from uma.wrong import nearest

USAGE_ERROR = 2

EPILOG = """\
exit codes:
  0    done
  1    it failed; one line on standard error says why
  2    the command line, a setting, the model or the prompt cannot be used
  130  stopped by Ctrl-C
  141  standard output was closed by its reader (`| head -1`)
  143  stopped by SIGTERM, 129: its terminal went away; of uma run and uma gateway that is the orderly end: 0

environment:
  UMA_…       a value for any setting, such as UMA_MODEL or UMA_N_CTX
  UMA_CONFIG  TOML file of settings, where --config is not given
  UMA_MODELS  folder of GGUF files, loaded by name: uma run NAME
  HF_…        HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE: as huggingface_hub has them
  UMA_DEBUG   1: every log line, and tracebacks of errors
"""


@attrs.frozen
class Command:
    """A command of `uma`: its name, the line that `uma --help` says of it, and what gives its parser the options."""

    name: str
    summary: str
    describe: Callable[[argparse.ArgumentParser], None]
    description: str
    arguments: str = ""


GROUPS = {
    "models": ("pull", "models", "rm"),
    "ask a model": ("chat", "generate", "batch", "embed", "decide", "launch"),
    "run a server": (
        *("run", "stop", "service", "key", "config"),
        *("load", "unload", "pin", "unpin", "pause", "resume", "gateway"),
    ),
    "watch a server": ("ps", "top", "doctor", "explain", "history", "trace"),
    "for other software": ("schema", "contract", "worker", "engine-zmq"),
}
"""The commands as `uma --help` lists them, and docs/commands.md."""

COMMON = frozenset(
    {"model", "models", "memory", "socket", "n_ctx", "threads", "n_gpu_layers", "max_sequences", "http", "http_keys"}
    | {"max_tokens", "temperature", "seed", "stop"}
)
"""Settings and sampling parameters that `--help` tells of, where a command has them; `--help-all` tells of all."""

COLUMN = "the texts are this column of CSV, whose first line has the names"

OTHERS = {
    **dict.fromkeys(("serve", "server", "start"), "run"),
    **dict.fromkeys(("ls", "list", "show", "search"), "models"),
    **dict.fromkeys(("status", "info", "processes"), "ps"),
    **dict.fromkeys(("download", "get", "install"), "pull"),
    **dict.fromkeys(("remove", "delete"), "rm"),
    **dict.fromkeys(("kill", "shutdown"), "stop"),
    **dict.fromkeys(("complete", "ask", "prompt"), "generate"),
    "version": "--version",
}
"""Commands of other tools, and the equivalent here."""

MIN_RARE = 3
"""Fewer rare settings than these are in `--help`, too."""

EXAMPLES = {
    "run": ("uma run builtin", "uma run --http --memory 8000    all models here, over HTTP too"),
    "chat": ("uma chat builtin", 'uma chat --system "Answer in one sentence." --temperature 0.2'),
    "generate": (
        'uma generate "Tell me a story about a fox"',
        'uma generate "Summarise this:" < notes.txt',
        'uma generate --choice yes --choice no "Is a whale a fish?"',
    ),
}
"""Lines at the foot of a command's help."""


class Formatter(argparse.HelpFormatter):
    """Fills paragraphs to the terminal's width, and wraps what is said in a table's rows within its column."""

    left_out: frozenset[argparse.Action] = frozenset()
    """Options that are not told of."""
    brief: frozenset[argparse.Action] = frozenset()
    """Options, those of named groups, of which only what they are is told, and the default of a setting."""
    unsaid: frozenset[str | None] = frozenset()
    """Paragraphs that are left out."""

    def add_argument(self, action: argparse.Action) -> None:
        """Add an option as argparse does, unless it is left out."""
        if action not in self.left_out:
            super().add_argument(action)

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        if action not in self.brief:
            return text
        what, default = re.split(r" \(|[;,] ", text, maxsplit=1)[0], text.rpartition("default: ")[2].rstrip(")")
        # Of `0: this machine's cores` the meaning is told, not the number.
        meaning = re.search(rf"[;,] {re.escape(default)}: ([^;,(]+)", text)
        default = meaning[1].strip() if meaning else default.partition(";")[0]
        unit = re.search(r" \((MB|seconds|minutes|ms|bytes);", text)
        what += f" in {unit[1]}" if unit else ""
        is_telling = action.dest.startswith(("setting_", "sampling_")) and default not in ("", "none")
        return f"{what} (default: {default})" if is_telling else what

    def add_text(self, text: str | None) -> None:
        """Add a paragraph as argparse does, unless it is left out."""
        if text not in self.unsaid:
            super().add_text(text)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(
            "\n".join(line for row in paragraph.split("\n") for line in self._in_columns(row, width))
            if "\n  " in paragraph
            else super(Formatter, self)._fill_text(paragraph, width, indent)
            for paragraph in paragraphs
        )

    @staticmethod
    def _in_columns(row: str, width: int) -> list[str]:
        name = re.match(r"  \S+ +", row)
        return wrapped(row, width, " " * (name.end() if name else 0))


class CommandParser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations and answers a typo with the nearest option that exists."""

    tells_all = False
    """Whether its help has every option."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", Formatter)
        super().__init__(allow_abbrev=False, **kwargs)
        self.color = False  # from Python 3.14 on: `sanitize` would show the escape sequences instead of colours
        self.siblings: dict[str, CommandParser] = {}
        """The commands' parsers by name, this one's included: to tell which command has an option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, but an unknown option is an error here, where the options that exist are known."""
        args, behind = self._split(args)
        found, extra = super().parse_known_args(args, namespace)
        if behind is not None:
            found.arguments = behind
        unknown = next((word for word in extra if word.startswith("-") and word != "-"), None)
        if unknown is not None:
            passes = f"; what is passed on stands behind --: … -- {unknown}" if self._passes_on else ""
            self.error(f"unknown option {self._advice(unknown.partition('=')[0])}{passes}")
        if extra:
            self.error(f"unexpected argument {extra[0]!r}")
        return found, extra

    def _split(self, args: Any) -> tuple[Any, list[str] | None]:
        """What stands before a `--`, and what behind it, for a command that passes its `arguments` on."""
        if not self._passes_on or args is None or "--" not in args:
            return args, None
        at = args.index("--")
        return args[:at], args[at + 1 :]

    @property
    def _passes_on(self) -> bool:
        return self.get_default("arguments") is not None

    def options(self) -> tuple[str, ...]:
        """Every option's spelling, `--use-mlock` as well as `--no-use-mlock`."""
        return tuple(word for action in self._actions for word in action.option_strings)

    def rare(self) -> frozenset[argparse.Action]:
        """Settings and sampling parameters that `--help` leaves to `--help-all`."""
        derived = (action for group in self._derived() for action in group._group_actions)
        rare = [action for action in derived if re.sub(r"^(setting|sampling)_", "", action.dest) not in COMMON]
        return frozenset(rare if len(rare) >= MIN_RARE else ())

    def _derived(self) -> list[argparse._ArgumentGroup]:
        """The groups of settings and sampling parameters."""
        return [group for group in self._action_groups if group.title in ("settings", "sampling")]

    def _get_formatter(self) -> argparse.HelpFormatter:
        formatter = super()._get_formatter()
        if isinstance(formatter, Formatter) and not self.tells_all and (rare := self.rare()):
            groups = self._derived()
            formatter.left_out, formatter.unsaid = rare, frozenset(group.description for group in groups)
            brief = (group for group in self._action_groups if group not in (self._positionals, self._optionals))
            formatter.brief = frozenset(action for group in brief for action in group._group_actions)
        return formatter

    def _advice(self, unknown: str) -> str:
        owners = [name for name, parser in self.siblings.items() if unknown in parser.options()]
        if owners:
            return f"{unknown} for {self.prog}; it is an option of uma {', '.join(owners)}"
        long = [option for option in self.options() if option.startswith("--")]
        return f"{unknown}{nearest(unknown, long, prefix='--')}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check as argparse does, but a word that is not among the choices is answered with the nearest that is."""
        choices = list(action.choices or ())
        if choices and value not in choices:
            # Commands are more than a line has; the next one names `uma --help`.
            others = "" if choices == [*self.siblings] else f"; there are {', '.join(choices)}"
            own = OTHERS.get(value) if choices == [*self.siblings] else None
            near = f"; did you mean {own}?" if own else nearest(str(value), choices) or others
            if action.option_strings:
                raise argparse.ArgumentError(action, f"no such choice: {value}{near}")
            what = "agent" if action.dest == "agent" else "command"
            raise argparse.ArgumentError(None, f"no such {what}: {value}{near}")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print as argparse does, without what a terminal would obey: help shows paths that the environment gives."""
        super()._print_message(sanitize(message), file)

    def error(self, message: str) -> NoReturn:
        """One line that says what was wrong, one that says where to look, and exit code 2."""
        # An option is named by its long form alone.
        message = (
            re.sub(r"^(argument --[\w-]+)/-\w:", r"\1:", message)
            .removeprefix("argument ")
            .replace("expected one argument", "expected a value")
        )
        for action in self._positionals._group_actions:
            if action.choices and message == f"the following arguments are required: {action.metavar}":
                message = f"{action.metavar}: missing; name one of {', '.join(map(str, action.choices))}"
        say.complain(message)
        usage = f" ({self.usage})" if self.usage else ""
        say.plain(f"Try `{self.prog} --help`{usage}.")
        self.exit(USAGE_ERROR)


class _HelpAll(argparse.Action):
    """`--help`, with every option."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        if isinstance(parser, CommandParser):
            parser.tells_all = True
        parser.print_help()
        parser.exit()


def _add_socket(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, leave_out=frozenset(settings()) - {"socket"})


def _add_url(parser: argparse.ArgumentParser, default: str) -> None:
    add_option(parser, "--url", "URL", "a server's HTTP, such as http://127.0.0.1:8080", default)
    add_option(parser, "--key-file", "FILE", "with --url: a file that holds the API key", "no key", type=Path)


def _describe_run(parser: argparse.ArgumentParser) -> None:
    what = "the model, as --model; several, as --models"
    parser.add_argument("positional_models", nargs="*", metavar="MODEL", help=what)
    add_settings(parser)


def _describe_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("positional_models", nargs="?", type=lambda name: [name], metavar="MODEL", help="as --model")
    add_option(parser, "--system", "TEXT", "instructions for the model, as /system")
    add_option(parser, "--load", "FILE", "go on with a chat that /save wrote", "a new one")
    add_option(parser, "--save", "FILE", "write the chat here at its end", "nowhere")
    add_flag(parser, "--keep-going", "drop the oldest turns once it is full", "ask")
    add_flag(parser, "--compact", "have the model summarise them instead", "ask")
    add_flag(parser, "--no-history", "keep no questions for the arrow keys of later chats", "kept")
    _add_source(parser, samples=True)


def _describe_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="*", metavar="PROMPT", help="the prompt; several words are joined, and - is standard input"
    )
    add_flag(parser, "--raw", "continue the prompt literally, without a chat template")
    add_option(parser, "--system", "TEXT", "instructions, ahead of the prompt")
    about = "a picture that the prompt is about; several times for several"
    add_option(parser, "--image", "FILE", about, type=Path, action="append", value=[])
    add_flag(parser, "--json", "the protocol's events as JSON lines instead of text")
    add_flag(parser, "--stats", "tell time to first token, speed, prompt and cached tokens on standard error")
    _add_priority(parser)
    add_answer(parser)
    _add_source(parser, samples=True)


def _describe_embed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a text; without any, each line of input is one")
    add_option(parser, "--file", "FILE", "read the texts from here, a line each", "standard input", type=Path)
    add_option(parser, "--column", "NAME", COLUMN, "the only one of a .csv file")
    kept = "keep the first figures of each embedding, normalised again"
    add_option(parser, "--dimensions", "N", kept, "all", "1 or more", type=_positive)
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="scale each embedding to length 1 (default: on)",
    )
    add_flag(parser, "--base64", "32-bit floats, little-endian, in base64 instead of a JSON list")
    add_flag(
        parser,
        "--fail-on-empty",
        "fail where a text has no token, such as an empty line, instead of writing null for it",
    )
    _add_priority(parser)
    _add_source(parser)


def _describe_decide(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", metavar="FILE", type=Path, help="file of texts, a line each (default: standard input)"
    )
    kinds: tuple[tuple[str, str, QuestionKind, str], ...] = (
        ("--yes", "QUESTION", "predicate", "a question of yes or no"),
        ("--choice", "QUESTION=A,B", "choice", "a question with these options"),
        ("--score", "QUESTION=1..5", "score", "a question with levels, least first; 1..5, or low,high"),
    )
    for name, metavar, kind, what in kinds:
        text, read = f"{what}; can be given several times", partial(_question, kind)
        add_option(parser, name, metavar, text, dest="questions", action="append", type=read)
    add_option(parser, "--column", "NAME", COLUMN, "the only one of a .csv file")
    add_flag(parser, "--table", "a row for each text instead of JSON: the likeliest answers, and how likely they are")
    add_flag(parser, "--reproducible", "the same probabilities to the last bit, whatever else runs")
    _add_priority(parser)
    _add_source(parser)


def _question(kind: QuestionKind, text: str) -> DecisionQuestion:
    """What an option asks: `Is it spam?`, `topic=a,b,c`, or `How urgent?=1..5` or with names of levels."""
    asked, _, given = (text, "", "") if kind == "predicate" else text.rpartition("=")
    if not asked.strip():
        if kind == "predicate":
            raise argparse.ArgumentTypeError('the question is empty; write it, such as "Is it spam?"')
        example = "levels: How urgent?=1..5" if kind == "score" else "options: topic=a,b"
        raise argparse.ArgumentTypeError(f"expected a question, then = and its {example}")
    first, dots, last = given.partition("..")
    names = given.split(",") if kind != "predicate" else []
    if kind == "score" and dots and first.isdecimal() and last.isdecimal():
        names = list(map(str, range(int(first), min(int(last), int(first) + 99) + 1)))
    most = MAX_LEVELS if kind == "score" else MAX_OPTIONS
    if kind != "predicate" and not ("" not in names and 2 <= len(names) <= most):
        what = "1..5 or low,high" if kind == "score" else "a,b"
        raise argparse.ArgumentTypeError(f"expected 2 to {most} options behind the =, such as {what}; not {given!r}")
    try:
        return DecisionQuestion(kind, asked, tuple(map(Option, names)), asked)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _describe_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="INPUT", help="file of rows, also compressed by gzip; - is standard input")
    out = "file of results, a line for each row"
    add_option(parser, "-o --output", "OUT", out, "none; name one", type=Path)
    add_option(parser, "--template", "TEXT", "make each prompt of a row's columns: 'Summarise: {text}'")
    add_flag(parser, "--csv", "the input is CSV with a line of names", "where it is called so")
    add_option(parser, "--system", "TEXT", "instructions, ahead of plain rows' prompts")
    schema = "plain rows' answers are JSON that fits the schema in this file, or written out here"
    add_option(parser, "--schema", "FILE", schema, "any text")
    add_flag(parser, "--raw", "continue prompts literally, without a chat template")
    add_flag(parser, "--any-model", "take rows that name another model than the loaded one")
    add_flag(parser, "--unordered", "write results as they end", "in the order of the rows")
    again = parser.add_mutually_exclusive_group()
    add_flag(again, "--restart", "drop the results there are, start over")
    add_flag(again, "--only-failed", "keep the good results there are, and run all other rows again")
    add_flag(parser, "--json", "tell the progress in JSON lines on standard output")
    _add_priority(parser, "background")
    _add_source(parser, samples=True)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a number from 1, not {text!r}")
    return int(text)


def _add_priority(parser: argparse.ArgumentParser, default: str = "normal") -> None:
    lanes = ("background", "normal", "interactive")
    add_option(parser, "--priority", None, "scheduling lane on a busy server", default, choices=lanes, value=default)


def _add_source(parser: argparse.ArgumentParser, *, samples: bool = False) -> None:
    """Options of commands that a server answers, or a model in this process."""
    add_flag(parser, "--local", "load the model in this process even where a server listens")
    if samples:
        add_sampling(parser)
    add_settings(parser, leave_out=SERVER_ONLY | SAMPLING)


def _describe_list(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--json", "a JSON list instead of a table")
    _add_socket(parser)


def _describe_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id", nargs="?", default="", metavar="REQUEST_ID", help="the request's id (default: your newest request)"
    )
    add_flag(parser, "--json", "a JSON object instead of sentences")
    _add_socket(parser)


def _describe_history(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("number", nargs="?", type=_positive, metavar="NR", help="one request, whole (default: a list)")
    parting = "where the second's prompt parts from the first, which is where its cache ended"
    add_option(what, "--diff", ("NR", "NR"), parting, nargs=2, type=int)
    add_flag(what, "--follow", "go on with those that come")
    add_option(what, "--export", "FILE", "all as rows for uma batch; - is stdout")
    add_option(parser, "--search", "TEXT", "those alone that have it", "all", value="")
    add_option(parser, "--last", "N", "how many the list has", "20", type=_positive, value=20)


def _describe_top(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--once", "show what is now, and end", "on no terminal")
    add_flag(parser, "--json", "the same as a JSON list")
    _add_url(parser, "sockets of this machine")
    _add_socket(parser)


def _describe_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="file to write, such as trace.json")
    text, read = "length of the trace", partial(_duration, MAX_TRACE_SEC)
    add_option(parser, "--seconds", "N", text, "5", "over 0, at most 60", type=read, value=5.0)
    _add_socket(parser)


def _describe_pin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="one of the server's models, as uma run --models has them")
    _add_socket(parser)


def _describe_pause(parser: argparse.ArgumentParser) -> None:
    text, read = "go on by itself after so long: 30m, 1h, 90 (seconds)", partial(_duration, MAX_PAUSE_SEC)
    add_option(parser, "--for", "TIME", text, "uma resume alone", dest="seconds", type=read, value=MAX_PAUSE_SEC)
    _add_socket(parser)


def _duration(most_sec: float, text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", text)
    seconds = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if not 0 < seconds <= most_sec:
        most = "a year" if most_sec == MAX_PAUSE_SEC else f"{most_sec:g} s"
        raise argparse.ArgumentTypeError(f"expected a time such as 30, 0.5s, 20m or 1h, {most} at most, not {text!r}")
    return seconds


def _describe_stop(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--now", "do not let running requests finish; kill a server that hangs")
    _add_socket(parser)


def _describe_launch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("agent", choices=tuple(AGENTS), metavar="AGENT", help=f"one of {', '.join(AGENTS)}")
    parser.set_defaults(arguments=[])
    _add_url(parser, "the one on --socket")
    add_settings(parser, leave_out=frozenset(setting for setting in settings() if setting.startswith("http")))


def _describe_service(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("install", "remove", "show", "status"),
        metavar="ACTION",
        help="write, enable and start it; undo that; show what install would write; or tell whether it runs",
    )
    parser.set_defaults(arguments=[])


def _describe_gateway(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, leave_out=frozenset(settings()) - GATEWAY)


def _describe_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("new", "list", "remove"),
        metavar="ACTION",
        help="make a key, list all of them, or remove one",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the name of the key: letters, digits, - and _")
    add_option(parser, "--keys", "FILE", "file of keys", "keys.toml", value="keys.toml")
    add_option(parser, "--models", "NAME,NAME", 'with new: models that it can use, with commas; "": none', "all")
    add_flag(parser, "--manage-models", "with new: the key can pull, delete and pin models")


def _describe_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "reference",
        metavar="REPO[:QUANT]",
        help="OWNER/NAME on the Hugging Face hub, :Q4_K_M or :FILE behind it, @REVISION; or a URL of it",
    )
    add_flag(parser, "--list", "show the models of the repository and pull none")
    add_flag(parser, "--no-mmproj", "leave out the projector, by which a model sees pictures or hears")


def _describe_rm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a model that uma models lists")
    add_flag(parser, "--yes", "do not ask", "ask on a terminal, else refuse")


def _describe_config(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    add_flag(form, "--json", "a JSON object instead of a table")
    add_flag(form, "--toml", "a file for --config instead of a table")
    add_settings(parser)


def _describe_doctor(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--json", "a JSON object instead of a table")
    add_flag(parser, "--details", "also the build, folders and memory, where nothing needs doing about them")
    looked_at = {"http_keys", "http_tls_cert", "http_tls_key"}
    add_settings(parser, leave_out=HTTP - looked_at | SAMPLING | LOG)


def _describe_schema(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="one message, such as generate (default: all)")
    add_flag(parser, "--contracts", "the contracts between engines and frontends instead of the protocol's messages")


def _describe_contract(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("check",), metavar="check", help="ask for all that is claimed, and for more")
    place = parser.add_mutually_exclusive_group()
    add_option(place, "--socket", "PATH", "Unix socket of the server", "$UMA_SOCKET or uma run's own", type=Path)
    add_option(place, "--http", "URL", "ask over HTTP, such as http://127.0.0.1:8080", "the socket")
    add_option(parser, "--key-file", "FILE", "with --http: a file that holds the API key", "no key", type=Path)
    add_flag(parser, "--json", "a JSON list instead of a table")


def _describe_engine_zmq(parser: argparse.ArgumentParser) -> None:
    endpoint = "ipc://infer.ipc"
    add_option(parser, "--bind", "ENDPOINT", "ZeroMQ endpoint of the ROUTER socket", endpoint, value=endpoint)
    add_flag(parser, "--insecure", "allow tcp on other addresses than loopback")
    add_settings(parser)


def _describe_worker(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--namespace", "NAME", "Dynamo's namespace", "dynamo", value="dynamo")
    add_option(parser, "--component", "NAME", "Dynamo's component", "the model's name")
    add_option(parser, "--served-name", "NAME", "the model's name for clients", "the model's own name")
    add_option(parser, "--block-size", "N", "tokens of a block in KV events", "16", type=int, value=16)
    add_option(parser, "--tokenizer-dir", "PATH", "directory with the model's tokenizer.json", type=Path)
    add_option(parser, "--host", "ADDRESS", "name or address for other machines", "127.0.0.1", value="127.0.0.1")
    for name, (default, choices) in DYNAMO_PLANES.items():
        variable = plane_variable(name)
        value, text = os.environ.get(variable) or default, f"Dynamo's {name.replace('-', ' ')}"
        add_option(parser, f"--{name}", None, text, f"${variable}, else {default}", choices=choices, value=value)
    add_settings(parser, leave_out=SERVER_ONLY)


PLACE = (
    "A server that runs answers. Without one, or with --local or another --model, the model is loaded in this process: "
    "docs/commands.md."
)

COMMANDS: tuple[Command, ...] = (
    Command(
        "run",
        "serve models to every program on this machine",
        _describe_run,
        "Serve a model on a Unix socket until SIGINT or SIGTERM; running requests can then finish. Without a model, "
        "all that are here (uma models); of several each is loaded once it is asked for.",
        " [MODEL ...]",
    ),
    Command(
        "ps",
        "the servers that run",
        _describe_list,
        "The server on --socket, by default the usual socket and those beside it: process, model, open sessions, since "
        "when. The exit code is 1 where there is none.",
    ),
    Command(
        "explain",
        "where the time of a request went, and why",
        _describe_explain,
        "Tell where the time of a request went that runs on the server, or is one of its last 1,000, and what it "
        "waited for. You see your own requests; the user that runs the server, and root, see all of them.",
        " [REQUEST_ID]",
    ),
    Command(
        "history",
        "what programs sent, and where the cache broke",
        _describe_history,
        "The requests that `uma run --history` has kept: a list, one of them whole, or how the prompts of two differ. "
        "They lie in one file of yours alone (see docs/operations.md), also where no server runs.",
        " [NR]",
    ),
    Command(
        "top",
        "what runs and waits just now, and how fast",
        _describe_top,
        "Each model and request of the servers that uma ps lists, of the one on --socket, or of the one at --url: live "
        "on a terminal, else once. Keys: arrows choose, s sorts, r reverses, / filters, space pauses, x ends a request "
        "after asking, ? helps, q leaves. Over HTTP a key's holder can end its own requests; on a socket the server's "
        "user can end any.",
    ),
    Command(
        "trace",
        "what a server's threads do, as a file for Perfetto",
        _describe_trace,
        "Write what the threads of the server do within some seconds, batch by batch, as JSON in Chrome's trace event "
        "format, for https://ui.perfetto.dev. For the user that the server runs as, and root.",
        " OUT",
    ),
    Command(
        "load",
        "have a model loaded, of a server that has several",
        _describe_pin,
        "Load one of the models of uma run --models before a request needs it, and wait for that. It leaves as others "
        "do: once it is idle for as long as it is kept, or its memory is needed.",
        " NAME",
    ),
    Command(
        "unload",
        "have a model leave memory, of a server that has several",
        _describe_pin,
        "Have a model end once its requests have ended, without waiting for that; the next request loads it again. One "
        "that is pinned stays: uma unpin comes first. For the user that the server runs as, and root.",
        " NAME",
    ),
    Command(
        "pin",
        "have a model loaded and stay, of a server that has several",
        _describe_pin,
        "Load one of the models of uma run --models, and keep it in memory whatever else needs that, until uma unpin "
        "or the server's end. For the user that the server runs as, and root.",
        " NAME",
    ),
    Command(
        "unpin",
        "let a model leave again that was pinned",
        _describe_pin,
        "Take uma pin back: the model stays in memory until it is needed for another, or is idle for as long as it is "
        "kept. For the user that the server runs as, and root.",
        " NAME",
    ),
    Command(
        "pause",
        "have a server compute nothing for a while",
        _describe_pause,
        "Leave the processor to something else, such as a call: what runs stands still and what comes waits, and is "
        "told so, until uma resume or --for. For the user that the server runs as, and root.",
    ),
    Command(
        "resume",
        "have a server go on that was paused",
        _add_socket,
        "Take uma pause back. For the user that the server runs as, and root.",
    ),
    Command(
        "stop",
        "end a server, and wait until it is gone",
        _describe_stop,
        "Send SIGTERM to the process that listens on --socket, once it has answered as a server, and wait for its end. "
        "Running requests can finish first, for as long as the server's drain_timeout_sec.",
    ),
    Command(
        "service",
        "a server that starts with your login and is kept running",
        _describe_service,
        "`uma service install` writes a unit for systemd's user manager, or on macOS launchd's plist, starts it and "
        "says what it did; `uma service remove` undoes that. The options of uma run come behind --: "
        "uma service install -- --http --idle-unload 30. Variables of this shell do not hold there.",
        " ACTION [-- OPTION ...]",
    ),
    Command(
        "chat",
        "a conversation in the terminal",
        _describe_chat,
        "A conversation with the model through its chat template. /help in the chat tells its commands. Ctrl-C stops "
        "the answer, Ctrl-D leaves. Where standard input is no terminal, each of its lines is one turn, whatever it "
        "begins with.\n\n" + PLACE,
        " [MODEL]",
    ),
    Command(
        "generate",
        "text for one prompt, on standard output",
        _describe_generate,
        "Generate text and write it as it comes. The prompt is sent as a user's message through the model's chat "
        "template; with --raw, or where the model has no template, it is continued literally. What comes on standard "
        "input goes after the prompt, or where - stands in it; in a loop over lines, redirect it: </dev/null.\n\n"
        + PLACE,
        " [PROMPT ...]",
    ),
    Command(
        "embed",
        "embeddings of texts, on standard output",
        _describe_embed,
        "Write an embedding of each text: a line of JSON each, in the order of the texts. A text is an argument, or a "
        "line of --file or of standard input. One that does not fit the model's context is an error; none is cut.\n\n"
        + PLACE,
        " [TEXT ...]",
    ),
    Command(
        "decide",
        "questions about texts, answered by probabilities",
        _describe_decide,
        "Ask questions about each line of FILE or of standard input, blank ones aside, and write a line of JSON each: "
        "probabilities of the answers, of which nothing is generated. They are not calibrated: docs/decisions.md.\n\n"
        + PLACE,
        " [FILE] (--yes | --choice | --score) QUESTION ...",
    ),
    Command(
        "batch",
        "a file of rows through the model; goes on after a crash",
        _describe_batch,
        "Run every row of a file through the model and append a line for each to OUT, as OpenAI's batches have it. "
        "Ended in whatever way, the same command goes on where it was. A row is a line of JSON: OpenAI's (custom_id, "
        'url, body) or plain ({"prompt": ...}, {"messages": [...]}), or with --template any line of JSON or CSV. '
        "Ctrl-C and SIGTERM let the rows that run end. The exit code is 1 where rows failed; their lines say why.\n\n"
        + PLACE,
        " INPUT -o OUT",
    ),
    Command(
        "launch",
        "a coding agent on the local model",
        _describe_launch,
        "Start a coding agent that uses the server on --socket, or a server of its own where none listens, which ends "
        "with it. The agent is told by variables, options and temporary files; nothing of the user's is changed. Its "
        "own arguments come behind --: uma launch claude -- --continue.",
        " AGENT [-- ARGUMENT ...]",
    ),
    Command(
        "gateway",
        "HTTP in front of a running server",
        _describe_gateway,
        "Serve HTTP for the server that listens on --socket, until SIGINT or SIGTERM, or until that server goes away. "
        "It is what uma run --http does, in a process of its own.",
    ),
    Command(
        "key",
        "make, list and remove API keys for HTTP",
        _describe_key,
        "`uma key new NAME` makes a key that HTTP clients send, prints it, and appends its hash to the file that "
        "--http-keys names. `uma key list` tells that file's keys and limits, `uma key remove NAME` ends one. "
        "A server that runs reads the file again at the next request after a change, and its log then tells of a "
        "broken one. Limits of a key, such as max_tokens_per_minute, are set in that file, below its [NAME].",
        " ACTION [NAME]",
    ),
    Command(
        "models",
        "what can be loaded from here",
        _describe_list,
        "The built-in model, the GGUF files of the UMA_MODELS folder, and the models that Hugging Face's cache, LM "
        "Studio and Ollama keep: each with its quantization, context and size, whether it sees pictures, by a "
        "projector beside it, or is a base model, and whether it fits into the memory that is free. A wide terminal "
        "has parameters, kind and place, too. Any of them is loaded by its name, or by as much of its beginning as no "
        "other has.",
    ),
    Command(
        "pull",
        "get a model from the Hugging Face hub",
        _describe_pull,
        "Load a GGUF model into the Hugging Face cache, which llama.cpp, vLLM and others share: all parts of it, with "
        "their checksums verified. An interrupted download continues where it was. Without a quantization all are "
        "shown with their sizes, and which fit the memory that is free, and Q4_K_M is taken, else the nearest that "
        "there is. Where the repository has a projector (mmproj) for it, that comes too. The file's path is written to "
        "standard output, all else to standard error.\n\n"
        "HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE are as for every program of Hugging Face.",
        " REPO[:QUANT]",
    ),
    Command(
        "rm",
        "remove a model from the disk",
        _describe_rm,
        "Delete a model of the Hugging Face cache or of the UMA_MODELS folder, all its parts and revisions, and its "
        "projector (mmproj) where no other model has it, and tell what that frees. What LM Studio and Ollama have is "
        "theirs to remove.",
        " NAME",
    ),
    Command(
        "config",
        "the settings in force, and where each came from",
        _describe_config,
        "Every setting with its value and where that came from: an option, a variable, the file, or the default.",
    ),
    Command(
        "doctor",
        "what this machine can do, and what needs doing",
        _describe_doctor,
        "What this machine and this build of llama.cpp can do and what is in the way: CPU, GPUs, threads, memory, "
        "folders, models, server. Exit code 1 where something is in the way; a line for each says what to do about it. "
        "What would only be faster is told too, with exit code 0.",
    ),
    Command(
        "schema",
        "JSON Schemas of the protocol's messages",
        _describe_schema,
        "JSON Schemas (2020-12) of every message of the wire, for authors of clients.",
        " [NAME]",
    ),
    Command(
        "contract",
        "prove what a running server says of itself",
        _describe_contract,
        "Ask a running server for each thing it declares (streaming, sampling parameters, grammars, log probabilities, "
        "limits, cancel ...) and for things it does not declare, which must be refused by name. Exit code 1 where a "
        "claim is false.",
        " check",
    ),
    Command(
        "worker",
        "serve a model to NVIDIA Dynamo's frontend, as a backend worker",
        _describe_worker,
        "Register with Dynamo 1.6 and serve its frontend and KV-aware router. Stopped by SIGTERM, which first takes "
        "the worker out of routing and lets requests finish. A network listener without authentication: Dynamo binds "
        "three sockets to all addresses whatever --host says. How to install it: docs/many-machines.md.",
    ),
    Command(
        "engine-zmq",
        "serve a model to RustInfer's server, as its engine",
        _describe_engine_zmq,
        "As `uma run`, and on a ZeroMQ ROUTER socket the messages of RustInfer's protocol 1.0, in JSON or MessagePack. "
        "There is no authentication: any program that reaches it can use the model. Needs pip install '.[zmq]'.",
    ),
)


def _listed() -> str:
    """The commands by group, a line each."""
    summaries = {command.name: command.summary for command in COMMANDS}
    return "\n".join(
        f"{title}:\n" + "".join(f"  {name:<11}  {summaries[name]}\n" for name in names)
        for title, names in GROUPS.items()
    )


def build_parser() -> CommandParser:
    """The whole grammar. The result of parsing names its command in `command`."""
    parser = CommandParser(
        prog="uma",
        description="Load a language model once and let every program on the machine share it. To begin: `uma pull "
        "OWNER/NAME` gets a model, `uma chat` talks with it, `uma run` serves it.",
        epilog=f"{_listed()}\n{EPILOG}",
    )
    parser.add_argument("-V", "--version", action="version", version=f"uma {__version__}")
    choices = parser.add_subparsers(
        dest="command", metavar="COMMAND", help="one of those below", parser_class=CommandParser
    )
    siblings: dict[str, CommandParser] = {}
    for command in COMMANDS:
        made = choices.add_parser(
            command.name,
            usage=f"uma {command.name} [options]{command.arguments}",
            description=command.description,
            epilog="Exit codes and variables: see uma --help.",
        )
        command.describe(made)
        if n_rare := len(made.rare()):
            made.add_argument("--help-all", action=_HelpAll, dest="help", nargs=0, help="show every option and exit")
            made.epilog = (
                f"--help-all tells {n_rare} more settings, all defaults, and how variables and a file set them. "
                f"{made.epilog}"
            )
        if command.name in EXAMPLES:
            made.epilog = "\n  ".join(["examples:", *EXAMPLES[command.name]]) + f"\n\n{made.epilog}"
        made.siblings = siblings
        siblings[command.name] = made
    parser.siblings = siblings
    return parser
