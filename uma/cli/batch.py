"""`uma batch`: every row of a file through the model, a result line each, and on from there after whatever ended it."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any

import attrs
import trio

from uma.cli import say, words
from uma.cli.answer_options import json_object
from uma.cli.batch_view import Events, Lines, OneLine, Speed, keep_showing
from uma.cli.generate import quiet
from uma.cli.options import load_settings, sampling_of
from uma.cli.sanitize import sanitize_line
from uma.cli.source import open_source
from uma.cli.trio_run import Interrupts, run
from uma.client import Client, ModelsThere, connect
from uma.config import ANY_NAME, Loaded
from uma.errors import ConfigError
from uma.http.jobs import FIELDS, ask_of
from uma.http.openai_chat import ChatBody
from uma.jobs import (
    BadInput,
    Results,
    ReturningServer,
    RowAsk,
    RowForm,
    Runner,
    Tally,
    has_columns,
    in_flight,
    judge,
    judge_rows,
    model_of,
    read_rows,
)
from uma.types import Priority, Source
from uma.wrong import nearest

PROGRAM = "uma batch"
CSV = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
"""What the names of files of CSV end with."""
STANDARD_OUTPUT = ("-", "/dev/stdout", "/dev/fd/1")
"""Names of standard output, which cannot be continued."""
MAX_REASONS = 5
"""Maximum reasons of rows' failures that are told."""
MAX_NAMED = 3
"""Maximum rows that are named."""


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    loaded = quiet(load_settings(options))
    if options.any_model:
        loaded = attrs.evolve(loaded, config=attrs.evolve(loaded.config, alias=ANY_NAME))
    _check(options)
    form = RowForm(
        template=options.template,
        system=options.system,
        schema=json_object(options.schema) if options.schema else None,
        is_raw=options.raw,
        defaults=_defaults(options, loaded),
        fields=FIELDS,
    )
    # A thread can still wait for a row of standard input at the end, and closing its reader would wait for that thread.
    opened = _opened(options.input)
    with nullcontext(opened) if options.input == "-" else opened as file:
        if options.output.exists() and os.path.samestat(os.fstat(file.fileno()), options.output.stat()):
            raise ConfigError(f"-o: {options.output} is the input, which results would overwrite; name another file")
        total: int | None = None
        if file.seekable():
            start = file.tell()
            with closing(read_rows(file, is_csv=_is_csv(options))) as rows:
                total = judge_rows(form, rows)
            file.seek(start)
        if not (options.restart or options.only_failed):
            judge(options.output, {"version": 1, **_settings(form, options)})
        return run(partial(_batch, options, loaded, form, file, total))


