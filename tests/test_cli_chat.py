"""`uma chat`: a conversation at a terminal and in a pipe, with everything that can happen to one."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from projectors import LLAVA_TOKENS, png, write_projector
from pty_screen import WIDTHS, Terminal, check_screen
from script_model import write_script_model

from harness import (
    PATIENCE_SEC,
    RunInProcessText,
    ServerProcess,
    clean_environ,
    run_to_end,
    running_server,
    short_directory,
    uma_command,
    until,
)
from models import write_model
from uma.cli.chat import COMMANDS
from uma.cli.conversation import ChatFileError, ChatHistory, ChatTurn
from uma.cli.editor import MAX_HISTORY_BYTES
from uma.cli.pictures import ChatPicture
from uma.llama.header import read
from uma.types import Message

LONG = ("--ignore-eos",)
SHORT = ("--ignore-eos", "--max-tokens", "12")
STORY = "".join(" ".join(f"{word}{n:02}" for n in range(40)) + ".\n\n" for word in ("fox", "owl", "hare", "bear"))
"""Paragraphs of several lines, in which no word comes twice."""
COLOUR = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
"""Whatever gives letters or their ground a colour."""


def environ_of(home: Path, **more: str) -> dict[str, str]:
    """The variables of a person who lives in `home`."""
    plain = {name: value for name, value in clean_environ().items() if not name.startswith(("XDG_STATE", "NO_COLOR"))}
    return plain | {"HOME": str(home), "TERM": "xterm-256color"} | more


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home directory."""
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@contextmanager
def chat(
    server: ServerProcess, home: Path, *arguments: str, columns: int = 80, lines: int = 24, **environ: str
) -> Iterator[Terminal]:
    """A chat at a terminal, ready for the first question."""
    command = uma_command("chat", "--socket", str(server.socket), *arguments)
    with Terminal(command, environ_of(home, **environ), columns=columns, lines=lines, cwd=str(home)) as terminal:
        wait_for_prompt(terminal)
        yield terminal


def wait_for_prompt(terminal: Terminal) -> None:
    """Wait until a line can be typed."""
    terminal.wait_until(
        lambda: terminal.is_cursor_shown and last_line(terminal) == ">" and not terminal.echoes, "the prompt"
    )


def wait_for_answer(terminal: Terminal) -> None:
    """Wait until an answer is under way. The dots that stand for it can be gone before the screen is looked at."""
    terminal.wait_until(lambda: "…".encode() in terminal.raw, "an answer")


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """A block in which the server stands still."""
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


def last_line(terminal: Terminal) -> str:
    return next((line for line in reversed(terminal.screen) if line), "")


def ask(terminal: Terminal, question: str) -> None:
    """A question and its whole answer."""
    before = terminal.text.count("first after")
    terminal.type(question + "\r")
    terminal.wait_for("first after", before + 1)
    wait_for_prompt(terminal)


def tell(terminal: Terminal, command: str, answer: str) -> None:
    """A command of the chat and what it says."""
    before = terminal.text.count(answer)
    terminal.type(command + "\r")
    terminal.wait_for(answer, before + 1)
    wait_for_prompt(terminal)


def questions(terminal: Terminal, home: Path) -> list[str]:
    """Those that are part of the conversation now."""
    tell(terminal, "/save so-far.json", "Saved to so-far.json")
    return [turn.question for turn in ChatHistory.load(home / "so-far.json").turns]


def begin_a_story(terminal: Terminal) -> None:
    """A question whose answer goes on for long, and some of the answer."""
    n_words = len(terminal.text.split())
    terminal.type("Tell me a story\r")
    terminal.wait_until(lambda: len(terminal.text.split()) > n_words + 20, "some of the answer")


def suspend(terminal: Terminal) -> None:
    """Ctrl-Z during an answer. All that was written before is on the screen: the cursor is shown last."""
    terminal.type("\x1a")
    until(psutil.Process(terminal.process.pid).status, lambda state: state == psutil.STATUS_STOPPED)
    terminal.wait_until(lambda: terminal.is_cursor_shown, "the cursor")


def go_on(terminal: Terminal) -> None:
    """What the shell's `fg` does, and some more of the answer."""
    n_words = len(terminal.text.split())
    terminal.signal(signal.SIGCONT)
    terminal.wait_until(lambda: len(terminal.text.split()) > n_words + 20, "more of the answer")


# At a terminal.


def test_a_chat_says_which_server_answers_and_how_fast_it_was(server: ServerProcess, home: Path) -> None:
    with chat(server, home, *SHORT) as terminal:
        for words in ("parameters", "Q8_0", "context 2,048 tokens", "served", "demonstration model", "/help"):
            assert words in terminal.text
        ask(terminal, "Tell me a story")
        assert "tokens/s · 12 tokens · first after" in terminal.text
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_ctrl_c_stops_the_answer_and_not_the_chat(server: ServerProcess, home: Path) -> None:
    with chat(server, home, *LONG) as terminal:
        begin_a_story(terminal)
        terminal.type("\x03")
        terminal.wait_for("Stopped; the conversation goes on from here.")
        wait_for_prompt(terminal)
        until(server.metrics, lambda metrics: metrics["active_sequences"] == 0)
        tell(terminal, "/stats", ", stopped")
        run_to_end(*uma_command("pause", "--socket", str(server.socket), "--for", "60s"))
        terminal.type("and now?\r")
        terminal.wait_for("the server is paused")
        terminal.type("\x03")
        terminal.wait_for("Stopped before the first word. /retry asks the question again")
        run_to_end(*uma_command("resume", "--socket", str(server.socket)))
        wait_for_prompt(terminal)
        tell(terminal, "/undo", "Taken back: and now?")
        terminal.type("/quit\r")
        assert terminal.wait() == 0


def test_ctrl_z_during_an_answer_leaves_the_shell_a_terminal_as_it_should_be(server: ServerProcess, home: Path) -> None:
    with chat(server, home, *LONG) as terminal:
        begin_a_story(terminal)
        assert not terminal.echoes
        assert not terminal.drops_output
        suspend(terminal)
        assert terminal.echoes
        assert terminal.drops_output
        go_on(terminal)
        terminal.type("\x03")
        terminal.wait_for("Stopped; the conversation goes on from here.")


