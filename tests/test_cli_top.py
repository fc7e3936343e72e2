"""`uma top`: its state and its screen without a terminal, and both on a real server in a pseudo-terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import attrs
import pytest
from http_server import HttpServer, new_key, running_http
from pty_screen import Terminal
from rich.cells import cell_len
from rich.console import Console

from harness import (
    Raw,
    RunInProcessText,
    ask,
    clean_environ,
    running_server,
    short_directory,
    uma_command,
    until,
)
from uma.cli.top_screen import keys_in
from uma.cli.top_state import End, Event, Frame, KeyPress, Lost, Note, TopState, WatchedServer, reduce
from uma.cli.top_view import BLOCKS, draw, sparkline
from uma.metrics import LiveSeries
from uma.types import Activity, RunningRequest

WIDTHS = (60, 80, 100, 120, 160, 200)
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\u200b[bold red]x[/]"
"""A title change, an erased screen, a colour by a C1 control, a text turned around, an invisible character, markup."""


def request(number: int = 1, **fields: Any) -> RunningRequest:
    """A request that writes; `fields` say what is otherwise."""
    plain = RunningRequest(
        f"id-{number}", 0, 100, 40, 100, 10, 1_500.0, origin=f"prog{number} · socket · pid {number}", number=number
    )
    return attrs.evolve(plain, **{"ttft_ms": 120.0, "worst_gap_ms": 33.0, **fields})


def frame(at_sec: float = 0.0, *running: RunningRequest, **more: Any) -> Frame:
    """A server's frame; a second brings 50 generated tokens and 100 of prompts."""
    waiting = more.pop("waiting", ())
    assert isinstance(waiting, tuple)
    metrics = {
        "tokens_generated_total": round(50 * at_sec),
        "prefill_tokens_total": round(100 * at_sec),
        "service_ms_ewma": 8_000.0,
        "kv_cells_total": 1_000,
        "kv_cells_used": 600,
        "cache_evictable_size": 200,
        "prompt_tokens_total": 400,
        "cached_tokens_total": 300,
        "active_sequences": len(running),
        "ttft_ms_buckets": {"50": 0, "100": 20, "inf": 20},
    }
    activity, series = Activity(running, 0, len(waiting), 0, waiting), LiveSeries()
    before = {"tokens_generated_total": round(50 * at_sec) - 50, "prefill_tokens_total": round(100 * at_sec) - 100}
    series.figures(at_sec - 1, before, None, 4)
    figures = series.figures(at_sec, metrics, activity, 4)
    return attrs.evolve(Frame("/run/uma.sock", at_sec, "story", figures, metrics, activity, None, 77), **more)


def after(*events: Event, state: TopState | None = None) -> TopState:
    """The state behind all of them."""
    state = state or TopState()
    for event in events:
        state, _ = reduce(state, event)
    return state


def press(state: TopState, *keys: str) -> TopState:
    return after(*map(KeyPress, keys), state=state)


def text(state: TopState, columns: int = 120, lines: int | None = None) -> str:
    """The screen as plain text."""
    file = StringIO()
    Console(file=file, width=columns, color_system=None).print(draw(state, columns, lines))
    return file.getvalue()


# The state


def test_speeds_are_differences_between_frames() -> None:
    frames = [frame(at / 2, request(generated_tokens=10 + 4 * at)) for at in range(9)]
    state = after(*frames)
    (row,) = state.rows()
    assert row.tokens_per_sec == pytest.approx(8)
    assert state.servers["/run/uma.sock"].history("read_per_sec")[-4:] == pytest.approx([100] * 4)


def test_what_is_older_than_a_minute_is_forgotten_and_frames_do_not_pile_up() -> None:
    frames = after(*(frame(at / 4) for at in range(800))).servers["/run/uma.sock"].frames
    assert frames[0].at_sec > 800 / 4 - 61
    assert len(frames) <= 130


