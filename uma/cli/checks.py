"""What `uma doctor` looks at. Each check tells what it found and, where something should be done, what.

A check never raises for what it finds: the next one is wanted all the same.
"""

from __future__ import annotations

import io
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

import attrs
import trio

from uma import figures, posix
from uma.cli import describe, words
from uma.cli.options import load_settings
from uma.client import connect
from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.engine.ledger import planned
from uma.errors import ConfigError, ConnectionLost, Loading, ModelError, UmaError
from uma.history import default_path
from uma.llama import backend, devices, extra_buffers, header, pages
from uma.llama import library as llama_library
from uma.llama.model import llama_version
from uma.models import catalog, places, projectors
from uma.net.logfmt import unlogged
from uma.net.place import objection
from uma.server import socketfile
from uma.server.users import Users
from uma.types import ListedModel
from uma.version import __version__

BUILD_FLAGS = {"avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "avx512f": "AVX512", "asimddp": "DOTPROD"}
"""Features as Linux names them that make a large difference, and the names ggml has for code that uses them."""
GPU_TRACES = {
    "/dev/nvidiactl": ("an NVIDIA GPU", "-DGGML_CUDA=on"),
    "/dev/kfd": ("an AMD GPU", "-DGGML_HIP=on"),
}
"""Where Linux shows a GPU, and the option that builds llama.cpp for it."""
PRESSURE = Path("/proc/pressure/cpu")
"""Linux: for which part of the time some thread of the machine waited for a CPU."""
BUSY_PERCENT = 50.0
"""Part of the last minute for which threads can wait for a CPU before it is told as what makes answers slow. UMA's own
threads wait a little where there are as many as CPUs.
"""
MIN_DISK_BYTES = 50 * figures.MB
"""Free bytes below which a disk counts as full: a snapshot of a prefix and a batch's results take as much."""
SERVER_TIMEOUT_SEC = 15.0


@attrs.frozen
class Check:
    """One thing looked at."""

    name: str
    finding: str
    todo: str = ""
    """What to do; empty where nothing needs doing."""
    faster: str = ""
    """What to do for more speed; UMA works as it is."""
    lacks: str = ""
    """Why some models cannot be loaded, and what to do about it; UMA works with the others."""
    is_detail: bool = False
    """Whether people see it only where something is to be done about it, or with `--details`."""


def versions() -> Iterator[Check]:
    """What is installed."""
    yield Check("UMA", f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}")
    yield Check("llama.cpp", f"{llama_version()}, {llama_library.library_file()}", is_detail=True)


def extra_buffer_types(config: RuntimeConfig) -> Check:
    """llama.cpp's extra buffer types, those that are left out, and how to have them."""
    used = extra_buffers.chosen(config.extra_buffers)
    left_out = [name for name in extra_buffers.names() if name not in used]
    finding = ", ".join(used) or "none"
    if left_out:
        finding += f"; left out: {', '.join(left_out)}"
    if config.extra_buffers != "auto":
        finding += f"; the setting is {config.extra_buffers}"
    if "AMX" not in left_out or config.extra_buffers == "off":
        return Check("extra buffers", finding, is_detail=True)
    repair = llama_library.rebuild_command(f'CXXFLAGS="{llama_library.AMX_REPAIR}"')
    faster = (
        "to try AMX, start with --extra-buffers on. What GCC 12 has built ends the process at its first use (SIGSEGV); "
        f"this builds it so that it does not: {repair}"
    )
    return Check("extra buffers", finding, faster=faster, is_detail=True)


def computing(config: RuntimeConfig) -> Iterator[Check]:
    """What the library can compute with: CPU, GPUs, memory, and what texts would take of it. Starts its backends."""
    yield from _cpu()
    yield _gpu(config)
    yield _memory(config)
    yield from _context(config)


def _cpu() -> Iterator[Check]:
    features = devices.cpu_features()
    flags = (llama_library.cpu_field("flags") or llama_library.cpu_field("Features")).split()
    unused = [name for flag, name in BUILD_FLAGS.items() if flag in flags and name not in features]
    rebuild = f"the CPU has {', '.join(unused)}, and this build does not use it: {llama_library.rebuild_command()}"
    part = "a part" if unused else "all"
    yield Check("CPU", f"{llama_library.cpu_name()}; UMA uses {part} of what it can", faster=rebuild if unused else "")
    # Prebuilt wheels and the image are built for AVX2, to run on any CPU; a build from source takes all there is.
    yield Check("instructions", f"used: {', '.join(features)}", is_detail=True)


def _gpu(config: RuntimeConfig) -> Check:
    gpus = devices.gpus()
    if gpus:
        free = [f"{gpu.description} ({figures.size(gpu.free_bytes)} free)" for gpu in gpus]
        return Check("GPU", ", ".join(free) + ("" if config.n_gpu_layers else "; not used: n_gpu_layers is 0"))
    seen = next((found for path, found in GPU_TRACES.items() if os.path.exists(path)), None)
    if seen is None:
        return Check("GPU", "none")
    rebuild = llama_library.rebuild_command(f"CMAKE_ARGS={seen[1]}")
    return Check("GPU", f"{seen[0]}, and this build has no code for it", faster=f"rebuild for it: {rebuild}")


def machine(config: RuntimeConfig) -> Iterator[Check]:
    """Threads and huge pages."""
    yield _threads(config)
    yield _huge_pages(config)


def _threads(config: RuntimeConfig) -> Check:
    cpus, available = len(backend.affinity()), backend.available_cores()
    quota = f", a quota of {available:.3g}" if available < cpus else ""
    used = config.threads or backend.core_count()
    todo = ""
    if used > cpus:
        todo = f"{used} threads compute on {cpus} CPUs and wait for each other: leave threads at 0"
    finding = f"{used}, on {cpus} of {os.cpu_count()} CPUs{quota}"
    waited = _waited_percent()
    if waited is not None:
        finding += f"; threads waited for a CPU during {waited:.0f} % of the last minute"
    is_busy = waited is not None and waited >= BUSY_PERCENT
    return Check("threads", finding, todo, _BUSY if is_busy else "")


_BUSY = (
    "more threads want the CPUs than there are, so answers are slower than they could be: the system's `top` shows "
    "whose they are; end those programs, or let them run at another time"
)


def _waited_percent() -> float | None:
    """Part of the last minute for which some thread of the machine waited for a CPU; None where it is not told."""
    try:
        found = re.search(r"^some .*avg60=([\d.]+)", PRESSURE.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return float(found[1]) if found else None


def _huge_pages(config: RuntimeConfig) -> Check:
    name = "huge pages"
    if not pages.SETTING.exists():
        return Check(name, "this system has no setting for them", is_detail=True)
    if pages.gives_huge_pages():
        return Check(name, pages.SETTING.read_text(encoding="ascii").strip(), is_detail=True)
    if config.use_mmap == "on":
        return Check(name, "never given, which weights that are mapped do not need", is_detail=True)
    return Check(
        name,
        "never given, so decoding is several percent slower",
        faster=f"as root: echo madvise > {pages.SETTING}",
    )


def _memory(config: RuntimeConfig) -> Check:
    free = sizing.free_memory_bytes()
    try:
        model_bytes, projector_bytes = _model_bytes(config)
    except ModelError:
        return Check("memory", f"{figures.size(free)} free")  # what is wrong with the model has a line of its own
    finding = f"{figures.size(free)} free, {Path(config.model).name} has {figures.size(model_bytes)}"
    if projector_bytes:
        finding += f", its projector {figures.size(projector_bytes)}"
    if model_bytes + projector_bytes <= free or (config.n_gpu_layers and backend.has_gpu()):
        return Check("memory", finding)
    return Check("memory", finding, "take a smaller model or quantization, or end other programs; it would be swapped")


def _context(config: RuntimeConfig) -> Iterator[Check]:
    """The KV and the states that a server would have from its start; nothing where the model cannot be read."""
    try:
        parts = header.read_parts(catalog.resolve(config.model, os.environ).path)
    except ModelError:
        return
    try:
        with unlogged("uma.engine") as said:
            placed = sizing.placed(config, parts, devices.gpus(), beside_bytes=_model_bytes(config)[1])
            plan = planned(parts, placed)
    except ConfigError as error:
        yield Check("context", "there is no memory for it", error.message)
        return
    memory = f"{plan.kind}: {words.memory_line(plan)}" if plan else "an encoder keeps nothing of a text"
    yield Check("context", "; ".join([memory, *said]), is_detail=not said)


def _model_bytes(config: RuntimeConfig) -> tuple[int, int]:
    """The weights of the model; and of what it sees and hears with, and of its adapters."""
    path = catalog.resolve(config.model, os.environ).path
    projector = projectors.chosen(config.mmproj, Path(path))
    beside_bytes = projectors.size_bytes(projector) + sizing.adapter_bytes(config)
    return sum(part.size_bytes for part in header.read_parts(path)), beside_bytes


def folders(config: RuntimeConfig) -> Iterator[Check]:
    """The owners of the folders that UMA writes to."""
    socket = Path(config.socket)
    yield Check("socket", f"{socket}, in {_owner(socket.parent)}", _socket_problem(socket), is_detail=True)
    if config.prefix_folder:
        yield _cache_dir(Path(config.prefix_folder).expanduser())


FILES = ("http_keys", "http_tls_cert", "http_tls_key", "socket_users")
"""Settings that name a file which a server reads again when it has changed."""


def access(config: RuntimeConfig, pids: Iterable[int] = ()) -> Iterator[Check]:
    """The files of keys, users and the certificate that the settings name, or the servers that run, which go on with
    what they had where one is broken.
    """
    every = [config, *(_with_files_of(pid, config) for pid in pids)]
    by_files = {(own.http_keys, own.http_tls_cert, own.socket_users): own for own in reversed(every)}
    for named, own in by_files.items():
        if any(named):
            yield Check("access", ", ".join(filter(None, named)), _access_problem(own), is_detail=own is not config)


def disks(config: RuntimeConfig, pids: Iterable[int] = ()) -> Iterator[Check]:
    """The disks of folders that the settings name, or the servers that run, and of these servers' logs."""
    here = attrs.evolve(config, http_jobs=config.http_jobs if config.http else "")
    every = [here, *(_with_files_of(pid, here) for pid in pids)]
    written = {Path(folder) for own in every for folder in (own.http_jobs, own.prefix_folder) if folder}
    if any(own.history for own in every):
        written.add(default_path().parent)
    for pid in pids:
        with suppress(OSError):  # it is gone, or another user's
            log = Path(f"/proc/{pid}/fd/2").readlink()
            if log.is_file():
                written.add(log.parent)
    for folder in sorted(written):
        try:
            free_bytes = shutil.disk_usage(_nearest_folder(folder)).free
        except OSError:  # another user's
            continue
        todo = f"the disk of {folder} is full: what is written there is lost or refused; free some space"
        is_full = free_bytes < MIN_DISK_BYTES
        yield Check("disk", f"{folder}, {figures.size(free_bytes)} free", todo if is_full else "", is_detail=True)


def _access_problem(config: RuntimeConfig) -> str:
    from uma.http import serve  # noqa: PLC0415  (slow to import)

    try:
        serve.check(attrs.evolve(config, http=config.http or "127.0.0.1:0"))
        Users.load(config.socket_users)
        certificate = serve.Certificate.open(config)
    except ConfigError as error:
        return f"{describe(error)}; a server that runs keeps what it read before"
    return "; ".join(() if certificate is None else certificate.problems())


def _with_files_of(pid: int, config: RuntimeConfig) -> RuntimeConfig:
    """`config` with the files that the server with this `pid` was started with, where Linux tells them to this user."""
    from uma.cli.parser import build_parser  # noqa: PLC0415  (it imports the commands)

    process = Path("/proc") / str(pid)
    try:
        given, variables = (os.fsdecode((process / of).read_bytes()).split("\0")[:-1] for of in ("cmdline", "environ"))
        folder = (process / "cwd").readlink()
        with redirect_stderr(io.StringIO()):  # what its options are warned of is told where it was started
            options = build_parser().parse_args(given[given.index("run") :])
            if options.config_file is not None:
                options.config_file = folder / options.config_file
            served = load_settings(options, dict(pair.split("=", 1) for pair in variables if "=" in pair)).config
    except (OSError, ValueError, UmaError, SystemExit):  # it is gone, another user's, or no `uma run`
        return config
    named = {name: getattr(served, name) for name in FILES}
    named |= {"http_jobs": served.http and served.http_jobs, "cache_dir": served.prefix_folder}
    files: dict[str, Any] = {name: file and str(folder / file) for name, file in named.items()}
    return attrs.evolve(config, **files, history=served.history)


def _socket_problem(path: Path) -> str:
    if (problem := objection(path)) is not None:
        return problem
    try:
        socketfile.check(path)
    except socketfile.SocketTaken:
        return ""  # a server that is alive is what the path is for
    except ConfigError as error:
        return error.message
    folder = _nearest_folder(path.parent)
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to: choose another --socket"


def _cache_dir(folder: Path) -> Check:
    nearest = _nearest_folder(folder)
    is_usable = os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)
    mend = "mend its permissions, or " if os.path.isdir(nearest) and nearest.stat().st_uid == posix.user_id() else ""
    todo = f"{nearest} cannot be written to: {mend}name another folder with --cache-dir"
    return Check("cache_dir", f"{folder}, {_owner(folder)}", "" if is_usable else todo, is_detail=True)


def _nearest_folder(folder: Path) -> Path:
    """The folder, or of those above it the first that exists: where it would be made."""
    return next((parent for parent in (folder, *folder.parents) if os.path.exists(parent)), Path("/"))


def _owner(folder: Path) -> str:
    try:
        status = folder.stat()
    except FileNotFoundError:
        return "a folder that is made when it is needed"
    except OSError as error:
        return f"a folder that cannot be looked at: {error.strerror}"
    owner = "of this user's" if status.st_uid == posix.user_id() else f"of uid {status.st_uid}"
    return f"a folder {owner}, mode {stat.S_IMODE(status.st_mode):03o}"


def models(config: RuntimeConfig) -> Iterator[Check]:
    """The model of the settings, and those of the folder."""
    try:
        path = catalog.resolve(config.model, os.environ).path
        header.read_parts(path)
        yield Check("model", str(path) if str(path) == config.model else f"{config.model}: {path}")
    except ModelError as error:
        yield Check("model", f"{config.model}: cannot be loaded", error.message)
    found = catalog.available(os.environ, (places.UMA_MODELS,), is_thorough=True)
    broken = "; ".join(catalog.broken(found))
    folder = places.models_folder(os.environ)
    where = f"in {folder}" if folder else "UMA_MODELS names no folder"
    todo = places.folder_problem(os.environ)
    names = ", ".join(model.name for model in found if model.problem is None)
    lacks = f"broken files, to be downloaded again or removed: {broken}" if broken else ""
    # Those of them that are to be loaded have a line of their own.
    yield Check("models", f"{names} ({where})", todo, lacks=lacks)


def server(config: RuntimeConfig) -> Check:
    """Whether a server answers on the socket, with a token that really went through its engine."""
    if not os.path.exists(config.socket):
        return Check("server", "none runs; uma run starts one")
    if config.protocol != "json":
        return Check("server", f"not asked: protocol {config.protocol} has no health message")
    try:
        return trio.run(_ask_server, config)
    except trio.TooSlowError:
        remedy = (
            f"timeout: no answer within {SERVER_TIMEOUT_SEC:.0f} s: it can be busy, as `uma top` shows; where nothing "
            "moves there, look at its log, end it with `uma stop --now` and start it again"
        )
        return Check("server", "does not answer", remedy)
    except ConnectionLost as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            # It is in no server's way: the next one takes its path.
            return Check("server", "none runs; one has left its socket")
        return Check("server", "cannot be reached", error.message)
    except UmaError as error:
        return Check("server", "refuses", error.message)


def _failure(model: ListedModel) -> str:
    is_over = model.fits and model.state == "unloaded" and model.failure
    return f"{model.failure}; the next request for it loads it again" if is_over else model.failure


async def _ask_server(config: RuntimeConfig) -> Check:
    with trio.fail_after(SERVER_TIMEOUT_SEC):
        try:
            async with connect(config.socket, loads=False, waits=False) as client:
                health, several = await client.health(), client.info.models
                card = words.model_line(client.info.model)
                listed = await client.models() if several else ()
        except Loading as error:
            return Check("server", error.message)
    if paused_sec := health.paused_sec:
        return Check("server", f"{words.paused(paused_sec)}: it computes nothing", "`uma resume` continues")
    if several and health.status == "ok":
        lacks = [why for model in listed if (why := model.not_pinned or _failure(model))]
        return Check("server", f"ok: {words.names(several)}", lacks="; ".join(lacks))
    todo = "its engine gives no token: look at its log, restart it" if health.status == "stalled" else ""
    return Check("server", f"{health.status}, a token after {words.duration(health.latency_ms)}: {card}", todo)