def test_an_answer_that_is_suspended_and_resized_and_stopped_is_left_once(
    socket_dir: Path, home: Path, tmp_path: Path
) -> None:
    model = write_script_model(tmp_path / "endless.gguf", STORY, context_length=32_768, is_endless=True)
    with (
        running_server(socket_dir / "uma.sock", "--model", str(model)) as server,
        # As a parent leaves it that had another terminal: what is drawn again and again goes by the terminal there is.
        chat(server, home, columns=100, COLUMNS="80", LINES="10") as terminal,
    ):
        begin_a_story(terminal)
        for columns in (40, 100):
            suspend(terminal)
            terminal.resize(columns, 24)
            go_on(terminal)
        terminal.type("\x03")
        terminal.wait_for("Stopped; the conversation goes on from here.")
        wait_for_prompt(terminal)
        screen = terminal.text
        tell(terminal, "/save so-far.json", "Saved to so-far.json")
    (turn,) = ChatHistory.load(home / "so-far.json").turns
    said, at = " ".join(turn.answer.split()), 0
    left = screen.partition("> Tell me a story")[2].partition("Stopped;")[0]
    # Each line goes on behind the one before, of which a narrower screen may have cut the end off. A line that is left
    # twice is found one story later, and glued ones are not found at all.
    for line in filter(None, (" ".join(line.split()) for line in left.splitlines())):
        begins = said.find(line, at)
        assert begins >= 0, f"{line!r} is left twice, or was never said. The screen:\n{screen}"
        at = begins + len(line)
    assert at == len(said), f"the answer ends otherwise, with {said[-200:]!r}. The screen:\n{screen}"


def test_a_model_without_a_template_does_not_play_the_person_s_part(
    socket_dir: Path, home: Path, tmp_path: Path
) -> None:
    says = [" The fox", " sleeps.", "\n\nUser: And", " the owl?", "\n\nAssistant: The", " owl wakes.\n\nUser: Good."]
    model = write_script_model(tmp_path / "base.gguf", says, template=None, is_endless=True)
    with (
        running_server(socket_dir / "uma.sock", "--model", str(model)) as server,
        chat(server, home) as terminal,
    ):
        for question in ("What does the fox do?", "And now?"):
            ask(terminal, question)
        tell(terminal, "/save so-far.json", "Saved to so-far.json")
        assert "owl" not in terminal.text
    saved = ChatHistory.load(home / "so-far.json")
    assert [turn.answer.strip() for turn in saved.turns] == ["The fox sleeps."] * 2


def test_ctrl_c_at_the_prompt_drops_the_line_and_several_lines_are_one_question(
    server: ServerProcess, home: Path
) -> None:
    with chat(server, home, *SHORT) as terminal:
        terminal.type("something\x03")
        terminal.wait_for("Ctrl-D or /quit leaves.")
        wait_for_prompt(terminal)
        ask(terminal, "hello")
        terminal.type("first line\x1b\rsecond line")
        terminal.wait_for("  second line")
        ask(terminal, "")
        assert questions(terminal, home) == ["hello", "first line\nsecond line"]
        tell(terminal, "/undo", "Taken back: first line second line")
        terminal.type('"""/a block\r\rof lines\r')
        terminal.wait_for("  of lines")
        ask(terminal, '"""')
        assert questions(terminal, home) == ["hello", " /a block\n\nof lines\n".rstrip()]


def test_the_conversation_can_be_saved_taken_back_and_loaded(server: ServerProcess, home: Path) -> None:
    with chat(server, home, *SHORT, "--system", "Be kind.") as terminal:
        ask(terminal, "first question")
        ask(terminal, "second question")
        tell(terminal, "/save talk.json", "Saved to talk.json")
        tell(terminal, "/undo", "Taken back: second question")
        tell(terminal, "/undo", "Taken back: first question")
        tell(terminal, "/undo", "There is nothing to take back.")
        tell(terminal, "/load talk.json", "2 turns from talk.json")
        tell(terminal, "/system", "Instructions: Be kind.")
        tell(terminal, "/system -", "There are no instructions.")
        tell(terminal, "/reset", "The conversation starts over.")
        tell(terminal, "/undo", "There is nothing to take back.")
    saved = ChatHistory.load(home / "talk.json")
    assert [turn.question for turn in saved.turns] == ["first question", "second question"]
    assert saved.system == "Be kind."
    assert all(turn.answer for turn in saved.turns)


def test_no_other_chats_file_is_overwritten_unasked(server: ServerProcess, home: Path) -> None:
    ChatHistory("Be old.").save(home / "old.json")
    with chat(server, home, *SHORT) as terminal:
        ask(terminal, "first question")
        tell(terminal, "/save old.json", "old.json: already exists, with another chat; `/save! old.json` overwrites it")
        assert ChatHistory.load(home / "old.json").system == "Be old."
        tell(terminal, "/save new.json", "Saved to new.json")
        tell(terminal, "/system Be new.", "Instructions: Be new.")
        tell(terminal, "/save", "Saved to new.json")
        tell(terminal, "/save new.json", "Saved to new.json")
        assert ChatHistory.load(home / "new.json").system == "Be new."
        tell(terminal, "/save! old.json", "Saved to old.json")
        assert [turn.question for turn in ChatHistory.load(home / "old.json").turns] == ["first question"]
        tell(terminal, "/reset", "The conversation starts over.")
        tell(terminal, "/save", "Saved to uma-chat-")
        assert ChatHistory.load(home / "old.json").turns, "the new conversation has a file of its own"