def test_a_server_started_anew_begins_anew() -> None:
    old = frame(100.0, metrics={"requests_total": 9, "tokens_generated_total": 5_000})
    new = frame(101.0, metrics={"requests_total": 1, "tokens_generated_total": 3})
    assert len(after(old, new).servers["/run/uma.sock"].frames) == 1


def test_the_machine_s_share_is_told_by_program_and_what_was_too_short_to_be_seen_is_the_rest() -> None:
    one, two = request(1), request(2, origin="other · socket · pid 2")
    later = (attrs.evolve(one, generated_tokens=40), attrs.evolve(two, generated_tokens=20))
    work = after(frame(0, one, two), frame(1, *later)).servers["/run/uma.sock"].work()
    # 50 generated and 100 read in that second, 40 of them of requests that were seen twice.
    assert work == {"prog1": 30, "other": 10, "(short)": 110}


def test_waiting_requests_have_a_place_and_an_estimated_start() -> None:
    waiting = (request(5, waits_for="slot", generated_tokens=0), request(6, waits_for="slot"))
    rows = after(frame(0, request(1), waiting=waiting)).rows()
    assert [(row.state, row.starts_in_ms) for row in rows] == [("writes", None), ("queue 1", 2_000), ("queue 2", 4_000)]
    mixed = tuple(attrs.evolve(each, model=model) for each, model in zip(waiting * 2, "abba", strict=True))
    several = attrs.evolve(frame(0, waiting=mixed), slot_every_ms={"a": 3_000.0, "b": None})
    assert [row.starts_in_ms for row in after(several).rows()] == [3_000, None, None, 6_000]


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"computed_tokens": 50}, "reads"),
        ({"waits_for": "prefix", "computed_tokens": 0}, "waits: prefix"),
        ({"is_preempted": True, "waits_for": "slot"}, "preempted"),
        ({"waits_for": "reader"}, "waits: reader"),
        ({}, "writes"),
    ],
)
def test_a_request_s_state_is_a_word_or_two(fields: dict[str, object], state: str) -> None:
    assert [row.state for row in after(frame(0, request(1, **fields))).rows()] == [state]


def test_requests_are_ordered_reversed_and_filtered() -> None:
    state = after(frame(0, request(1, worst_gap_ms=5.0), request(2, worst_gap_ms=50.0)))
    assert [row.request.number for row in state.rows()] == [1, 2]
    by_gap = press(state, "s", "s", "s")
    assert by_gap.sort == "gap"
    assert [row.request.number for row in by_gap.rows()] == [2, 1]
    assert [row.request.number for row in press(by_gap, "r").rows()] == [1, 2]
    filtered = press(state, "/", *"PROG2", "enter")
    assert [row.request.number for row in filtered.rows()] == [2]
    assert len(press(filtered, "escape").rows()) == 2


def test_letters_of_a_filter_are_no_commands() -> None:
    typed = press(after(frame(0, request(1))), "/", *"qxs", "backspace")
    assert (typed.filter, typed.mode, typed.sort) == ("qx", "filter", "start")


def test_what_is_paused_stays_while_the_figures_go_on() -> None:
    state = press(after(frame(0, request(1))), " ")
    state = after(frame(1, request(2)), state=state)
    assert [row.request.number for row in state.rows()] == [1]
    assert [row.request.number for row in press(state, " ").rows()] == [2]


def test_a_request_is_ended_only_after_a_yes() -> None:
    state = press(after(frame(0, request(1), request(2))), "down", "down", "x")
    assert state.mode == "confirm"
    assert reduce(state, KeyPress("y"))[1] == End("/run/uma.sock", 2, "id-2")
    for key in ("n", "enter", "escape", "q"):
        still, effect = reduce(state, KeyPress(key))
        assert (effect, still.mode, still.note) == (None, "list", "nothing was ended")


