"""`uma embed`, with a server and without one."""

from __future__ import annotations

import json
import subprocess
from base64 import b64decode
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from harness import ONE_THREAD, RunInProcess, ServerProcess, run_uma
from uma import LLM

TEXTS = ["a fox", "once upon a time", "b"]


@pytest.fixture
def embed(uma_here: RunInProcess) -> RunInProcess:
    """Runs it to its end within this process."""
    return partial(uma_here, "embed")


def rows(done: subprocess.CompletedProcess[bytes]) -> list[list[float]]:
    """The embeddings it has written."""
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def at(server: ServerProcess) -> tuple[str, str]:
    """The option that leads to the shared server."""
    return ("--socket", str(server.socket))


def test_arguments_lines_and_a_file_are_the_same_texts(
    at: tuple[str, str], tmp_path: Path, embed: RunInProcess
) -> None:
    lines = "\n".join(TEXTS).encode()
    (tmp_path / "texts").write_bytes(lines + b"\n")
    piped = run_uma(("embed", *at), stdin=lines)
    given, read = embed(*TEXTS, *at), embed("--file", str(tmp_path / "texts"), *at)
    assert len(rows(given)) == 3
    assert np.allclose(rows(piped), rows(given), atol=1e-5)
    assert np.allclose(rows(read), rows(given), atol=1e-5)
    assert np.allclose(np.linalg.norm(rows(given), axis=1), 1, atol=1e-5)


def test_a_file_that_is_named_as_a_text_and_a_model_for_other_work_are_told(
    at: tuple[str, str], tmp_path: Path, embed: RunInProcess
) -> None:
    (tmp_path / "notes.txt").write_text("a fox\n")
    done = embed(str(tmp_path / "notes.txt"), *at)
    assert len(rows(done)) == 1
    assert f"--file {tmp_path / 'notes.txt'} reads what is in it" in done.stderr.decode()
    assert "builtin is made to generate" in done.stderr.decode()
    assert b"--file" not in embed("a fox", *at).stderr


def test_base64_has_the_same_figures(at: tuple[str, str], embed: RunInProcess) -> None:
    numbers = rows(embed(*TEXTS, *at, "--dimensions", "8"))
    packed = embed(*TEXTS, *at, "--dimensions", "8", "--base64").stdout.splitlines()
    assert np.allclose([np.frombuffer(b64decode(line), "<f4") for line in packed], numbers, atol=1e-6)


def test_more_texts_than_one_request_takes_come_in_their_order(at: tuple[str, str], embed: RunInProcess) -> None:
    texts = [f"text {index % 7}" for index in range(300)]
    found = np.array(rows(embed(*at, "--dimensions", "16", stdin="\n".join(texts).encode())))
    assert found.shape == (300, 16)
    assert np.allclose(found[7:], found[:-7], atol=1e-4)
    assert not np.allclose(found[1:], found[:-1], atol=1e-2)


def test_without_a_server_the_model_is_loaded_here(tiny: Path) -> None:
    found = rows(
        run_uma(("embed", "a fox", "--local", "--model", str(tiny), "--pooling", "last", "--no-normalize", *ONE_THREAD))
    )
    with LLM(tiny, pooling="last", threads=1) as llm:
        assert np.allclose(found, llm.embed("a fox", normalize=False), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "said"),
    [
        ((), b"", 2, "there is no text"),
        ((), b"a\xff", 2, "standard input: is not UTF-8 from byte 2 on"),
        (("x", "--file", "y"), b"", 2, "--file y: texts came as arguments too"),
        (("--file", "/nowhere/y"), b"", 2, "error: /nowhere/y: No such file"),
        (("--dimensions", "0", "x"), b"", 2, "--dimensions: expected a number from 1, not '0'"),
        (("--dimensions", "100000", "x"), b"", 2, "dimensions: 100,000 is over the"),
        ((), b"short\nx\0y\n", 2, "text 2: "),
        ((), b"x\n" * 256 + b"a fox " * 9000, 2, "text 257: prompt too large"),
    ],
)
def test_what_cannot_be_embedded_is_named(
    arguments: tuple[str, ...], stdin: bytes, code: int, said: str, at: tuple[str, str], embed: RunInProcess
) -> None:
    done = embed(*arguments, *at, stdin=stdin)
    assert (done.returncode, said in done.stderr.decode()) == (code, True), done.stderr