def test_a_command_typed_wrong_is_answered_with_the_nearest_and_does_nothing(server: ServerProcess, home: Path) -> None:
    with chat(server, home) as terminal:
        tell(terminal, "/hlep", "no such command: /hlep; did you mean /help?")
        tell(terminal, "/load", "which file? /load FILE")
        tell(terminal, "/save /etc", "/etc: is a directory; name a file in it, such as /etc/chat.json")
        tell(terminal, "/load nowhere.json", "nowhere.json: cannot be read: No such file or directory")
        tell(terminal, "/help", "Esc Enter begins a new line")
        for name in COMMANDS:
            assert name in terminal.text
        tell(terminal, "/model", "context 2,048 tokens")
        other = write_script_model(home / "other.gguf", [" Yes."])
        tell(terminal, f"/model {other}", "this server has only builtin;")
        assert f"{other.name}`takesit" in "".join(terminal.text.split())
        tell(terminal, "/model nowhere", "this server has only builtin; nowhere: model not found")
        for typed, meant in (("/retri", "/retry"), ("/resett", "/reset"), ("/regenrate", "/regenerate")):
            tell(terminal, typed, f"no such command: {typed}; did you mean {meant}?")
            assert "starts over" not in terminal.text and "Asked again" not in terminal.text
        tell(terminal, "/temperature 0.7", "0.7")
        tell(terminal, "/temperature", "/set temperature: which value?")
        tell(terminal, "/clear", "The conversation starts over.")


def test_history_is_kept_from_chat_to_chat_for_its_owner_alone(server: ServerProcess, home: Path) -> None:
    with chat(server, home, *SHORT) as terminal:
        ask(terminal, "a question to remember")
    file = home / ".local" / "state" / "uma" / "chat-history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with chat(server, home, *SHORT) as terminal:
        terminal.type("\x1b[A")
        terminal.wait_for("> a question to remember")


def test_a_home_that_cannot_be_written_costs_only_the_history(server: ServerProcess, home: Path) -> None:
    (home / ".local").write_text("a file where a directory should be")
    with chat(server, home, *SHORT) as terminal:
        ask(terminal, "hello")
        terminal.type("\x1b[A")
        terminal.wait_for("> hello", 2)
        terminal.type("\x15/quit\r")
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.text


def test_the_chat_works_at_40_columns_and_when_the_window_changes(server: ServerProcess, home: Path) -> None:
    with chat(server, home, *LONG, columns=40, lines=12) as terminal:
        begin_a_story(terminal)
        terminal.resize(30, 8)
        terminal.resize(100, 30)
        terminal.type("\x03")
        terminal.wait_for("Stopped; the conversation")
        wait_for_prompt(terminal)
        terminal.resize(20, 5)
        terminal.type("/quit\r")
        assert terminal.wait() == 0


def test_what_is_typed_during_an_answer_is_there_afterwards_and_not_in_it(server: ServerProcess, home: Path) -> None:
    with chat(server, home, "--max-tokens", "400", *LONG) as terminal:
        terminal.type("Tell me a story\r")
        wait_for_answer(terminal)
        terminal.type("zzqzz")
        terminal.wait_for("> zzqzz")
        assert terminal.text.count("zzqzz") == 1


@pytest.mark.parametrize("is_answering", [False, True])
def test_a_terminal_that_goes_away_ends_the_chat(is_answering: bool, server: ServerProcess, home: Path) -> None:
    with chat(server, home, *LONG) as terminal:
        if is_answering:
            begin_a_story(terminal)
        terminal.hang_up()
        assert terminal.process.wait(PATIENCE_SEC) == 129
    assert server.settled()["active_sequences"] == 0


@pytest.mark.parametrize("is_answering", [False, True])
def test_sigterm_leaves_the_terminal_as_it_was(is_answering: bool, server: ServerProcess, home: Path) -> None:
    with chat(server, home, *LONG) as terminal:
        if is_answering:
            begin_a_story(terminal)
        terminal.signal(signal.SIGTERM)
        terminal.process.wait(PATIENCE_SEC)
        assert terminal.echoes
        assert terminal.wait() == 143
        assert terminal.is_cursor_shown
        assert "Traceback" not in terminal.text


def test_a_server_that_goes_away_costs_an_answer_and_not_the_conversation(socket_dir: Path, home: Path) -> None:
    path = socket_dir / "uma.sock"
    with running_server(path) as server, chat(server, home, *SHORT) as terminal:
        ask(terminal, "remember this")
        server.process.kill()
        server.wait()
        tell(terminal, "/retry", "The conversation is kept.")  # asked again in vain, it keeps its answer
        assert questions(terminal, home) == ["remember this"]
        assert ChatHistory.load(home / "so-far.json").turns[0].answer
        tell(terminal, "another question", "The conversation is kept.")
        with running_server(path) as again:
            before = terminal.text.count("served")
            ask(terminal, "and now?")
            assert terminal.text.count("served") == before + 1
            tell(terminal, "/undo", "Taken back: and now?")
            tell(terminal, "/undo", "Taken back: remember this")
            assert again.metrics()["tokens_generated_total"] == 12


def test_a_session_that_the_server_closed_meanwhile_is_opened_again_without_a_word(
    socket_dir: Path, home: Path
) -> None:
    idle = ("--idle-timeout-sec", "0.2")
    with running_server(socket_dir / "uma.sock", *idle) as server, chat(server, home, *SHORT) as terminal:
        ask(terminal, "hello")
        until(server.metrics, lambda metrics: metrics["active_sessions"] == 1)  # this question's own
        ask(terminal, "and now?")
        assert terminal.text.count("served") == 1
        tell(terminal, "/undo", "Taken back: and now?")
        tell(terminal, "/undo", "Taken back: hello")


def test_a_conversation_that_outgrows_the_context_says_what_to_do(server: ServerProcess, home: Path) -> None:
    with chat(server, home, *LONG, "--max-tokens", "100") as terminal:
        ask(terminal, "hello")
        (home / "long.json").write_text(
            json.dumps(
                {"format": "uma-chat", "version": 1, "system": None, "turns": [{"user": "x " * 2500, "assistant": ""}]}
            )
        )
        tell(terminal, "/load long.json", "1 turn from long.json")
        tell(terminal, "more", "The conversation has become too long; the question was not kept.")
        assert len(questions(terminal, home)) == 1, "what could not be answered is no part of it"
        tell(terminal, "/undo", "Taken back")
        ask(terminal, "hello again")
        assert questions(terminal, home) == ["hello again"]


def test_a_chat_that_keeps_going_leaves_out_the_oldest_turns_and_says_so(server: ServerProcess, home: Path) -> None:
    turns = [{"user": f"{n} " + "x " * 350, "assistant": "yes"} for n in range(4)]
    (home / "long.json").write_text(json.dumps({"format": "uma-chat", "version": 1, "system": None, "turns": turns}))
    with chat(server, home, *SHORT, "--load", "long.json", "--keep-going") as terminal:
        tell(terminal, "what now?", "messages of the oldest turns were left out")