def test_without_a_choice_or_of_others_nothing_is_asked() -> None:
    assert "choose a request" in press(after(frame(0, request(1))), "x").note
    others = press(after(frame(0, request(1), own=frozenset({"id-9"}))), "down", "x")
    assert (others.mode, others.note) == ("list", "only its owner can end this request")
    mine = press(after(frame(0, request(1, id="id-9-3"), own=frozenset({"id-9"}))), "down", "x")
    assert mine.mode == "confirm"


def test_a_request_that_ends_while_it_is_asked_about_is_not_ended() -> None:
    state = press(after(frame(0, request(1))), "down", "x")
    assert reduce(after(frame(1), state=state), KeyPress("y"))[1] is None


# The screen


def full(*, lost: bool = False) -> TopState:
    """Every part of the screen has something to show."""
    waiting = (request(8, waits_for="slot", ttft_ms=None, generated_tokens=0, computed_tokens=0),)
    rows = [request(1, computed_tokens=45, generated_tokens=0), request(2, priority=1), request(3, priority=-1)]
    state = after(*(frame(at / 2, *rows, waiting=waiting) for at in range(20)))
    return after(Lost("/run/uma.sock", "the server does not answer"), state=state) if lost else state


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("lines", [None, 24])
def test_the_screen_fits_and_has_what_matters(columns: int, lines: int | None) -> None:
    shown = text(full(), columns, lines)
    assert max(map(cell_len, shown.splitlines())) <= columns
    assert lines is None or len(shown.splitlines()) <= lines
    wanted = ["story", "3 running", "1 waiting", "writing", "reading", "50 tok/s", "first token 75 ms"]
    wanted += ["from cache 75 %", "400 used, 200 cached of 1,000", "prog1", "reads", "45 %", "120 ms"]
    wanted += ["queue 1"]
    wanted += [] if columns < 80 else ["33 ms", "~2.0 s", "normal", "interactive", "background"]
    wanted += [] if columns < 200 else ["id-1"]
    assert [word for word in wanted if word not in shown] == []


@pytest.mark.parametrize("columns", WIDTHS)
def test_each_mode_fits(columns: int) -> None:
    chosen = press(full(), "down")
    for keys, word in ((("?",), "end the chosen request"), (("x",), "y"), (("/", "z"), "no request has this")):
        shown = text(press(chosen, *keys), columns, 24)
        assert max(map(cell_len, shown.splitlines())) <= columns
        assert word in shown
    assert "worst gap, prompt, program; reversed" in " ".join(text(press(chosen, "?"), columns, 20).split())
    for key in ("x ", "space ", "q "):
        assert key in text(chosen, columns, 20).splitlines()[-1]
    assert "PAUSED" in text(press(chosen, " "), columns, 24)
    assert "ended id-1" in text(after(Note("ended id-1"), state=chosen), columns, 24)
    assert "does not answer" in text(full(lost=True), columns, 24)


@pytest.mark.parametrize("lines", [12, 16, 20, 24])
@pytest.mark.parametrize("columns", WIDTHS)
def test_a_low_screen_s_help_has_every_key_and_says_that_there_is_more(columns: int, lines: int) -> None:
    shown = text(press(full(), "?"), columns, lines).splitlines()
    assert len(shown) <= lines
    assert [key for key in ("space or p", "x", "q or Ctrl-C") if not any(f"  {key} " in row for row in shown)] == []
    assert "more lines in a taller window" in shown[-2] or "seen one by one" in shown[-2]


@pytest.mark.parametrize("columns", WIDTHS)
def test_each_request_names_its_model_where_a_server_has_several(columns: int) -> None:
    state = after(
        frame(0, request(1, model="alpha"), request(2, model="beta"), model="2 of 2 models loaded: alpha, beta")
    )
    shown = text(state, columns)
    lines = [line for line in shown.splitlines() if line.startswith("prog")]
    assert [" alpha " in lines[1], " beta " in lines[2]] == [columns >= 80] * 2, shown
    assert max(map(cell_len, shown.splitlines())) <= columns
    assert " writes " in lines[1]
    assert "end the request of prog2 to beta (" in text(press(state, "down", "down", "x"), max(columns, 80), 24)
    assert "model" not in text(after(frame(0, request(1))), columns)


