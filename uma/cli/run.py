"""`uma run`: the server, and the few lines that tell a person what runs and how to reach it. Then logs."""

from __future__ import annotations

import argparse
import os
import shlex
from functools import partial
from pathlib import Path

import attrs
import trio

from uma import figures, posix
from uma.cli import say, words
from uma.cli.default_model import check_folder, with_all
from uma.cli.options import load_settings
from uma.cli.sanitize import sanitize_line
from uma.cli.source import shown_progress
from uma.config import Loaded, ModelSettings, RuntimeConfig, default_socket
from uma.engine.kv.disk import made_folder
from uma.engine.sizing import free_memory_bytes
from uma.errors import ConfigError
from uma.models import catalog
from uma.server import Server, end_with, run_server
from uma.supervisor import check_models, open_models
from uma.types import LoadProgress, ServerInfo


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    loaded = load_settings(options)
    if loaded.origins["model"] == "default":
        check_folder()
    loaded = _unloadable(with_all(loaded))
    try:
        return _serve(loaded)
    finally:
        say.passing()  # of a load that has failed


def _unloadable(loaded: Loaded) -> Loaded:
    """The settings; one model that leaves while it is idle is served as several are: its memory ends with its process.

    Alone, it has all the memory that is free, as a model in this process has.
    """
    config = loaded.config
    if config.models or (config.idle_unload <= 0 and not config.yield_memory):
        return loaded
    if config.takes_any_model:
        raise ConfigError("--idle-unload, --yield-memory: unsupported with --alias '*': name what requests ask for")
    memory = config.memory or free_memory_bytes() // figures.MB
    of_model = ModelSettings(config.aliases, {"lora": config.lora} if config.lora else {}, where="--alias")
    minutes = max(0.0, config.idle_unload)
    alone = attrs.evolve(config, models=config.model, alias="", lora="", memory=memory, idle_unload=minutes)
    return attrs.evolve(loaded, config=alone, models={config.model: of_model})


def _serve(loaded: Loaded) -> int:
    config = loaded.config
    # Before it listens: a model that is not here, or does not fit, is no server that loads.
    if config.cache_dir not in ("", "auto"):
        made_folder(Path(config.cache_dir))
    if not config.models:
        catalog.resolve(config.model, os.environ)
    else:
        trio.run(check_models, config, loaded.models)
    opened = partial(open_models, tables=loaded.models) if config.models else None
    progress = LoadProgress() if config.models else shown_progress(config.model)
    if not config.http:
        return end_with(run_server(config, on_ready=partial(announce, loaded), progress=progress, opened=opened))
    # Slow to import, and not needed without HTTP.
    from uma.http.serve import HttpService, check  # noqa: PLC0415

    check(config)
    made: list[HttpService] = []

    def http(progress: LoadProgress, config: RuntimeConfig, server: Server) -> HttpService:
        made.append(HttpService(progress, config))
        made[-1].gateway.of_socket = server.figures
        return made[-1]

    def announced(info: ServerInfo) -> None:
        announce(loaded, info, made[-1].url)

    return end_with(run_server(config, announced, early=[http], progress=progress, opened=opened))


def announce(loaded: Loaded, info: ServerInfo, url: str = "") -> None:
    """Say on standard error which model runs, where, and how to talk to it; nothing where that is a log of JSON."""
    say.passing()
    if not words.is_json_log(loaded.config):
        notice = None if info.models else words.demonstration(info.model, loaded)
        for line in map(sanitize_line, banner(loaded.config, info, url)):
            say.plain(line, folds=not line.startswith(("try ", f"{'':8}uma ")))  # commands to copy stay whole
        if notice is not None:
            say.plain(sanitize_line(notice))


def _several(config: RuntimeConfig, info: ServerInfo) -> list[str]:
    folder = config.prefix_folder
    kept = f"cache   {folder}, {figures.size(config.cache_disk_mb * figures.MB)} at most; `--cache-dir ''` keeps none"
    first, *others = info.models
    return [
        f"models  {words.names([f'{first} (default)', *others])}",
        *([kept] if folder and os.path.isdir(folder) else []),
    ]


def banner(config: RuntimeConfig, info: ServerInfo, url: str = "") -> list[str]:
    """The lines of `announce`; `url` is HTTP's, where there is HTTP."""
    at = "" if config.socket == default_socket() else f" --socket {shlex.quote(config.socket)}"
    model = [f"model   {words.model_line(info.model)}", f"        {words.context_line(info)}"]
    if (plan := info.capabilities.memory) is not None:
        model.append(f"        {words.memory_line(plan)}")
    if adapted := words.with_adapters(info):
        model.append(f"        with LoRA adapters {words.names(adapted)}")
    lines = [
        *(_several(config, info) if info.models else model),
        *([f"socket  {config.socket}"] if posix.HAS_UNIX_SOCKETS else []),
        *(words.http_lines(config, url) if url else []),
    ]
    if not posix.HAS_UNIX_SOCKETS:
        return lines
    if config.protocol == "json":
        lines += [f"try     uma chat{at}", f'        uma generate{at} "Tell me a story about a fox"']
    else:
        lines += [f"try     nc -U {shlex.quote(config.socket)}"]
    return lines