def _check(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for what would be ignored in every row, and where no file of results is named."""
    if options.output is None:
        wrong = "-o is missing: name the file of results, such as -o results.jsonl"
        try:
            _opened(options.input).close()
        except ConfigError as error:
            wrong = f"{error.message}; {wrong}"
        raise ConfigError(wrong)
    if str(options.output) in STANDARD_OUTPUT:
        raise ConfigError(
            "-o: results go to a file, beside which a journal says where to continue, and not to standard output; "
            "name one, such as -o results.jsonl"
        )
    if options.raw and options.system is not None:
        raise ConfigError(
            "--system: instructions need the chat template that --raw leaves out; write them into the prompts"
        )
    if options.template is not None and not has_columns(options.template):
        raise ConfigError(
            f"--template: {options.template[:100]!r} names no column, so that all rows would ask the same; write a "
            "column's name in braces, as in 'Summarise: {text}'"
        )


def _is_csv(options: argparse.Namespace) -> bool:
    return bool(options.csv or options.input.lower().endswith(CSV))


def _defaults(options: argparse.Namespace, loaded: Loaded) -> Mapping[str, Any]:
    """The fields of a body that the options ask for."""
    sampling = sampling_of(options, loaded)
    asked = attrs.asdict(sampling, filter=lambda field, value: value != field.default, recurse=False)
    lane = Priority[options.priority.upper()]
    return asked if lane is Priority.BACKGROUND else {**asked, "priority": int(lane)}


def _opened(name: str) -> IO[bytes]:
    # Standard input gets a reader of its own: the interpreter's end would wait for a thread that still reads the usual.
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False) if name == "-" else Path(name).open("rb")
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}; name the file that has the rows, or - for a pipe") from None


async def _batch(
    options: argparse.Namespace,
    loaded: Loaded,
    form: RowForm,
    file: IO[bytes],
    total_rows: int | None,
    interrupts: Interrupts,
) -> int:
    async with (
        open_source(loaded, interrupts, local=options.local, say=say.note) as opened,
        trio.open_nursery() as nursery,
    ):
        source = opened.source
        card = model_of(source)
        if opened.model is not None:
            card = card | {"name": opened.model}
        if opened.model is not None or source.info.models:
            form = attrs.evolve(form, defaults={**form.defaults, "model": card["name"]})
        header = {"version": 1, "model": card, **_settings(form, options)}
        results = Results.open(options.output, header, restart=options.restart, only_failed=options.only_failed)
        with closing(results):
            runner = Runner(
                _ask(source, loaded, nursery),
                read_rows(file, is_csv=_is_csv(options)),
                form,
                results,
                in_flight(source, has_others=opened.is_server),
                in_order=not options.unordered,
                is_live=not file.seekable(),
                prefix=f"{os.getpid()}-",
            )
            runner.tally.total_rows = total_rows
            code = await _shown(runner, options, interrupts)
        nursery.cancel_scope.cancel()
    return code


def _settings(form: RowForm, options: argparse.Namespace) -> dict[str, Any]:
    """What results depend on beside their rows and the model, by words that a person knows."""
    return {
        "--template": form.template,
        "--system": form.system,
        "--schema": form.schema,
        "--raw": form.is_raw,
        "sampling": {name: value for name, value in form.defaults.items() if name not in ("priority", "model")},
        "--unordered": options.unordered,
    }


def _ask(source: Source, loaded: Loaded, nursery: trio.Nursery) -> RowAsk:
    """What answers the rows; a server can go away meanwhile, and come back."""
    ask = partial(ask_of, config=loaded.config, program=PROGRAM)
    if not isinstance(source, Client):
        return ask(source)
    socket, has_several = loaded.config.socket, bool(source.info.models)

    def answers(session: Source) -> RowAsk:
        if not (has_several and isinstance(session, Client)):
            return ask(session)
        models = ModelsThere(socket, session, nursery)
        nursery.start_soon(models.follow)
        return ask(models)

    chosen = source.info.model.name if has_several else None
    server = ReturningServer(partial(connect, socket, model=chosen), answers, say.note)
    nursery.start_soon(server.keep, source)
    return server


async def _shown(runner: Runner, options: argparse.Namespace, interrupts: Interrupts) -> int:
    """Run the job and tell how far it is; the exit code."""
    results = runner.results
    if results.rows:
        say.note(f"{options.output} has {words.rows(results.rows, 'result')}; continuing after them")
    elif not results.is_new and not results.reusable:
        say.note(f"{options.output} was begun before, and no row had come to its end: all run again")
    if sys.stdin.isatty() and options.input == "-":
        say.note("waiting for rows from the terminal, one on each line; Ctrl-D ends them")
    view = Events() if options.json else OneLine() if sys.stderr.isatty() else Lines()
    speed = Speed(runner.tally)
    async with trio.open_nursery() as showing:
        showing.start_soon(keep_showing, view, speed, runner.look)

        def stop() -> None:
            again = "SIGTERM" if stopped.stopped_by == signal.SIGTERM else "Ctrl-C"
            view.tell(f"{_running(runner.asked_rows)}; {again} again: at once")
            runner.stop()

        is_done = False
        with interrupts.stopping(stop, grace_sec=math.inf, signals=(signal.SIGINT, signal.SIGTERM)) as stopped:
            try:
                is_done = await runner.run()
            except BadInput as error:
                view.end(speed, is_done=False)
                raise BadInput(
                    f"{options.input}: {error.message}; the rows before have results in {options.output}, and once "
                    "it is mended the same command goes on behind them"
                ) from None
        showing.cancel_scope.cancel()
    tally = runner.tally
    view.end(speed, is_done=is_done)
    if tally.ignored:
        known = ["--system", "--schema", "--raw", *(field.name for field in attrs.fields(ChatBody))]
        shown = (
            f"{sanitize_line(name)} ({words.rows(n)}{'' if name in known else nearest(name, known)})"
            for name, n in tally.ignored.most_common()
        )
        view.tell(f"fields and options that had no effect: {', '.join(shown)}")
    if tally.cut:
        how = ", which leaves no whole JSON" if options.schema else ""
        bound = "--max-tokens, a row's max_tokens or the context"
        view.tell(f"{words.rows(tally.cut, 'answer')} cut by {bound} (finish_reason length){how}")
    if tally.empty:
        shown = (f"{sanitize_line(name)} ({words.rows(n)})" for name, n in tally.empty.most_common())
        view.tell(f"empty columns of --template: {', '.join(shown)}")
    for (asked, model), n in tally.replaced.most_common():
        view.tell(f"{words.rows(n)} named {sanitize_line(asked[:200])}, answered by {sanitize_line(model)}")
    if is_done and not tally.rows:
        view.tell(f"{options.input} has no rows")
    if not is_done:
        kept = f", and {tally.kept:,} that wait for earlier rows beside it" if tally.kept else ""
        count = words.rows(tally.rows, "result")
        view.tell(f"stopped with {count} in {options.output}{kept}; the same command goes on from there")
        return 128 + (stopped.stopped_by or signal.SIGINT)
    if tally.failed:
        view.tell(_failed(tally))
        view.tell(f"the line of each in {options.output} says why; --only-failed tries again, once that is mended")
    return 1 if tally.failed else 0


def _running(rows: Sequence[int]) -> str:
    """What is still waited for where the job is to stop."""
    if not rows:
        return "no row runs, and it stops"
    end = "runs to its end" if len(rows) == 1 else "run to their ends"
    return f"{words.rows(len(rows))} {end}{_named(rows, len(rows))}, and then it stops"


def _failed(tally: Tally) -> str:
    """How many rows failed, and why: those of this run, for the reasons that most have, with a line and the first rows
    for each.
    """
    of_all = "all" if tally.failed == tally.rows > 1 else ""
    count = f"{of_all} {words.rows(tally.failed)} failed".strip()
    told = tally.reasons.most_common(MAX_REASONS)
    rest = tally.failed - sum(n for _, n in told)
    if len(told) == 1 and not rest:
        which = "" if of_all else _named(tally.failed_rows[told[0][0]], told[0][1])
        return f"{count}, because: {sanitize_line(told[0][0])}{which}"
    why = [f"  {n:,} because: {sanitize_line(reason)}{_named(tally.failed_rows[reason], n)}" for reason, n in told]
    return "\n".join([f"{count}:", *why, *([f"  and {rest:,} more"] if rest else [])]) if told else count


def _named(rows: Sequence[int], count: int) -> str:
    """The first of so many rows."""
    first = rows[:MAX_NAMED]
    shown = ", ".join(f"{row:,}" for row in first)
    return f" (row{'s' * (count > 1)} {shown}{' …' if count > len(first) else ''})"