def test_a_request_s_key_is_told_beside_its_program() -> None:
    shown = text(after(frame(0, request(1, origin="curl · key alice · chat"))), 200)
    assert "curl · key alice " in shown
    assert "key" not in text(after(frame(0, request(1))), 200)


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_names_of_several_models_are_whole_on_as_many_lines_as_they_need(columns: int) -> None:
    names = ["qwen2.5-coder-0.5b-instruct-q4_k_m", "gemma-3-270m-q4_k_m", "SmolLM2-135M-Instruct.Q4_1 (loading, 40 %)"]
    shown = text(after(frame(0, request(1), model=f"3 of 3 models loaded: {', '.join(names)}")), columns)
    assert max(map(cell_len, shown.splitlines())) <= columns
    assert f"3 of 3 models loaded: {', '.join(names)}" in " ".join(shown.split())


@pytest.mark.parametrize("columns", WIDTHS)
def test_of_several_servers_idle_ones_have_a_line_and_requests_are_always_there(columns: int) -> None:
    idle = [frame(1, where=f"/run/{number}.sock", model=f"idle{number}") for number in range(3)]
    busy = frame(1, *(request(number) for number in range(1, 7)), where="/run/busy.sock")
    shown = text(after(*idle, busy), columns, 24).splitlines()
    assert len(shown) <= 24
    assert [sum(f"idle{number}" in line for line in shown) for number in range(3)] == [1, 1, 1]
    assert sum("writing" in line for line in shown) == 1, "the idle ones have no figures"
    assert all(any(line.startswith(f"prog{number}") for line in shown) for number in range(1, 7)), shown
    many = [frame(1, request(number), where=f"/run/{number}.sock", model=f"m{number}") for number in range(1, 9)]
    low = text(after(*many, Lost("/run/8.sock", "the server does not answer")), columns, 24)
    assert all(f"   m{number}   " in low for number in range(1, 9)), low
    assert low.count("prog") >= 7
    assert "the server does not answer   m8   /run/8.sock" in low


def test_a_server_s_line_has_its_state_and_its_socket_whatever_its_models_are_called() -> None:
    names = "4 of 5 models loaded: " + ", ".join(f"qwen2.5-coder-{number}b-instruct-q4_k_m" for number in range(4))
    several = frame(1, model=names, in_short="4 of 5 models loaded", where="/run/user/1000/uma.sock")
    long = frame(1, model="a-name-" * 20, where="/run/long.sock")
    shown = text(after(several, long), 80).splitlines()
    assert "idle   4 of 5 models loaded   /run/user/1000/uma.sock" in shown
    (line,) = [line for line in shown if line.endswith("…   /run/long.sock")]
    assert line.startswith("idle   a-name-") and cell_len(line) == 80


def test_the_usual_server_is_first_in_any_order_and_idle_others_fold_where_space_is_short() -> None:
    idle = [frame(1, where=f"/run/{number}.sock", model=f"idle{number}") for number in range(4)]
    busy = frame(1, *(request(number) for number in range(1, 9)), where="/run/busy.sock", model="busy")
    usual = frame(1, where="/run/usual.sock", model="usual")
    orders = ([*idle, busy, usual], [busy, usual, *idle[::-1]])
    one, other = (text(after(*frames, state=TopState(first="/run/usual.sock")), 80) for frames in orders)
    assert one == other
    lines = [line for line in one.splitlines() if line.startswith("idle")]
    assert [line.split()[1] for line in lines] == ["usual", "idle0", "idle1", "idle2", "idle3"]
    low = text(after(*orders[0], state=TopState(first="/run/usual.sock")), 80, 20)
    assert "4 others idle" in low and "idle   usual" in low and "idle0" not in low
    assert "(short)" in text(press(after(*orders[0]), "?"), 80, 24)


