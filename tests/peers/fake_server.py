"""A `llama-server` that is `uma run`: its flags become UMA's, its models those that stand in. `Server` starts one.

llama.cpp's tests start it with what they would give llama-server. Flags for what UMA does not do (LoRA, slots saved to
files, several models, …) have no effect: the tests of these fail, as they should.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path

from standins import write_stand_in

import uma.cli.run
import uma.http  # noqa: F401  (so that a fork has it)
from uma import cli

FOLDER = "PEERS_FOLDER"
"""The variable with the folder for models, keys and sockets, which is removed after the tests."""
REAL = "PEERS_LLAMA_SERVER"
"""The variable with the path of a real llama-server, to see what the stand-ins alone make of the tests."""
_SAME = {
    "batch_size": "--n-batch",
    "ubatch_size": "--n-ubatch",
    "threads": "--threads",
    "cache_ram": "--cache-ram-mb",
    "temp": "--temperature",
    "ctk": "--cache-type-k",
    "ctv": "--cache-type-v",
    "fa": "--flash-attn",
}
"""llama-server's flags that have one of UMA's."""
_QUICK = ("--drain-timeout-sec", "1", "--extra-buffers", "off", "--log-level", "warning")
"""For a server that starts and ends with each test."""


def main(argv: Sequence[str]) -> None:
    """Become `uma run`, or the llama-server that `REAL` names."""
    options, ignored = _parser().parse_known_args(argv)
    folder = Path(os.environ[FOLDER])
    own = Path(tempfile.mkdtemp(dir=folder))
    model = _model(options, own)
    if real := os.environ.get(REAL):
        os.execv(real, [real, *_with_model(argv, model)])
    print(f"fake llama-server: without effect: {' '.join(ignored)}", flush=True)
    command = ["run", "--model", str(model), "--socket", str(own / "uma.sock"), *_QUICK]
    raise SystemExit(cli.main([*command, *_flags(options), *_access(options, own)]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--host", "--port", "--hf-repo", "--hf-file", "--model", "--model-url", "--alias", "--api-key"):
        parser.add_argument(name, default="")
    parser.add_argument("--jinja", action="store_true")
    parser.add_argument("--no-jinja", action="store_true")
    for name in ("--batch-size", "--ubatch-size", "--threads", "--cache-ram", "--temp", "-ctk", "-ctv", "-fa"):
        parser.add_argument(name)
    for name in ("--ctx-size", "--parallel", "--n-predict"):
        parser.add_argument(name, type=int)
    parser.add_argument("--pooling", default="auto")
    parser.add_argument("--cors-origins", default="*")
    parser.add_argument("--kv-unified", action="store_true")
    parser.add_argument("--chat-template")
    parser.add_argument("--chat-template-file", type=Path)
    return parser


def _model(options: argparse.Namespace, own: Path) -> Path:
    """The stand-in, under the model's first alias."""
    template = options.chat_template or ("chatml" if options.no_jinja else "hermes")
    if options.chat_template_file is not None:
        template = options.chat_template_file.read_text()
    wanted = f"{options.hf_repo}/{options.hf_file}{options.model}{options.model_url}"
    return write_stand_in(own / f"{options.alias.split(',')[0] or 'model'}.gguf", wanted, template)


def _flags(options: argparse.Namespace) -> Iterator[str]:
    for name, flag in _SAME.items():
        if (value := getattr(options, name)) is not None:
            yield from (flag, value)
    if options.batch_size is not None and options.ubatch_size is None:
        yield from ("--n-ubatch", options.batch_size)
    if options.pooling != "none":
        yield from ("--pooling", options.pooling)
    slots = options.parallel or 1
    yield from ("--max-sequences", str(slots))
    if options.ctx_size:
        yield from ("--n-ctx", str(options.ctx_size if options.kv_unified else options.ctx_size // slots))


def _access(options: argparse.Namespace, own: Path) -> Iterator[str]:
    yield from ("--http", f"{options.host.split(',')[0]}:{options.port}", "--alias=*", "--http-cors")
    yield options.cors_origins
    if options.alias:
        yield from ("--alias", options.alias)
    if options.api_key:
        keys = own / "keys.toml"
        keys.write_text(f'[tests]\nsha256 = "{hashlib.sha256(options.api_key.encode()).hexdigest()}"\n')
        yield from ("--http-keys", str(keys))


def _with_model(argv: Sequence[str], model: Path) -> list[str]:
    """llama-server's own flags, with the stand-in for the model."""
    others = iter(argv)
    kept = []
    for each in others:
        if each in ("--hf-repo", "--hf-file", "--model", "--model-url"):
            next(others)
        elif each != "--offline":
            kept.append(each)
    return [*kept, "--model", str(model)]


class Server:
    """A fork of this process that is the server, with the part of `Popen`'s interface that the tests use.

    Each test starts one, and three quarters of a start would be imports.
    """

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], **_: object) -> None:
        self._process = get_context("fork").Process(target=_become, args=(list(argv[1:]), dict(env)))
        self._process.start()
        self.pid = self._process.pid
        self.terminate, self.kill = self._process.terminate, self._process.kill

    @property
    def returncode(self) -> int | None:
        """As `Popen`'s."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As `Popen`'s."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int | None:
        """As `Popen`'s."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired("llama-server", timeout)
        return self._process.exitcode


def _become(argv: list[str], env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(argv)