def test_a_full_context_goes_on_without_the_oldest_turns_and_asks_again(server: ServerProcess, home: Path) -> None:
    turns = [{"user": f"{n} " + "x " * 350, "assistant": "yes"} for n in range(4)]
    chat_file = {"format": "uma-chat", "version": 1, "system": "Be kind.", "turns": turns}
    (home / "long.json").write_text(json.dumps(chat_file))
    with chat(server, home, *SHORT, "--load", "long.json") as terminal:
        tell(terminal, "what now?", "The conversation has become too long")
        terminal.type("/shorten\r")
        terminal.wait_for("messages of the oldest turns were left out")
        terminal.wait_for("first after")
        wait_for_prompt(terminal)
        assert [question[:2] for question in questions(terminal, home)] == ["0 ", "1 ", "2 ", "3 ", "wh"]
        assert ChatHistory.load(home / "so-far.json").system == "Be kind."


def test_a_long_question_wraps_between_words_and_is_edited_where_the_cursor_is(
    server: ServerProcess, home: Path
) -> None:
    with chat(server, home, *SHORT, columns=40) as terminal:
        terminal.type("How does the cache of a language model's prefixes work? 日本語の文も折り返されます")
        terminal.wait_for("折り返されます")
        *_, first, second, third = filter(None, terminal.screen)
        assert first.rstrip() == "> How does the cache of a language"
        assert second.rstrip() == "  model's prefixes work?" and third.startswith("  日本語")
        terminal.type("\x1b[D" * 14 + " today?\r")
        terminal.wait_for("first after")
        wait_for_prompt(terminal)
        (asked,) = questions(terminal, home)
        assert asked == "How does the cache of a language model's prefixes work? today? 日本語の文も折り返されます"


def test_a_pasted_tab_is_shown_as_blanks_and_sent_as_a_tab(server: ServerProcess, home: Path) -> None:
    with chat(server, home, *SHORT) as terminal:
        terminal.type("\x1b[200~def f():\n\treturn 1\x1b[201~")
        terminal.wait_for("return 1")
        assert not any("^I" in row for row in terminal.screen)
        terminal.type("\r")
        terminal.wait_for("Cut at the limit of max_tokens; /set max_tokens N changes it.")
        wait_for_prompt(terminal)
        assert questions(terminal, home) == ["def f():\n\treturn 1"]


def test_a_chat_with_room_is_not_shortened(server: ServerProcess, home: Path) -> None:
    with chat(server, home, *SHORT) as terminal:
        tell(terminal, "/shorten", "There is nothing to leave out: the context has room.")
        ask(terminal, "Say yes.")
        terminal.type("/shorten\r")
        terminal.wait_for("There is nothing to leave out: the context has room.", times=2)
        assert "From now on" not in terminal.text