def test_a_low_screen_shows_the_chosen_request_and_says_how_many_are_missing() -> None:
    state = after(frame(0, *(request(number) for number in range(1, 41))))
    at_20 = press(state, *["down"] * 20)
    shown = text(at_20, 80, 16)
    assert len(shown.splitlines()) <= 16
    assert "prog20" in shown
    assert "more" in shown


@pytest.mark.parametrize("columns", WIDTHS)
def test_names_of_other_programs_do_nothing_to_the_screen(columns: int) -> None:
    nasty = request(1, origin=f"{HOSTILE} · socket · pid 1", id=HOSTILE)
    events = [frame(at, attrs.evolve(nasty, generated_tokens=at), model=HOSTILE, where=HOSTILE) for at in range(3)]
    state = press(after(*events, Lost(HOSTILE, HOSTILE), Note(HOSTILE)), "down")
    noted = after(Note(HOSTILE), state=state)
    for shown in (text(state, columns), text(press(state, "x"), columns, 24), text(noted, columns, 24)):
        assert not {each for each in shown if each != "\n" and not each.isprintable()}
        assert not set(shown) & set("\x1b\x07\x9b\u202e\u200b")
        assert max(map(cell_len, shown.splitlines())) <= columns


def test_a_sparkline_is_highest_where_the_values_are() -> None:
    line = sparkline([0.0] * 30 + [1.0] * 30, 10)
    assert line == BLOCKS[0] * 5 + BLOCKS[-1] * 5
    assert sparkline([0.0] * 60, 7) == BLOCKS[0] * 7
    assert len(sparkline(WatchedServer().history("x"), 25)) == 25


def test_escape_sequences_are_one_key_or_none() -> None:
    assert list(keys_in("\x1b[A\x1b[B\x1bOA")) == ["up", "down", "up"]
    assert list(keys_in("\x1b[1;5C\x1b[3~qé\x1b")) == ["q", "é", "escape"]
    assert list(keys_in("\r\x7f\x00")) == ["enter", "backspace"]


# On a real server


@pytest.fixture(scope="module")
def busy(tiny: Path) -> Iterator[HttpServer]:
    """A server with one slot, so that a second request waits."""
    with short_directory() as directory:
        keys = directory / "keys.toml"
        (directory / "key").write_text(new_key("mine", keys))
        new_key("other", keys)
        flags = ("--model", str(tiny), "--max-sequences", "1", "--http-keys", str(keys))
        with running_http(directory, *flags) as server:
            yield server


@pytest.fixture
def two(busy: HttpServer) -> Iterator[Raw]:
    """A session with a request that runs and one that waits."""
    with busy.process.connect() as raw:
        raw.hello()
        raw.send(ask("first", max_tokens=30_000, ignore_eos=True), ask("second", max_tokens=30_000, ignore_eos=True))
        raw.until_token("first")
        yield raw


def top(busy: HttpServer, columns: int = 100, lines: int = 30) -> Terminal:
    command = uma_command("top", "--socket", str(busy.process.socket))
    return Terminal(command, clean_environ(), columns=columns, lines=lines)


def in_order(terminal: Terminal) -> bool:
    """Whether the terminal is as a shell wants it."""
    return terminal.echoes and terminal.is_cursor_shown and terminal.raw.rstrip().endswith(b"\x1b[?1049l")


