"""Finds out, in a child process that can crash, which of llama.cpp's extra buffer types compute correctly on this CPU.

A type's code can be at fault for one compiler and one CPU (GCC 12 leaves half of AMX's tile configuration unwritten),
and the fault is a signal that ends the process. So before this process loads weights for such a type, a child process
computes with it and without it, and only types with the same results are used.

The verdict is cached for one library file on one CPU (`cpu_cache`).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from uma.constraints import check
from uma.errors import ModelError
from uma.llama import backend, cpu_cache, library
from uma.llama.builtin import builtin_path
from uma.llama.probe import ALONE, LOADING, PLAIN, ROWS

logger = logging.getLogger("uma.llama.trust")

HANG_SEC = 20.0
"""Maximum time for a child, which needs 0.25 s on a quiet machine: 80 times as much, for busy ones."""
HANG_KEPT_SEC = 86_400.0
"""How long a hang is remembered. A busy machine can look like one, and is then believed for a day only; a real one
costs 20 s a day."""
TOLERANCE = 0.1
"""Maximum difference of a batch's logits, RMS over RMS. The plain way itself differs by 0.02 between sizes of batches,
because activations are rounded to 8 bits; wrong kernels differ by 1 or more."""
THREADS = 2
"""A fault of worker threads needs one beside the main thread."""
VERSION = 1
"""Counts the changes of the probe: verdicts of another version are not used."""
FAULTS = frozenset({"SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE", "SIGABRT", "SIGTRAP", "SIGSYS"})
"""Signals that code raises by itself, always again. Others come from outside (SIGKILL where memory ran out)."""
REPAIRS = {"AMX": f'CXXFLAGS="{library.AMX_REPAIR}"'}
"""What mends a type in a rebuild, where that is known; another compiler than GCC otherwise."""
CLANG = "CC=clang CXX=clang++"

_lock = threading.Lock()


@attrs.frozen
class Verdict:
    """The result of the probe: which extra buffer types a library can use on a CPU."""

    usable: tuple[str, ...] = ()
    """Extra buffer types that computed as the plain way does, or that the probe's model has no tensors for."""
    faults: tuple[tuple[str, str], ...] = ()
    """Types left out, each with what was seen."""
    unknown: str = ""
    """Why the probe could not run; then no type is used."""
    expires: float | None = None
    """Unix time; None: never."""

    def __attrs_post_init__(self) -> None:
        check(self)


@attrs.frozen
class Child:
    """The result of one child process."""

    logits: dict[str, bytes]
    """By way; empty for a type that the model has no tensors for."""
    way: str
    """The way it was at when it ended, or `LOADING`; empty where it completed all."""
    seen: str
    """How it ended, for people."""
    is_fault: bool
    """Whether the code at that way is at fault, rather than the machine or the setup."""
    is_hang: bool = False


def verdict(command: Sequence[str] | None = None, *, again: bool = False) -> Verdict:
    """The verdict on this library and this CPU: from the cache, or from a probe that takes 0.2 to 0.5 s.

    Any thread can call it. `command` is the child program instead of `uma.llama.probe`; `again` ignores the cache and
    logs nothing. Raises `ModelError` where the library does not compute on this CPU at all.
    """
    with _lock:
        path, key = cache_file(), _key()
        found = None if again else read(path, key)
        if found is not None:
            return found
        found = ask(command or child_command())
        if not again:
            _warn(found)
        if not found.unknown or found.expires is not None:
            _write(path, key, found)
        return found


def check_plain(command: Sequence[str] | None = None) -> None:
    """Ask, once for a library on a CPU, whether it computes without extra buffer types: a setting that decides about
    these says nothing of the rest.

    Any thread can call it. Raises `ModelError` where it does not. A child that could not run proves nothing.
    """
    with _lock:
        key, path = _key(), cache_file("plain")
        if read(cache_file(), key) is not None or read(path, key) is not None:
            return
        child = _run(command or child_command(), [ALONE])
        if child.is_fault:
            raise ModelError(_why_not_for_this_cpu(child.seen))
        if not child.way:
            _check_sound(child.logits[PLAIN])
            _write(path, key, Verdict())
        elif child.is_hang:
            _write(path, key, Verdict(unknown=child.seen, expires=time.time() + HANG_KEPT_SEC))


