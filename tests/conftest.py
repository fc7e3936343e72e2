"""Fixtures that more than one test file uses."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

# For llama.cpp, whose library reads it as it is loaded: compute threads sleep while they wait for each other. Spinning
# they take the cores of the tests beside, and small models take five times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from chat_templates import rendering_here
from http_server import HttpServer, ServeModels, running_http
from hypothesis import HealthCheck, settings
from page_browser import ENDLESS, SHEEP, Visitor, chromium, visitor
from playwright.sync_api import Browser
from script_model import write_script_model
from several import texts_of, write_models

from harness import (
    EXACT,
    PATIENCE_SEC,
    Pair,
    RunInProcess,
    RunInProcessText,
    ServerProcess,
    running_server,
    short_directory,
    write_certificate,
)
from models import write_model
from uma.cli import main
from uma.llama.grammar import GrammarCompiler, GrammarMasks
from uma.llama.vocab import Vocab

if TYPE_CHECKING:  # slow to import
    import anthropic
    import ollama
    import openai

# `benchmarks` is no part of the installed package. Last in the path: what tests import of `uma` is what is installed.
sys.path.append(str(Path(__file__).parents[1]))


# How long an example takes says how busy this machine is, and nothing of a claim. The examples are the same in every
# run, so that a run says something of the change before it; `HYPOTHESIS_PROFILE=explore` looks for new ones.
settings.register_profile(
    "uma",
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize=True,
)
settings.register_profile("explore", settings.get_profile("uma"), max_examples=200, derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "uma"))


LONG_FILES = (
    *("test_page_chat", "test_cli_chat", "test_page_refusals", "test_zoo_http", "test_real_vocabularies"),
    *("test_page_live", "test_page_storage", "test_page_access", "test_page_following", "test_cli_generate"),
    *("test_page_layout", "test_http_fuzz", "test_agents_packages", "test_server_life", "test_server_users"),
    *("test_engine_chaos", "test_engine_stride", "test_http_access", "test_server_limits", "test_many_models"),
)
"""Files that take longest, some with few tests. They come first: at the end, one core would work on them alone."""


QUICK_FILES = (
    *("test_policy_*", "test_protocol_*", "test_jobs_*", "test_kv", "test_kv_events*", "test_prefix", "test_index"),
    *("test_capabilities", "test_health_check", "test_mdc_schema", "test_re*_schema", "test_version_compat"),
    *("test_constraints", "test_errors", "test_metrics", "test_engine_sequence", "test_engine_generate"),
    *("test_delivery_b*", "test_rustinfer_codec"),
)
"""What `pytest -m quick` runs while one works: the pure parts, and an engine with the built-in model. Patterns of names
of files."""


def is_quick(path: Path) -> bool:
    """Whether `pytest -m quick` runs this file."""
    return any(fnmatch(path.stem, pattern) for pattern in QUICK_FILES)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m quick` no other file is read: to import all of them takes longer than to run the quick ones."""
    is_python = collection_path.suffix == ".py"
    return True if config.option.markexpr == "quick" and is_python and not is_quick(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, all others as they are; those of `QUICK_FILES` are marked, without long variants."""
    place = {name: index for index, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    for item in items:
        if is_quick(item.path) and item.get_closest_marker("slow") is None:
            item.add_marker("quick")


def pytest_collectstart() -> None:
    """Keep the garbage collector away while tests are collected: it would take a third of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what was collected to the tests' end. The garbage collector would go through these half a million objects
    again and again: an eighth of the processor's time.
    """
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the files in that order: pytest-xdist would begin with those that have the most tests.

    It overrides `--loadscope-reorder`, which is pytest-xdist's default, and one given by hand cannot be told from it.
    """
    # What a server keeps for its clients, it must not keep for those who run the tests.
    data = tempfile.mkdtemp(prefix="uma-data-")
    atexit.register(shutil.rmtree, data, ignore_errors=True)
    os.environ["XDG_DATA_HOME"] = data
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    take_back_signals()


def take_back_signals() -> None:
    """Take back signals that the parent chose to ignore (`nohup`, a plain shell's background job).

    The commands and servers under test would inherit that, and never see the signals that tests and terminals send
    them. Only what Python itself ignores stays ignored.
    """
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """The models of `several.NAMES`."""
    with short_directory() as path:
        write_models(path)
        yield path


@pytest.fixture(scope="session")
def texts(folder: Path) -> Mapping[str, str]:
    """What each of them says where it is alone."""
    return texts_of(folder)


@pytest.fixture
def serve_models(folder: Path) -> Iterator[ServeModels]:
    """Starts servers of `several.NAMES` with these flags, by default of all, ready for clients; ended with the test."""
    with ExitStack() as stack:

        def start(*flags: str, **environ: str) -> HttpServer:
            place = stack.enter_context(short_directory())
            return stack.enter_context(
                running_http(place, *(flags or ("--models", "all")), UMA_MODELS=str(folder), **environ)
            )

        yield start


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A directory for this test's sockets."""
    with short_directory() as directory:
        yield directory


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two sockets that are connected, ours and the peer's; neither blocks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """A block that Ctrl-C ends after so long: a server that starts where it should not would last for ever."""
    thread = threading.get_ident()
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(thread, signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.fixture
def uma_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> RunInProcess:
    """Runs a command of `uma` within this process: most of a process's time is its start."""
    for name in [name for name in os.environ if name.startswith("UMA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which the command sets

    def run(*arguments: str, stdin: bytes = b"", **environ: str) -> subprocess.CompletedProcess[bytes]:
        file = tmp_path / "standard input"
        file.write_bytes(stdin)
        capfdbinary.readouterr()
        with monkeypatch.context() as patch, file.open() as given:
            patch.setattr(sys, "stdin", given)
            for name, value in environ.items():
                patch.setenv(name, value)
            try:
                with interrupted_after(PATIENCE_SEC):
                    code = main(arguments)
            except SystemExit as left:
                assert isinstance(left.code, int)
                code = left.code
        return subprocess.CompletedProcess(arguments, code, *capfdbinary.readouterr())

    return run


@pytest.fixture
def uma_told(uma_here: RunInProcess) -> RunInProcessText:
    """The same, with what it says as text."""

    def run(*arguments: str, stdin: bytes = b"", **environ: str) -> subprocess.CompletedProcess[str]:
        done = uma_here(*arguments, stdin=stdin, **environ)
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


@pytest.fixture(scope="module")
def renders_here() -> Iterator[None]:
    """Every chat template is rendered in this process, which has tests of its own: what is made there is the same."""
    with rendering_here():
        yield


@pytest.fixture(scope="module")
def compiler(vocab: Vocab) -> GrammarCompiler:
    """Compiles for the vocabulary that the test file's own fixture `vocab` gives."""
    return GrammarCompiler(vocab)


@pytest.fixture(scope="module")
def masks(vocab: Vocab) -> Iterator[GrammarMasks]:
    """The same vocabulary's masks."""
    made = GrammarMasks(vocab.n_tokens)
    yield made
    made.close()


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """One real `uma run` with the built-in model, for all tests that leave it as they found it."""
    with short_directory() as directory, running_server(directory / "uma.sock", *EXACT) as process:
        yield process


@pytest.fixture(scope="session")
def http_server() -> Iterator[HttpServer]:
    """One real `uma run --http` with the built-in model, for all tests that leave it as they found it."""
    with short_directory() as directory, running_http(directory, *EXACT) as process:
        yield process


@pytest.fixture
def openai_client(http_server: HttpServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client of that server."""
    from http_clients import openai_of

    with openai_of(http_server) as one:
        yield one


@pytest.fixture
def claude(http_server: HttpServer) -> Iterator[anthropic.Anthropic]:
    """Anthropic's."""
    from http_clients import claude_of

    with claude_of(http_server) as one:
        yield one


@pytest.fixture
def llama(http_server: HttpServer) -> Iterator[ollama.Client]:
    """Ollama's."""
    from http_clients import ollama_of

    with ollama_of(http_server) as one:
        yield one


@pytest.fixture(scope="session")
def endless_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server whose model counts sheep for ever. Each of its tests calls `end_all` at its end."""
    model = write_script_model(tmp_path_factory.mktemp("endless") / "script.gguf", SHEEP, **ENDLESS)
    flags = ("--model", str(model), "--max-tokens", "16000")
    with short_directory() as directory, running_http(directory, *flags) as process:
        yield process


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real Chromium. One at a time: Playwright's loop runs in the test's own thread."""
    with chromium() as one:
        yield one


@pytest.fixture
def here(browser: Browser, http_server: HttpServer) -> Iterator[Visitor]:
    """A fresh window on the page of the server that all share."""
    with visitor(browser, http_server.url) as one:
        yield one


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that computes in no time and has a context of 32,768 tokens."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", context_length=32_768)


@pytest.fixture
def serve(socket_dir: Path, tiny: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts `uma run` with the tiny model and the flags it is given, ready for clients; ended with the test."""
    with ExitStack() as stack:

        def start(*flags: str, **environ: str) -> ServerProcess:
            return stack.enter_context(running_server(socket_dir / "s", "--model", str(tiny), *flags, **environ))

        yield start


@pytest.fixture(scope="session")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with more weights: a token takes milliseconds, so that counts of tokens bound how late something is."""
    path = tmp_path_factory.mktemp("model") / "heavy.gguf"
    return write_model(path, context_length=32_768, feed_forward=12_000)


@pytest.fixture(scope="session")
def certificate() -> Iterator[tuple[Path, Path]]:
    """A certificate for localhost, and its key."""
    with short_directory() as directory:
        yield write_certificate(directory)
