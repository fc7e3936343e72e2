"""`uma decide`, with a server and without one."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from pty_screen import Terminal

import uma.cli.decide
from harness import RunInProcess, ServerProcess, clean_environ, uma_command
from uma.cli.decide import MIN_MASS

ASKED = ("--yes", "Is it spam?", "--choice", "topic=work,home", "--score", "How urgent?=1..3")


@pytest.fixture
def decide(uma_here: RunInProcess) -> RunInProcess:
    """Runs it to its end within this process."""
    return partial(uma_here, "decide")


def test_each_line_that_is_not_blank_has_a_line_of_probabilities(
    server: ServerProcess, tmp_path: Path, decide: RunInProcess
) -> None:
    (tmp_path / "mails").write_text("Buy now!\n\n \t\nThe meeting is at nine.\n\n")
    at = ("--socket", str(server.socket))
    done = decide(str(tmp_path / "mails"), *ASKED, *at)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["text"] for row in rows] == ["Buy now!", "The meeting is at nine."]
    for row in rows:
        spam, topic, urgent = row["answers"].values()
        assert sum(spam["probabilities"].values()) == pytest.approx(1)
        assert topic["answer"] in ("work", "home")
        assert list(urgent["probabilities"]) == ["1", "2", "3"]
        assert 0 <= urgent["score"] <= 2
    piped = (tmp_path / "mails").read_bytes()
    table = decide("--table", *ASKED, *at, stdin=piped).stdout.decode().splitlines()
    assert table[0].split("\t") == ["text", "Is it spam?", "topic", "How urgent?", "label_mass", "error"]
    cells = [line.split("\t") for line in table[1:]]
    for row, (text, _, topic, _, mass, error) in zip(rows, cells, strict=True):
        assert (text, topic.split()[0], error) == (row["text"], row["answers"]["topic"]["answer"], "")
        assert float(mass) == pytest.approx(min(each["label_mass"] for each in row["answers"].values()), abs=0.01)


def test_the_texts_of_csv_are_one_column_and_its_first_line_is_none(
    server: ServerProcess, tmp_path: Path, decide: RunInProcess, uma_here: RunInProcess
) -> None:
    (table := tmp_path / "mails.CSV").write_text('id,text\n1,"Buy,\nnow!"\n2,The meeting is at nine.\n')
    more = (*ASKED[:2], "--socket", str(server.socket))
    for done in (
        decide(str(table), "--column", "text", *more),
        decide("--column", "text", *more, stdin=table.read_bytes()),
    ):
        assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == [
            "Buy,\nnow!",
            "The meeting is at nine.",
        ]
    refused = decide(str(table), *more)
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert b"which column has the texts? It has id, text; name one with --column" in refused.stderr
    assert b"has no column 'txt', but id, text" in decide(str(table), "--column", "txt", *more).stderr
    (tmp_path / "none.csv").write_text(",\nBuy now!,\n")
    assert b"It has no names in its first line;" in decide(str(tmp_path / "none.csv"), *more).stderr
    (tmp_path / "one.csv").write_text("text\nBuy now!\n")
    assert decide(str(tmp_path / "one.csv"), *more).stdout.count(b"\n") == 1, "the only column needs no name"
    same = [uma_here("embed", *of, *more[2:]).stdout for of in (("--file", str(tmp_path / "one.csv")), ("Buy now!",))]
    assert same[0] == same[1] != b""
    (tmp_path / "one.csv").write_text("text,id\nBuy, now!,1\n")
    assert b"row 1: the row has 3 values" in decide(str(tmp_path / "one.csv"), "--column", "text", *more).stderr


def test_a_text_that_cannot_be_asked_about_is_an_error_of_its_own(
    server: ServerProcess, tmp_path: Path, decide: RunInProcess
) -> None:
    (tmp_path / "mails").write_text("Buy\tnow!\n" + "fox " * 9_000 + "\nThe meeting is at nine.\na\0b\n")
    at = ("--socket", str(server.socket))
    done = decide(str(tmp_path / "mails"), *ASKED, *at)
    assert done.returncode == 1, done.stderr
    first, long, last, no_text = map(json.loads, done.stdout.splitlines())
    assert long["error"]["code"] == "E_LIMIT_PROMPT_TOO_LARGE"
    assert "answers" not in long
    assert list(first["answers"]) == list(last["answers"])
    assert b"text 2" in done.stderr
    assert no_text["error"]["message"] == "content: holds a NUL character, which no tokenizer takes (character 2)"
    table = decide(str(tmp_path / "mails"), "--table", *ASKED, *at).stdout.decode().splitlines()
    assert [line.count("\t") for line in table] == [5] * 5
    assert table[1].startswith("Buy now!\t")
    assert table[2].endswith("fox\t\t\t\t\tE_LIMIT_PROMPT_TOO_LARGE")


def test_a_text_in_the_place_of_the_file_is_told_where_texts_are_given(decide: RunInProcess) -> None:
    done = decide(*ASKED, "buy now")
    assert done.returncode == 2
    assert "buy now: No such file or directory; give a line each, in a file" in done.stderr.decode()


def test_a_terminal_has_the_table_in_columns_and_texts_that_are_cut_say_so(
    server: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "mails").write_text(f"Buy now!\n{'fox ' * 9_000}\nThe meeting is{' at' * 30} nine.\n")
    command = uma_command("decide", "--table", *ASKED, "--socket", str(server.socket), str(tmp_path / "mails"))
    with Terminal(command, clean_environ()) as terminal:
        assert terminal.wait() == 1
    lines = list(filter(None, terminal.screen))
    titles, first, failed, cut = lines[(at := next(at for at, line in enumerate(lines) if "topic" in line)) : at + 4]
    topic, mass = titles.index("topic"), titles.index("label_mass")
    for line in (first, cut):
        assert line[topic:].split()[0] in ("work", "home")
        assert 0 <= float(line[mass:].split()[0]) <= 1
    assert first.startswith("Buy now!  ")
    assert failed.split()[-3:] == ["see", "text", "2"]
    assert cut.startswith("The meeti")
    assert "…at nine.  " in cut[:topic]


@pytest.mark.parametrize(
    "asked",
    [(), ("--yes", "a", "--choice", "a=b,c"), ("--choice", "topic"), ("--choice", "topic=a,"), ("--score", "x=1..99")],
)
def test_a_question_that_is_none_is_refused(tmp_path: Path, decide: RunInProcess, asked: tuple[str, ...]) -> None:
    (tmp_path / "mails").write_text("Buy now!\n")
    done = decide(str(tmp_path / "mails"), *asked)
    assert done.returncode == 2, done.stderr
    assert b"question" in done.stderr or b"options behind the =" in done.stderr


@pytest.mark.parametrize(
    ("asked", "example"),
    [
        (("--yes", ""), '--yes: the question is empty; write it, such as "Is it spam?"'),
        (("--yes", "Is it spam?"), 'uma decide --yes "Is it spam?" mails.txt'),
        (("--score", "How urgent?"), "levels: How urgent?=1..5"),
        (("--choice", "topic"), "options: topic=a,b"),
    ],
)
def test_an_error_has_an_example_of_what_was_asked(decide: RunInProcess, asked: tuple[str, ...], example: str) -> None:
    done = decide(*asked, stdin=b"")
    assert done.returncode == 2
    assert example in " ".join(done.stderr.decode().split())


def test_options_that_the_model_would_hardly_say_are_warned_of_once(
    server: ServerProcess, tmp_path: Path, decide: RunInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mails").write_text("Buy now!\nThe meeting is at nine.\n")
    asked = ("--choice", "topic=zyxwvut qp,xqzjkv wq", "--socket", str(server.socket))
    done = decide(str(tmp_path / "mails"), *asked)
    masses = [json.loads(line)["answers"]["topic"]["label_mass"] for line in done.stdout.splitlines()]
    assert max(masses) < MIN_MASS
    (warned,) = [line for line in done.stderr.decode().splitlines() if "label_mass" in line]
    assert f"2 of 2 texts is below 1 % (the least {100 * min(masses):.2g} %)" in warned
    monkeypatch.setattr(uma.cli.decide, "MIN_MASS", min(masses))
    assert b"label_mass" not in decide(str(tmp_path / "mails"), *asked).stderr