def has_gpu() -> bool:
    """Whether llama.cpp finds something else than CPUs to compute with, which it is asked only once a child process has
    seen that it runs on this CPU. As `check_plain`.
    """
    if not library.may_have_gpu():
        return False
    _check_plain_once(json.dumps(_key()))
    return backend.has_gpu()


@cache
def _check_plain_once(_: str) -> None:
    """`check_plain`, once in this process for each library and CPU, whether or not its answer can be kept."""
    check_plain()


def ask(command: Sequence[str]) -> Verdict:
    """Start child processes until each way has a result. Raises `ModelError` where the plain way fails."""
    logits: dict[str, bytes] = {}
    faults: dict[str, str] = {}
    has_hung = False
    while True:
        child = _run(command, [*logits, *faults])
        logits |= child.logits
        if not child.way:
            break
        if child.way in (LOADING, PLAIN):
            if child.is_fault:
                raise ModelError(_why_not_for_this_cpu(child.seen))
            # No verdict on the CPU, which a busy machine must not lose; but asking again takes as long at each start.
            return Verdict(unknown=child.seen, expires=time.time() + HANG_KEPT_SEC if child.is_hang else None)
        if not (child.is_fault or child.is_hang) or child.way in faults:
            return Verdict(unknown=f"{child.seen}, at {child.way}")
        faults[child.way] = child.seen
        has_hung |= child.is_hang
    plain = logits.pop(PLAIN, b"")
    _check_sound(plain)
    for way, values in logits.items():
        if values and (problem := _difference(plain, values)):
            faults[way] = problem
    return Verdict(
        usable=tuple(way for way in logits if way not in faults),
        faults=tuple(faults.items()),
        expires=time.time() + HANG_KEPT_SEC if has_hung else None,
    )


def child_command() -> list[str]:
    """This interpreter running `uma.llama.probe`, whatever program it runs here: nothing of `__main__` is imported."""
    boot = (
        "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from uma.llama.probe import main; main(sys.argv[2:])"
    )
    return [sys.executable, "-I", "-c", boot, json.dumps(sys.path)]