def test_what_was_shown_of_an_answer_outlives_its_server(socket_dir: Path, home: Path) -> None:
    with running_server(socket_dir / "uma.sock") as server, chat(server, home, *LONG) as terminal:
        begin_a_story(terminal)
        server.process.kill()
        terminal.wait_for("The conversation is kept, and so is the answer up to here.")
        assert "start it with `uma run --socket /" in " ".join(terminal.text.split())
        wait_for_prompt(terminal)
        tell(terminal, "/stats", "There are no figures of the last answer: it was cut off")
        tell(terminal, "/save so-far.json", "Saved to so-far.json")
    (turn,) = ChatHistory.load(home / "so-far.json").turns
    assert turn.question == "Tell me a story"
    assert len(turn.answer.split()) > 10


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose model sees, and says the same of every picture."""
    folder = tmp_path_factory.mktemp("seeing")
    model = write_script_model(folder / "sees.gguf", "I see a thing.")
    write_projector(folder / "mmproj.gguf", embed=read(model).metadata["llama.embedding_length"])
    flags = ("--model", str(model), "--max-frame-bytes", str(2**20))
    with short_directory() as directory, running_server(directory / "uma.sock", *flags) as process:
        yield process


def prompt_tokens(terminal: Terminal) -> int:
    """Those of the last question, with all that was before it."""
    before = terminal.text.count("of them cached")
    tell(terminal, "/stats", "of them cached")
    return int(re.findall(r"([\d,]+) tokens, [\d,]+ of them cached", terminal.text)[before].replace(",", ""))


def test_a_picture_goes_with_the_next_question_and_stays_in_the_conversation(seeing: ServerProcess, home: Path) -> None:
    cat, dog = home / "my cat.png", home / "dog.png"
    cat.write_bytes(png(40, 30))
    dog.write_bytes(png(50, 20))
    with chat(seeing, home) as terminal:
        assert "/image FILE shows it a picture." in " ".join(terminal.text.split())
        tell(terminal, "/image my cat.png", "my cat.png (40 x 30, ")
        tell(terminal, "/image -", "No picture goes with the next question.")
        ask(terminal, "What is it?")
        plain = prompt_tokens(terminal)
        tell(terminal, "/undo", "Taken back")
        tell(terminal, str(cat).replace(" ", "\\ "), "my cat.png (40 x 30, ")  # as a terminal puts what is dropped
        tell(terminal, f"'{dog}'", "dog.png (50 x 20, ")
        tell(terminal, "/image", "With the next question: my cat.png")
        ask(terminal, "What is it?")
        assert prompt_tokens(terminal) == plain + 2 * LLAVA_TOKENS
        tell(terminal, "/retry", "Asked again: What is it?")
        terminal.wait_for("first after", 3)
        wait_for_prompt(terminal)
        ask(terminal, "Sure?")
        assert prompt_tokens(terminal) > plain + 2 * LLAVA_TOKENS
        tell(terminal, "/save so-far.json", "Saved to so-far.json")
    turns = ChatHistory.load(home / "so-far.json").turns
    assert [[each.name for each in turn.pictures] for turn in turns] == [["my cat.png", "dog.png"], []]
    assert turns[0].pictures[0].data == cat.read_bytes()
    done = piped(seeing, "And this?\n", "--load", str(home / "so-far.json"))
    assert (done.returncode, done.stdout[:14]) == (0, "I see a thing."), done.stderr


def test_what_is_no_picture_or_cannot_be_sent_is_told_in_one_sentence(
    seeing: ServerProcess, server: ServerProcess, home: Path
) -> None:
    (home / "notes.txt").write_text("Olga")
    (home / "cat.png").write_bytes(png(40, 30))
    (home / "large.png").write_bytes(png(2_400, 800))
    told = {
        "/image none.png": "none.png: cannot be read: No such file or directory",
        "/image .": ".: is no file",
        "/image notes.txt": "notes.txt: has an unrecognized format; send PNG, JPEG, GIF or BMP",
        "/image large.png": "the server takes 1,048,576 (--max-frame-bytes); send a smaller one",
    }
    with chat(seeing, home, columns=200) as terminal:
        for command, sentence in told.items():
            tell(terminal, command, sentence)
        tell(terminal, "/image", "No picture goes with the next question.")
        ask(terminal, "notes.txt")  # no picture's path
    with chat(server, home, columns=200) as terminal:
        for line in ("/image cat.png", str(home / "cat.png")):
            tell(
                terminal,
                line,
                "this model does not support image input; one that has a projector",
            )


def test_a_question_is_asked_again_for_another_answer(server: ServerProcess, home: Path) -> None:
    with chat(server, home, *SHORT, "--temperature", "1.5") as terminal:
        tell(terminal, "/retry", "There is no question to ask again.")
        ask(terminal, "first")
        ask(terminal, "second")
        terminal.type("/retry\r")
        terminal.wait_for("Asked again: second")
        terminal.wait_for("first after", 3)
        wait_for_prompt(terminal)
        assert questions(terminal, home) == ["first", "second"]


def test_lines_that_are_typed_while_a_model_is_waited_for_are_lines_of_their_own_and_shown_once(
    server: ServerProcess, home: Path
) -> None:
    command = uma_command("chat", "--socket", str(server.socket))
    with stopped(server), Terminal(command, environ_of(home), cwd=str(home)) as terminal:
        until(lambda: terminal.echoes, lambda echoes: not echoes)
        terminal.type("\x03")
        assert terminal.wait() == 130
        assert terminal.echoes
    with ExitStack() as stack, Terminal(command, environ_of(home), cwd=str(home)) as terminal:
        stack.enter_context(stopped(server))
        until(lambda: terminal.echoes, lambda echoes: not echoes)
        terminal.type("/stats\r/undo\r/und")
        stack.close()
        assert terminal.text.count("/stats") <= 1
        terminal.wait_for("There is no answer yet.")
        terminal.wait_for("There is nothing to take back.")
        terminal.wait_for("> /und")


def test_tab_completes_names_of_set_and_after_reset_no_old_answer_is_told(server: ServerProcess, home: Path) -> None:
    with chat(server, home, *SHORT) as terminal:
        ask(terminal, "a question")
        tell(terminal, "/set te\t0.5", "temperature  0.5")
        tell(terminal, "/reset", "The conversation starts over.")
        tell(terminal, "/stats", "There is no answer yet.")


def test_sampling_is_shown_and_set(server: ServerProcess, home: Path) -> None:
    with chat(server, home, *LONG) as terminal:
        tell(terminal, "/set max_tokens 3", "max_tokens  3")
        ask(terminal, "hello")
        assert "· 3 tokens ·" in terminal.text
        tell(terminal, "/set temperature hot", "/set temperature: expected a number")
        tell(terminal, "/set top_p 7", "/set top_p: ")
        tell(terminal, "/set nothing 1", "/set: no such parameter: nothing; there are temperature, ")
        tell(terminal, "/set temprature 1", "/set: no such parameter: temprature; did you mean temperature?")
        tell(terminal, "/set max_tokens -", "(default)")
        tell(terminal, "/set temperature -", "0.7 (default)")
        tell(terminal, "/set", "seed")


def test_a_line_of_a_pipe_is_a_question_whatever_it_begins_with(server: ServerProcess) -> None:
    done = piped(server, "/etc is what?\n/nothing\n", *SHORT)
    assert done.returncode == 0
    assert "no such command" not in done.stderr
    assert len(done.stdout.split()) > 2


def test_a_chat_goes_on_with_another_of_several_models(folder: Path, home: Path) -> None:
    models = shutil.copytree(folder, home / "models")
    write_model(models / "huge.gguf", feed_forward=250_000)
    flags = ("--models", "alpha,beta,huge", "--memory", "300")
    with (
        short_directory() as place,
        running_server(place / "uma.sock", *flags, UMA_MODELS=str(models)) as server,
        chat(server, home, *SHORT) as terminal,
    ):
        ask(terminal, "first question")
        (models / "broken.gguf").write_text("this is no model")
        tell(terminal, "/model broken", "is not a GGUF file")
        tell(terminal, "/model gamma", "model: 'gamma': model not found; there are alpha, beta, huge")
        tell(terminal, "/model hu", "--memory")
        assert re.search(r"huge.* all models together can have 300 MB", re.sub(r"\s+", " ", terminal.text))
        beta = models / "beta.gguf"
        whole, _ = beta.read_bytes(), beta.write_bytes(b"GGUF")
        terminal.type("/model be\r")
        terminal.wait_until(lambda: "is cut short" in terminal.text or "goes to beta" in terminal.text, "an answer")
        wait_for_prompt(terminal)
        if "goes to beta" in terminal.text:  # a load that fails late is told by the next question
            tell(terminal, "a question", "The next question goes to alpha as before.")
        beta.write_bytes(whole)
        tell(terminal, "/model be", "The next question goes to beta.")
        ask(terminal, "second question")
        tell(terminal, "/model", "others   alpha\n")
        assert re.search(r"refused +huge", terminal.text)
        tell(terminal, "/undo", "Taken back: second question")
        tell(terminal, "/undo", "Taken back: first question")


@pytest.mark.parametrize(
    "word",
    ["exit", "/quit ", *(pytest.param(each, marks=pytest.mark.slow) for each in ("quit", "Bye", "/bye", "/exit"))],
)
def test_the_usual_words_leave(word: str, server: ServerProcess, home: Path) -> None:
    with chat(server, home) as terminal:
        terminal.type(word + "\r")
        assert terminal.wait() == 0


def test_history_has_a_bound_and_what_was_refused_stays_out(server: ServerProcess, home: Path) -> None:
    file = home / ".local" / "state" / "uma" / "chat-history"
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"\n# 2026-01-01\n+old question {n}\n" for n in range(20_000)))
    with chat(server, home, *SHORT) as terminal:
        assert file.stat().st_size < MAX_HISTORY_BYTES
        terminal.type("\x1b[A")
        terminal.wait_for("> old question 19999")
        terminal.type("\x15")
        before = file.read_bytes()
        tell(terminal, "x " * 2_500, "That question is too long and was not kept")
        assert file.read_bytes() == before, "refused"
        ask(terminal, "a question to remember")
        assert file.read_bytes().endswith(b"+a question to remember\n")
    assert before.startswith(b"\n# ")


def test_no_history_is_kept_where_none_is_wanted(server: ServerProcess, home: Path) -> None:
    with chat(server, home, *SHORT, "--no-history") as terminal:
        ask(terminal, "a secret")
        terminal.type("\x1b[A")
        terminal.wait_for("> a secret", 2)
    assert not (home / ".local" / "state" / "uma" / "chat-history").exists()


def test_a_first_question_that_is_too_long_is_told_as_that(server: ServerProcess) -> None:
    done = piped(server, "word " * 3_000 + "\n")
    assert done.returncode == 1
    assert "prompt too large: " in done.stderr
    assert "That question is too long and was not kept" in done.stderr
    assert "/undo" not in done.stderr


def test_a_chat_stays_with_the_model_that_it_began_with(socket_dir: Path, home: Path, tiny: Path) -> None:
    path = socket_dir / "uma" / "uma.sock"  # the usual place: a chat that begins without a server loads a model itself
    command, environ = uma_command("chat", *SHORT), environ_of(home, XDG_RUNTIME_DIR=str(socket_dir))
    with (
        running_server(path, "--model", str(tiny)) as server,
        Terminal(command, environ, cwd=str(home)) as terminal,
    ):
        wait_for_prompt(terminal)
        ask(terminal, "remember this")
        server.process.kill()
        server.wait()
        tell(terminal, "lost", "The conversation is kept.")
        tell(terminal, "/retry", "start it again with")
        tell(terminal, "/undo", "Taken back: lost")
        tell(terminal, "nobody", "start it again with")
        assert "loaded in this process" not in terminal.text
        with running_server(path) as other:
            tell(terminal, "another", "/switch goes on with")
            assert other.metrics()["tokens_generated_total"] == 0
        with running_server(path, "--model", str(tiny)):
            ask(terminal, "and now?")
        with running_server(path) as other:
            tell(terminal, "gone again", "/switch goes on with")
            tell(terminal, "/switch", "The next question goes to whatever model the server has.")
            ask(terminal, "and you?")
            assert terminal.text.count("· served") == 3, "a line for each server, behind the first in full"
            assert "built-in demonstration model" not in terminal.text
        assert questions(terminal, home) == ["remember this", "and now?", "and you?"]


def test_a_chat_in_this_process_needs_no_server_and_goes_on_with_another_model(home: Path, tiny: Path) -> None:
    (home / "broken.gguf").write_bytes(b"GGUF")
    command = uma_command("chat", "--local", "--model", str(tiny), *LONG, "--max-tokens", "30000")
    (home / "models").mkdir()
    with Terminal(command, environ_of(home, UMA_MODELS=str(home / "models"))) as terminal:
        wait_for_prompt(terminal)
        assert "loaded in this process" in terminal.text
        terminal.type("hello\r")
        wait_for_answer(terminal)
        terminal.type("\x03")
        terminal.wait_for("Stopped")
        wait_for_prompt(terminal)
        tell(terminal, "/set max_tokens 5", "max_tokens  5")
        ask(terminal, "remember this")
        tell(terminal, "/model nowhere/model", "model not found")
        tell(terminal, f"/model {home}/broken.gguf", "The next question goes to tiny as before.")
        tell(terminal, "/model builtin", "builtin · 3.48 M parameters")
        ask(terminal, "and you?")
        write_script_model(home / "models" / "other.gguf", [" Yes."])
        tell(terminal, "/model", "others  other")
        assert "/model NAME goes on with one of them" in terminal.text
        assert "model   builtin" in terminal.text
        assert "has no chat template" not in terminal.text
        base = write_script_model(home / "base.gguf", [" It goes on."], template=None)
        tell(terminal, f"/model {base}", "This model has no chat template: a base model continues texts")
        ask(terminal, "go on")
        assert terminal.text.count("This model has no chat template: a base model continues texts") == 1
        for question in ("go on", "and you?", "remember this"):
            tell(terminal, "/undo", f"Taken back: {question}")
        terminal.type("\x04")
        assert terminal.wait() == 0


LOADS_UNTIL_CANCELLED = """
import os, time, trio
from uma.types import LoadProgress

