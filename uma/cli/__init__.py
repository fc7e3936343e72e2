"""The command `uma`: reads the command line, calls the command's own module, and turns what went wrong into one line
and an exit code. Nothing is imported here that a mere `uma --help` does not need.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from uma.cli import say
from uma.cli.streams import OUTPUT, abandon_output, mend
from uma.errors import BadRequest, ConfigError, ModelError, PromptTooLarge, TemplateError, UmaError
from uma.wrong import renamed

FAILED = 1
UNUSABLE = 2
TERMINAL_GONE = 129
INTERRUPTED = 130
PIPE_CLOSED = 141
WRONG_INPUT = (BadRequest, ConfigError, ModelError, PromptTooLarge, TemplateError)
"""Errors of the command line, a setting, the model or the prompt."""
HELP = ("help", "--help", "-h")
MODULES = dict.fromkeys(("load", "unload", "pin", "unpin", "pause", "resume"), "steer")
"""Modules of commands that have none of their own name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code (see `uma --help`). `argv` is without the program's name.

    A wrong option leaves by `SystemExit(2)`, `--help` by `SystemExit(0)`, as argparse does.
    """
    mend()
    sys.excepthook = _unexpected
    is_terminal = sys.stdout.isatty()
    try:
        code = _dispatch(argv)
        if code == TERMINAL_GONE and is_terminal:
            abandon_output()  # else what is written later, at the very end, would fail with another code
        _flush()
    except BrokenPipeError:
        abandon_output()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        say.settle()
        return INTERRUPTED
    except WRONG_INPUT as error:
        return _report(error, UNUSABLE)
    except (UmaError, OSError) as error:
        if is_terminal and isinstance(error, OSError) and error.errno == errno.EIO:
            abandon_output()
            return TERMINAL_GONE  # its SIGHUP can come later than this
        if isinstance(error, OSError) and error.filename == OUTPUT:
            abandon_output()
        return _report(error, FAILED)
    except SystemExit:
        # `--help` has written to standard output, or has failed to.
        try:
            _flush()
        except OSError as error:
            return _report(error, FAILED)
        raise
    return code


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_output()
        raise OSError(error.errno, error.strerror, OUTPUT) from None


def _dispatch(argv: Sequence[str] | None) -> int:
    from uma.cli.parser import build_parser  # noqa: PLC0415  (inside main's error handling)

    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks, set up as docs/commands.md says
        import argcomplete  # noqa: PLC0415  (no dependency: who has set it up has it)

        argcomplete.autocomplete(parser)
    words = [*(sys.argv[1:] if argv is None else argv)]
    if words and words[0] in HELP:  # `uma help run` is `uma run --help`
        words = [*words[1:2], "--help"]
    options = parser.parse_args(words)
    if options.command is None:
        parser.print_help(sys.stderr)
        return UNUSABLE
    module = MODULES.get(options.command, options.command.replace("-", "_"))
    if module == "run":  # its own module takes seconds to import
        say.passing("starting …")
    code: int = importlib.import_module(f"uma.cli.{module}").main(options)
    return code


def _report(error: UmaError | OSError, code: int) -> int:
    from uma.config import is_debugging  # noqa: PLC0415  (nothing is imported before it is needed)

    if is_debugging():
        _trace(error)
    say.complain(describe(error))
    return code


def describe(error: UmaError | OSError) -> str:
    """An error as people read it."""
    if isinstance(error, ConfigError):
        from uma.config import settings  # noqa: PLC0415  (nothing is imported before it is needed)

        # With the options that people write: `--http: …`.
        return "\n".join(renamed(error.lines, {name: setting.flag for name, setting in settings().items()}))
    if isinstance(error, UmaError):
        return error.message
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def _unexpected(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """A fault of UMA itself: one line, unless `UMA_DEBUG=1` asks for all of it."""
    from uma.config import is_debugging  # noqa: PLC0415

    if is_debugging():
        _trace(error)
    say.complain(f"a fault in uma itself: {kind.__name__}: {error} (UMA_DEBUG=1 shows where)")


def _trace(error: BaseException) -> None:
    import traceback  # noqa: PLC0415  (needed only where UMA_DEBUG asks for it)

    say.plain("".join(traceback.format_exception(error)))
