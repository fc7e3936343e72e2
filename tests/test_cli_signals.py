"""What a signal stops: the piece of work that says so, and else the command; never later than the third time."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import pytest
import trio
import trio.testing
from conftest import take_back_signals

from harness import PATIENCE_SEC
from uma.cli.trio_run import Interrupts, run
from uma.errors import ModelError


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_work_that_nothing_stops_gives_its_own_code() -> None:
    async def work(_: Interrupts) -> int:
        return 7

    assert run(work) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_the_command_and_gives_128_more(number: signal.Signals) -> None:
    undone = []

    async def work(_: Interrupts) -> int:
        try:
            signal.raise_signal(number)
            await trio.sleep_forever()
        finally:
            undone.append("everything")
        return 0

    assert run(work) == 128 + number
    assert undone == ["everything"]


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    async def work(_: Interrupts) -> int:
        signal.raise_signal(signal.SIGHUP)
        await trio.testing.wait_all_tasks_blocked()
        return 3

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(work) == 3
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_test_begins_with_a_signal_ignored_whatever_the_parent_ignores() -> None:
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGTSTP, signal.SIGQUIT)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        take_back_signals()
        assert signal.SIG_IGN not in map(signal.getsignal, numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_commands_under_test_would_see_every_signal() -> None:
    """What is ignored in a test is ignored in the processes that it starts."""
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
    assert ignored <= {signal.SIGPIPE, signal.SIGXFSZ}


def test_ctrl_c_stops_the_innermost_work_alone() -> None:
    async def work(interrupts: Interrupts) -> int:
        with interrupts.stopping():
            press_ctrl_c()
            await trio.sleep_forever()
        return 4

    assert run(work) == 4


def test_what_can_stop_politely_is_asked_first_and_cancelled_when_asked_again() -> None:
    asked = []

    async def work(interrupts: Interrupts) -> int:
        with interrupts.stopping(lambda: asked.append("please")) as stop:
            press_ctrl_c()
            await trio.testing.wait_all_tasks_blocked()
            assert asked == ["please"]
            assert not stop.scope.cancel_called
            press_ctrl_c()
            await trio.sleep_forever()
        return 5

    assert run(work) == 5
    assert asked == ["please"]


def test_what_does_not_stop_when_asked_is_cancelled_after_a_while() -> None:
    async def work(interrupts: Interrupts) -> int:
        with interrupts.stopping(lambda: None):
            press_ctrl_c()
            await trio.sleep_forever()
        return 6

    assert run(work) == 6


def test_sigterm_ends_the_command_also_within_work_that_ctrl_c_stops() -> None:
    async def work(interrupts: Interrupts) -> int:
        with interrupts.stopping():
            signal.raise_signal(signal.SIGTERM)
            await trio.sleep_forever()
        return 0

    assert run(work) == 143


def test_an_error_comes_out_of_the_nurseries_as_itself() -> None:
    async def fail() -> None:
        raise ModelError("no such file")

    async def work(_: Interrupts) -> int:
        async with trio.open_nursery() as outer, trio.open_nursery() as inner:
            outer.start_soon(trio.sleep_forever)
            inner.start_soon(fail)
        return 0

    with pytest.raises(ModelError, match="no such file"):
        run(work)


SCRIPT = """
import threading, trio
from uma.cli.trio_run import run
async def work(interrupts):
    {block}
    return 0
run(work)
"""
STUCK = "await trio.to_thread.run_sync(lambda: (print('stuck', flush=True), threading.Event().wait()))"


@pytest.mark.parametrize(
    ("block", "signals"),
    [(f"with interrupts.abruptly(): {STUCK}", 1), (STUCK, 100), (f"with interrupts.stopping(): {STUCK}", 100)],
)
def test_even_a_computation_that_nothing_interrupts_can_be_left(block: str, signals: int) -> None:
    command = [sys.executable, "-c", SCRIPT.format(block=block)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"stuck\n"
        for _ in range(signals):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_SEC / signals)
        process.kill()
        told = process.communicate()[1]
    assert process.returncode == 130
    assert (told == b"uma: stopped while the model was loading\n") == ("abruptly" in block)