def report(self, fraction, real=LoadProgress.report):
    real(self, fraction)
    while self.percent > 30 and os.path.exists("hold"):
        try:
            trio.from_thread.check_cancelled()
        except trio.Cancelled:
            break
        time.sleep(0.01)

LoadProgress.report = report
"""
"""With it a load stands still while there is a file `hold`, until it is cancelled."""


def test_ctrl_c_while_a_model_is_loaded_leaves_no_bar_on_the_screen(home: Path, tiny: Path) -> None:
    (home / "hold").touch()
    command = uma_command("generate", "--local", "--model", str(tiny), "hello")
    with Terminal(command, environ_of(home), cwd=str(home), prelude=LOADS_UNTIL_CANCELLED) as terminal:
        terminal.wait_for("loading, ")
        terminal.type("\x03")
        assert terminal.wait() == 130
        assert [line for line in terminal.text.splitlines() if line] == ["uma: stopped while the model was loading"]


def test_a_load_s_line_keeps_its_words_at_any_width_and_ctrl_c_leaves_nothing_of_it(home: Path, tiny: Path) -> None:
    long = home / f"{'a-model-with-a-long-name-' * 3}.gguf"
    long.symlink_to(tiny)
    command = uma_command("generate", "--local", "--model", str(long), "hello")
    for columns in (40, 60, 80, 100):
        (home / "hold").touch()
        with Terminal(
            command, environ_of(home), cwd=str(home), prelude=LOADS_UNTIL_CANCELLED, columns=columns
        ) as terminal:
            terminal.wait_for("loading, ")
            (line,) = [line for line in terminal.text.splitlines() if "loading, " in line]
            assert re.search(r"loading, (\d+ %|[a-z ]+)$", line.rstrip()), line
            terminal.type("\x03")
            assert terminal.wait() == 130
            assert " ".join(terminal.text.split()) == "uma: stopped while the model was loading"


def test_ctrl_c_while_another_model_is_loaded_costs_neither_the_chat_nor_its_model(home: Path, tiny: Path) -> None:
    command = uma_command("chat", "--local", "--model", str(tiny), *SHORT)
    with Terminal(command, environ_of(home), cwd=str(home), prelude=LOADS_UNTIL_CANCELLED) as terminal:
        wait_for_prompt(terminal)
        ask(terminal, "remember this")
        (home / "hold").touch()
        terminal.type("/model builtin\r")
        terminal.wait_for("the built-in model")
        terminal.type("\x03")
        terminal.wait_for("Stopped before the model was ready.")
        terminal.wait_for("The next question goes to tiny as before.")
        wait_for_prompt(terminal)
        (home / "hold").unlink()
        ask(terminal, "and you?")
        assert terminal.text.count("error") == 0
        tell(terminal, "/model", "model   tiny")
        assert questions(terminal, home) == ["remember this", "and you?"]
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_ctrl_c_while_a_server_is_waited_for_costs_no_chat(socket_dir: Path, home: Path) -> None:
    path = socket_dir / "s"
    with ExitStack() as stack, socket.socket(socket.AF_UNIX) as silent:
        server = stack.enter_context(running_server(path))
        with chat(server, home, *SHORT) as terminal:
            ask(terminal, "remember this")
            stack.close()
            tell(terminal, "and you?", "The next question looks for the server again.")
            silent.bind(str(path))
            silent.listen()
            terminal.type("/retry\r")
            with silent.accept()[0]:
                terminal.type("\x03")
                terminal.wait_for("Stopped before the model was ready.")
                wait_for_prompt(terminal)
            path.unlink()
            with running_server(path):
                ask(terminal, "/retry")
                assert questions(terminal, home) == ["remember this", "and you?"]


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_colours_stay_away_where_they_are_not_wanted(
    no_color: str, is_coloured: bool, server: ServerProcess, home: Path
) -> None:
    with chat(server, home, *SHORT, NO_COLOR=no_color) as terminal:
        ask(terminal, "hello")
        tell(terminal, "/nothing", "no such command")
        assert bool(COLOUR.search(terminal.raw)) is is_coloured


def test_a_terminal_that_can_only_print_gets_plain_text(server: ServerProcess, home: Path) -> None:
    command = uma_command("chat", "--socket", str(server.socket), *SHORT)
    with Terminal(command, environ_of(home, TERM="dumb"), cwd=str(home)) as terminal:
        terminal.wait_for("\n>")
        terminal.type("hello\r")
        terminal.wait_for("first after")
        terminal.type("\x04")
        assert terminal.wait() == 0
        assert b"\x1b" not in terminal.raw


# In a pipe.


def piped(server: ServerProcess, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A chat whose questions come from a pipe."""
    command = uma_command("chat", "--socket", str(server.socket), "--temperature", "0", *SHORT, *arguments)
    return run_to_end(*command, stdin=text)