def test_keys_resize_and_leaving_on_a_real_terminal(busy: HttpServer, two: Raw) -> None:
    with top(busy) as terminal:
        terminal.wait_for("1 running · 1 waiting")
        terminal.wait_until(lambda: any("queue 1" in line for line in terminal.screen), "the queue")
        assert not terminal.echoes
        assert not terminal.is_cursor_shown
        terminal.type("s")
        terminal.wait_for("order: speed")
        terminal.type("?")
        terminal.wait_for("end the chosen request")
        terminal.type("?/zzz\r")
        terminal.wait_for("no request has this")
        terminal.resize(60, 20)
        terminal.wait_until(lambda: "? keys  q leave" in "\n".join(terminal.screen), "the narrow screen")
        assert max(map(cell_len, terminal.screen)) <= 60
        terminal.type("q")
        assert terminal.wait() == 0
        assert in_order(terminal)


def test_a_request_is_ended_after_asking_and_not_before(busy: HttpServer, two: Raw) -> None:
    with top(busy) as terminal:
        terminal.wait_for("1 running · 1 waiting")
        terminal.type("\x1b[B")
        terminal.type("x")
        terminal.wait_for("end the request of")
        terminal.type("n")
        terminal.wait_for("nothing was ended")
        terminal.type("x")
        terminal.wait_until(lambda: any("y: yes" in line for line in terminal.screen), "the question")
        terminal.type("y")
        terminal.wait_for("ended first")
        assert two.last_of("first")["code"] == "E_RUNTIME_ENDED"
        terminal.type("q")
        assert terminal.wait() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_terminal_is_put_right_by_every_signal(busy: HttpServer, number: signal.Signals, code: int) -> None:
    with top(busy) as terminal:
        terminal.wait_for("0 running")
        if number == signal.SIGINT:
            terminal.type("\x03")
        else:
            terminal.signal(number)
        assert terminal.wait() == code
        assert in_order(terminal)


def test_a_server_that_goes_is_told_and_one_that_comes_back_is_followed(socket_dir: Path, tiny: Path) -> None:
    path = socket_dir / "s"
    command = uma_command("top", "--socket", str(path))
    with running_server(path, "--model", str(tiny)) as server:
        terminal = Terminal(command, clean_environ(), columns=80, lines=24)
        with terminal:
            terminal.wait_for("0 running")
            server.stop()
            terminal.wait_until(lambda: any("does not answer" in line for line in terminal.screen), "that it is gone")
            with running_server(path, "--model", str(tiny)):
                terminal.wait_until(lambda: "does not answer" not in " ".join(terminal.screen), "its return")
                terminal.type("q")
                assert terminal.wait() == 0


def test_without_a_terminal_it_is_one_snapshot(busy: HttpServer, two: Raw, uma_told: RunInProcessText) -> None:
    done = uma_told("top", "--socket", str(busy.process.socket))
    assert done.returncode == 0
    assert "1 running · 1 waiting" in done.stdout
    assert "\x1b" not in done.stdout
    (told,) = json.loads(uma_told("top", "--json", "--socket", str(busy.process.socket)).stdout)
    assert [(each["id"], each["place"]) for each in told["requests"]] == [("first", None), ("second", 0)]
    assert told["requests"][0]["tokens_per_second"] > 0
    assert told["requests"][0]["pid"] == os.getpid()
    assert told["pid"] == busy.process.pid
    assert told["rss_bytes"] > 1_000_000


def test_what_is_cached_of_a_request_is_told_once_it_is_known(
    busy: HttpServer, two: Raw, uma_told: RunInProcessText
) -> None:
    waits, runs = (uma_told("explain", id, "--socket", str(busy.process.socket)).stdout for id in ("second", "first"))
    assert "no slot is free" in waits
    assert "Cache:" not in waits
    assert "Cache:" in runs


