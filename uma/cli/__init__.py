"""The command `uma`: reads the command line, calls the command's own module, and turns what went wrong into one line
and an exit code. Nothing is imported here that a mere `uma --help` does not need.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from uma.errors import ConfigError, UmaError

FAILED = 1
UNUSABLE = 2
INTERRUPTED = 130
PIPE_CLOSED = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code (see `uma --help`). `argv` is without the program's name.

    A wrong option leaves by `SystemExit(2)`, `--help` by `SystemExit(0)`, as argparse does.
    """
    _mend_streams()
    sys.excepthook = _unexpected
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered for the closed pipe would be reported again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except ConfigError as error:
        return _report(error, UNUSABLE)
    except (UmaError, OSError) as error:
        return _report(error, FAILED)
    return code


def _dispatch(argv: Sequence[str] | None) -> int:
    from uma.cli.parser import build_parser  # noqa: PLC0415  (inside main's error handling)

    parser = build_parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help(sys.stderr)
        return UNUSABLE
    code: int = importlib.import_module(f"uma.cli.{options.command}").main(options)
    return code


def _mend_streams() -> None:
    """A stream that was closed becomes an empty one; a character that the terminal cannot show becomes `?`.

    Opening takes the lowest free descriptor, so in this order each gets its own again, and no socket or file of ours
    ever becomes somebody's standard output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  (for the life of the process)
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _report(error: UmaError | OSError, code: int) -> int:
    from uma.config import is_debugging  # noqa: PLC0415  (nothing is imported before it is needed)

    if is_debugging():
        import traceback  # noqa: PLC0415  (only for those who look for a fault)

        traceback.print_exception(error)
    for line in describe(error).splitlines():
        print(f"uma: error: {line}", file=sys.stderr)
    return code


def describe(error: UmaError | OSError) -> str:
    """An error as people read it."""
    if isinstance(error, UmaError):
        return error.message
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def _unexpected(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """A fault of UMA itself: one line, unless `UMA_DEBUG=1` asks for all of it."""
    from uma.config import is_debugging  # noqa: PLC0415

    if is_debugging():
        import traceback  # noqa: PLC0415

        traceback.print_exception(error)
    print(f"uma: error: a fault in uma itself: {kind.__name__}: {error} (UMA_DEBUG=1 shows where)", file=sys.stderr)