def test_each_line_of_a_pipe_is_a_turn_of_one_conversation_which_another_goes_on_with(
    server: ServerProcess, tmp_path: Path
) -> None:
    done = piped(server, "Hello!\n\nAnd you?\r\n", "--save", f"{tmp_path}/talk.json")
    assert done.returncode == 0
    turns = ChatHistory.load(tmp_path / "talk.json").turns
    assert [turn.question for turn in turns] == ["Hello!", "And you?"]
    assert done.stdout == "".join(f"{turn.answer}\n" for turn in turns)
    assert "\x1b" not in done.stdout + done.stderr
    file = tmp_path / "talk.json"
    assert piped(server, "Why?\n", "--load", str(file), "--save", str(file)).returncode == 0
    assert [turn.question for turn in ChatHistory.load(file).turns] == ["Hello!", "And you?", "Why?"]
    before = file.read_text()
    refused = piped(server, "Who?\n", "--save", str(file))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "talk.json: already exists, with another chat (--save)" in refused.stderr
    assert file.read_text() == before


def test_a_chat_that_began_anew_is_saved_beside_the_file_of_the_one_before(server: ServerProcess, home: Path) -> None:
    with chat(server, home, "--save", "talk.json") as terminal:
        ask(terminal, "first question")
        tell(terminal, "/save talk.json", "Saved to talk.json")
        tell(terminal, "/reset", "The conversation starts over.")
        ask(terminal, "another question")
        terminal.type("\x04")
        assert terminal.wait() == 0
        assert "talk.json has another chat; this one is saved to uma-chat-" in terminal.text
    (other,) = home.glob("uma-chat-*.json")
    for file, question in ((home / "talk.json", "first question"), (other, "another question")):
        assert [turn.question for turn in ChatHistory.load(file).turns] == [question]


CODE = """Here is a function of two lines, which says in words how a number can be doubled:

```python
def doubled(number: int) -> int:
    return 2 * number
```

Call it with `doubled(21)`."""


@pytest.fixture(scope="module")
def coding() -> Iterator[ServerProcess]:
    """A server whose model answers with code."""
    with short_directory() as directory:
        model = write_script_model(directory / "coder.gguf", CODE)
        with running_server(directory / "uma.sock", "--model", str(model)) as process:
            yield process


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_chat_s_screen_is_the_one_in_its_file(columns: int, coding: ServerProcess, home: Path) -> None:
    with chat(coding, home, columns=columns, lines=90) as terminal:
        ask(terminal, "How do I double a number?")
        terminal.type("/help\r")
        wait_for_prompt(terminal)
        tell(terminal, "/model", "coder.gguf")
        tell(terminal, "/model such", "this server has only coder;")
        tell(terminal, "/tempreature 1", "did you mean /temperature?")
        tell(terminal, "/set top_p 7", "/set top_p: 7.0 must be from 0 to 1")
        shown = terminal.text.strip() + "\n"
    shown = re.sub(r"[\d.,]+ tokens/s · 44 tokens · first after [\d.,]+ m?s", "41 tokens/s · 44 tokens · …", shown)
    check_screen("chat", columns, shown.replace(str(coding.socket.parent), "/tmp/uma-12345678"))


