"""Builds the peers UMA is measured against, from the same source and with the same flags as the library UMA runs on.

`llama-server` and `llama-batched-bench` come from the llama.cpp tree inside llama-cpp-python's own source package, so
a difference in the results is a difference in scheduling, never in kernels. `python -m llama_cpp.server` gets a virtual
environment of its own. Everything lies in the benchmarks' cache folder and is made once.

UMA leaves out AMX by default, and so do the peers: built by GCC 12 they would use it and die, and the option that keeps
them alive (`--no-repack`) costs the speed of the other types too.

Run with `python -m benchmarks.build_peers`. Needs a C++ compiler, CMake and a Python package index; nothing else is
fetched (the web page and TLS of llama-server are left out, both of which would look for more).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.cache import LLAMA_CPP_PYTHON, cache_dir, peer_binary, peer_python
from benchmarks.reference import fetch_source

TARGETS = ("llama-server", "llama-batched-bench")

FLAGS = (
    # What llama-cpp-python's own build passes: a release build of shared libraries, without curl. GGML_NATIVE and
    # OpenMP stay at llama.cpp's defaults there, and so they do here.
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_COMMON=ON",
    # The tools, and nothing that has to be downloaded or that no measurement uses.
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
)

WITHOUT_AMX = ("-DCMAKE_C_FLAGS=-U__AMX_INT8__", "-DCMAKE_CXX_FLAGS=-U__AMX_INT8__")
"""Flags that leave out AMX: with GGML_NATIVE the compiler's own macro decides on it."""


def build_llama_cpp(cache: Path, jobs: int) -> None:
    """Configure and compile `TARGETS` into the cache's `build` folder; a second call is quick."""
    tree = fetch_source()
    build = cache / "build"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    subprocess.run(["cmake", *generator, "-S", str(tree), "-B", str(build), *FLAGS, *WITHOUT_AMX], check=True)
    subprocess.run(["cmake", "--build", str(build), "-j", str(jobs), "--target", *TARGETS], check=True)


def make_peer_venv(cache: Path) -> None:
    """A virtual environment with `llama_cpp.server`, of the version UMA is pinned to."""
    if not peer_python().exists():
        subprocess.run([sys.executable, "-m", "venv", str(cache / "peer-venv")], check=True)
    pip = [str(peer_python()), "-m", "pip", "install", "--quiet"]
    # pip keeps wheels by version alone, so one that was built with other flags must not be taken from its cache.
    pip += ["--no-cache-dir", "--no-binary", "llama-cpp-python"]
    wanted = f"llama-cpp-python[server]=={LLAMA_CPP_PYTHON}"
    subprocess.run([*pip, wanted], env={**os.environ, "CMAKE_ARGS": shlex.join(WITHOUT_AMX)}, check=True)


def main() -> int:
    """Build what is missing. Exit code 1 with one sentence where a tool is missing or a step fails."""
    if not shutil.which("cmake"):
        print("build_peers: cmake is missing; install it, and a C++ compiler, to build llama-server", file=sys.stderr)
        return 1
    cache = cache_dir()
    try:
        build_llama_cpp(cache, os.cpu_count() or 1)
        make_peer_venv(cache)
    except subprocess.CalledProcessError as error:
        print(f"build_peers: {error.cmd[0]} failed with exit code {error.returncode}", file=sys.stderr)
        return 1
    for target in TARGETS:
        print(peer_binary(target))
    print(f"{peer_python()} -m llama_cpp.server")
    return 0


if __name__ == "__main__":
    sys.exit(main())