def test_several_models_are_watched_none_is_loaded_by_that_and_their_requests_are_ended(
    tiny: Path, uma_told: RunInProcessText
) -> None:
    with short_directory() as directory, short_directory() as models:
        for name in ("alpha", "beta"):
            (models / f"{name}.gguf").symlink_to(tiny)
        with running_http(directory, "--models", "alpha,beta", UMA_MODELS=str(models)) as server:
            command = uma_command("top", "--socket", str(server.process.socket))
            with Terminal(command, clean_environ(), columns=100, lines=30) as terminal:
                terminal.wait_for("0 of 2 models loaded")
                asked = {
                    "no request of yours is known": ["explain"],
                    "no model is loaded": ["trace", str(directory / "t")],
                }
                for said, words in asked.items():
                    told = uma_told(*words, "--socket", str(server.process.socket))
                    assert (told.returncode, said in told.stderr) == (2, True)
                with server.connect() as raw:
                    body = {"model": "beta", "prompt": "a", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
                    raw.send("POST", "/v1/completions", body, user_agent="watched/1")
                    assert raw.head()[0] == 200
                    terminal.wait_for("1 of 2 models loaded: beta")
                    terminal.wait_for("watched/1")
                    over_http = uma_told("top", "--once", "--url", server.url).stdout
                    assert "1 of 2 models loaded: beta" in over_http
                    terminal.type("jx")
                    terminal.wait_until(
                        lambda: any(" to beta (" in line and "y: yes" in line for line in terminal.screen),
                        "the question",
                    )
                    terminal.type("y")
                    terminal.wait_for("ended ")
                    assert b"the request was ended" in b"".join(raw.chunks())
                terminal.type("q")
                assert terminal.wait() == 0


def test_where_no_server_is_it_says_so_and_fails(socket_dir: Path, uma_told: RunInProcessText) -> None:
    none = uma_told("top", "--socket", str(socket_dir / "none"))
    assert (none.returncode, none.stdout) == (1, "")
    assert "no server listens there" in none.stderr
    usual = uma_told("top", XDG_RUNTIME_DIR=str(socket_dir))
    assert usual.returncode == 1 or "uma top" in usual.stdout  # other servers of this user may run


def test_over_http_a_key_s_holder_sees_all_and_ends_its_own(busy: HttpServer, uma_told: RunInProcessText) -> None:
    key_file = busy.process.socket.parent / "key"
    key = key_file.read_text().strip()
    refused = uma_told("top", "--once", "--url", busy.url)
    assert refused.returncode == 1
    assert "answers 401; give a file with the key as --key-file" in refused.stderr
    with busy.connect() as raw:
        body = {"prompt": "x", "max_tokens": 30_000, "ignore_eos": True}
        raw.send("POST", "/v1/completions", body, authorization=f"Bearer {key}")
        command = uma_command("top", "--url", busy.url, "--key-file", str(key_file))
        with Terminal(command, clean_environ(), columns=100, lines=30) as terminal:
            terminal.wait_for("1 running")
            terminal.type("jx")
            terminal.wait_until(lambda: any("y: yes" in line for line in terminal.screen), "the question")
            terminal.type("y")
            assert raw.answer().status == 410
            terminal.type("q")
            assert terminal.wait() == 0
            assert in_order(terminal)


def test_a_program_with_a_hostile_name_is_shown_and_obeyed_in_nothing(busy: HttpServer) -> None:
    """The kernel has a program's name as the program itself has set it."""
    named = (
        "import json, socket, struct, sys\n"
        "open('/proc/self/comm', 'w').write('\\x1b[2J\\x1b]0;x\\x07evil')\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "m = json.dumps({'id': '\\x1b[31mred', 'prompt': 'x', 'max_tokens': 30000, 'ignore_eos': True}).encode()\n"
        "s.sendall(struct.pack('<I', len(m)) + m)\n"
        "while s.recv(65536): pass\n"
    )
    child = subprocess.Popen([sys.executable, "-c", named, str(busy.process.socket)], env=clean_environ())
    try:
        until(busy.process.metrics, lambda told: told["active_sequences"] == 1)
        with top(busy, 200) as terminal:
            terminal.wait_for("evil")
            assert b"\x1b]0;" not in terminal.raw
            assert "␛" in terminal.text
            terminal.type("q")
            assert terminal.wait() == 0
    finally:
        child.kill()
        child.wait()