def test_thinking_is_no_part_of_an_answer(socket_dir: Path, home: Path, tmp_path: Path) -> None:
    template = "{# <think></think> #}{% for m in messages %}{{ m.content }}|{% endfor %}{{ '\\n' }}"
    model = write_script_model(tmp_path / "script.gguf", "<think>Which city is it?</think>Oslo.", template=template)
    with running_server(socket_dir / "uma.sock", "--model", str(model)) as server:
        file = tmp_path / "talk.json"
        command = uma_command("chat", "--socket", str(server.socket), "--save", str(file))
        done = run_to_end(*command, stdin="Where?\n")
        assert done.stdout == "Oslo.\n"
        # The template of the next turn decides how much of it the model sees again.
        assert ChatHistory.load(file).turns == [ChatTurn("Where?", "Oslo.", reasoning="Which city is it?")]
        with chat(server, home) as terminal:
            ask(terminal, "where?")
            assert "(thought for 4 words)" in terminal.text
            assert "Oslo." in terminal.text
            assert "Which city" not in terminal.text


def test_a_failed_turn_of_a_pipe_shows_in_the_exit_code(server: ServerProcess) -> None:
    done = piped(server, "a\udcffb\nHello!\n")
    assert done.returncode == 1
    assert done.stderr.count("uma: error: ") == 1
    assert done.stdout.strip()


def test_a_question_in_the_place_of_the_model_is_sent_to_uma_generate(server: ServerProcess) -> None:
    done = piped(server, "", "hello there")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("uma: error: hello there: model not found, ")
    assert done.stderr.endswith("; to ask the model that, `uma generate 'hello there'`\n")


def test_a_file_that_is_no_saved_chat_is_refused_before_the_model_is_loaded(
    server: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "x.json").write_text('{"format": "other"}')
    done = piped(server, "", "--load", str(tmp_path / "x.json"))
    assert done.returncode == 2
    assert done.stderr == f"uma: error: {tmp_path}/x.json: is no chat that /save wrote\n"


def test_a_chat_without_a_home_works(server: ServerProcess) -> None:
    environ = {name: value for name, value in clean_environ(LC_ALL="C").items() if name != "HOME"}
    done = run_to_end(*uma_command("chat", "--socket", str(server.socket), *SHORT), stdin="hello\n", environ=environ)
    assert done.returncode == 0
    assert done.stdout


# The conversation itself.


def test_a_question_joins_with_its_answer_or_not_at_all() -> None:
    conversation = ChatHistory("Be kind.")
    assert conversation.asking(ChatTurn("a")) == (Message("system", "Be kind."), Message("user", "a"))
    assert conversation.turns == []
    conversation.turns.append(ChatTurn("a", "b"))
    assert conversation.asking(ChatTurn("c"))[1:] == (
        Message("user", "a"),
        Message("assistant", "b"),
        Message("user", "c"),
    )
    conversation.turns.append(ChatTurn("c", "d", reasoning="e"))
    assert conversation.asking(ChatTurn("f"))[3:5] == (Message("user", "c"), Message("assistant", "d", reasoning="e"))
    assert conversation.undo() == "c"
    assert conversation.undo() == "a"
    assert conversation.undo() is None
    conversation.turns.append(ChatTurn("a", "b"))
    conversation.reset()
    assert (conversation.system, conversation.turns) == ("Be kind.", [])


def test_a_saved_conversation_comes_back_as_it_was(tmp_path: Path) -> None:
    conversation = ChatHistory(None, [ChatTurn("ä\n\u2028", "\x1b[2J"), ChatTurn("", ""), ChatTurn("a", "b", "c")])
    conversation.turns.append(ChatTurn("d", "e", pictures=(ChatPicture("ä.png", b"\x89PNG"),)))
    for _ in range(2):
        conversation.save(tmp_path / "chat.json")
    assert ChatHistory.load(tmp_path / "chat.json") == conversation
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


def test_another_file_is_never_overwritten_and_a_place_that_cannot_be_written_is_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ChatFileError, match="is no chat"):
        ChatHistory().save(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(ChatFileError, match=r"none/chat\.json: cannot be written: No such file"):
        ChatHistory().save(tmp_path / "none" / "chat.json")
    with pytest.raises(ChatFileError, match=r"is a directory; name a file in it, such as .*chat\.json"):
        ChatHistory().save(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", "[" * 100_000, '{"format":"uma-chat","version":2,"system":null,"turns":[]}', "\udc80",
     '{"format":"uma-chat","version":1,"system":1,"turns":[]}',
     '{"format":"uma-chat","version":1,"system":null,"turns":[1]}',
     '{"format":"uma-chat","version":1,"system":null,"turns":[{"user":"a","assistant":"b","pictures":[{"name":1}]}]}',
     '{"format":"uma-chat","version":1,"system":null,"turns":[{"user":"a","assistant":"b","pictures":[1]}]}',
     '{"format":"uma-chat","version":1,"system":null,"turns":[{"user":"a","assistant":"b","pictures":7}]}',
     '{"format":"uma-chat","version":1,"system":null,"turns":[{"user":"a","assistant":"b","pictures":[{"name":"c",'
     '"data":"?"}]}]}'],
)  # fmt: skip
def test_a_file_that_is_no_chat_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ChatFileError, match=r"x\.json: is no chat that /save wrote"):
        ChatHistory.load(tmp_path / "x.json")


def test_a_chat_that_could_not_be_saved_is_told_so_before_it_begins(uma_told: RunInProcessText, tmp_path: Path) -> None:
    done = uma_told("chat", "--save", str(tmp_path))
    assert (done.returncode, done.stdout, "is a directory; name a file in it" in done.stderr) == (2, "", True)