def _run(command: Sequence[str], known: Sequence[str]) -> Child:
    if getattr(sys, "frozen", False) or not command[0]:
        return Child({}, LOADING, "this program has no Python interpreter to start", is_fault=False)
    arguments = [str(builtin_path()), str(min(THREADS, backend.core_count())), str(int(HANG_SEC * 2)), ",".join(known)]
    # Threads that wait passively leave the cores of a busy machine to other programs; GPUs are not used.
    env = {**os.environ, "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
    try:
        # Its own session: a Ctrl-C meant for this process does not look like a fault of the library.
        child = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        return Child({}, LOADING, f"{command[0]} could not be started: {error.strerror}", is_fault=False)
    has_hung = threading.Event()

    def end() -> None:
        has_hung.set()
        child.kill()

    # `communicate` with a time limit would poll for the child's end, and lose a tenth of all the time there is.
    timer = threading.Timer(HANG_SEC, end)
    timer.start()
    with child:
        answer, errors = child.communicate()
    timer.cancel()
    logits, way = _parse(answer)
    if not way:
        return Child(logits, "", "", is_fault=False)
    if has_hung.is_set():
        return Child(logits, way, f"did not end within {HANG_SEC:.0f} s", is_fault=False, is_hang=True)
    if child.returncode < 0:
        name = _signal_name(-child.returncode)
        return Child(logits, way, f"was ended by {name}", is_fault=name in FAULTS)
    return Child(logits, way, _failure(child.returncode, errors), is_fault=False)


def _parse(answer: bytes) -> tuple[dict[str, bytes], str]:
    """The whole answers, and the way that was begun and not answered; empty where the last one, plain, was answered."""
    logits: dict[str, bytes] = {}
    way, rest = LOADING, answer
    while rest:
        head, _, rest = rest.partition(b"\n")
        line = _json(head)
        if isinstance(line.get("begins"), str):
            way = line["begins"]
            continue
        size = line.get("bytes")
        if not isinstance(size, int) or not 0 <= size <= len(rest):
            break  # rubbish, or cut off
        logits[way], rest = rest[:size], rest[size:]
    return logits, "" if PLAIN in logits else way


def _json(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _failure(code: int, errors: bytes) -> str:
    last = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
    ended = f"ended with exit code {code}" if code else "gave no answer that makes sense"
    return f"{ended}: {last[0]}" if last else ended


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_sound(logits: bytes) -> bool:
    return bool(logits) and len(logits) % (4 * sum(ROWS)) == 0 and bool(np.isfinite(_values(logits)).all())


def _check_sound(plain: bytes) -> None:
    """Raise `ModelError` where the plain way's logits are no numbers."""
    if not _is_sound(plain):
        raise ModelError(_why_not_for_this_cpu("gave logits that are no numbers"))


def _values(logits: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(logits, np.float32).reshape(sum(ROWS), -1)


def _difference(plain: bytes, logits: bytes) -> str:
    """How these logits are not the plain way's; empty where they are."""
    if len(logits) != len(plain) or not _is_sound(logits):
        return "gave logits that are no numbers"
    batches = np.cumsum(ROWS)[:-1]
    for rows, wanted, got in zip(
        ROWS, np.split(_values(plain), batches), np.split(_values(logits), batches), strict=True
    ):
        off = float(np.sqrt(np.square(got - wanted, dtype=np.float64).mean() / np.square(wanted).mean()))
        if off > TOLERANCE:
            return f"gave logits that differ by {off:.0%} in a batch of {rows}"
    return ""


def _why_not_for_this_cpu(seen: str) -> str:
    return (
        f"{library.library_file()}: this build of llama.cpp is not for this CPU ({library.cpu_name()}): a process that "
        f"computed with it {seen}; build it here: {library.rebuild_command()}"
    )


def describe(found: Verdict) -> list[str]:
    """What is left out and how to get it back: a line for each type, none where nothing is."""
    if found.unknown:
        return [
            "llama.cpp's extra buffer types could not be checked on this CPU and are not used, which can be slower: "
            f"the process that was to compute with them {found.unknown}; --extra-buffers on uses them without a check"
        ]
    return [
        f"llama.cpp's extra buffer type {name} is not used, which can be slower: a process that computed with it "
        f"{seen} (this build, on {library.cpu_name()}); to have it, rebuild: "
        f"{library.rebuild_command(REPAIRS.get(name, CLANG))}"
        for name, seen in found.faults
    ]


def _warn(found: Verdict) -> None:
    if lines := describe(found):
        logger.warning("%s", "\n".join(lines))


def cache_file(what: str = "extra-buffers") -> Path:
    """Where the verdict for this library on this CPU is, or would be."""
    return cpu_cache.cache_file(what, _key())


def _key() -> list[Any]:
    return cpu_cache.key(VERSION)


def read(path: Path, key: list[Any]) -> Verdict | None:
    """The verdict in this file; None where there is none, it is broken, of another library or CPU, or too old."""
    kept = cpu_cache.read(path, key)
    if kept is None:
        return None
    try:
        found = Verdict(
            usable=tuple(kept["usable"]),
            faults=tuple((str(name), str(seen)) for name, seen in kept["faults"]),
            unknown=str(kept.get("unknown", "")),
            expires=kept["expires"],
        )
    except (ValueError, TypeError, KeyError):
        return None
    now = time.time()
    return found if found.expires is None or now < found.expires <= now + HANG_KEPT_SEC else None


def _write(path: Path, key: list[Any], found: Verdict) -> None:
    cpu_cache.write(path, key, attrs.asdict(found))
