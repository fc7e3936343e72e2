"""llama.cpp's templates, vocabularies and server tests, JSON Schema's tests, real models: for tests with them.

`python -m benchmarks.reference` fetches them. Without them these tests are skipped by name; where `TEST_REQUIRED` has
`reference` they fail.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from required import missing

from benchmarks.reference import RealModel, model_path, source_tree
from benchmarks.reference import schema_suite as _schema_suite

_HOW = "python -m benchmarks.reference fetches it"


def real_model(name: RealModel) -> Path:
    """The file of a real model: `smollm2` (instruct, ChatML), `gemma3` (a base model with sliding windows) or
    `qwen2.5-coder` (calls tools).
    """
    path = model_path(name)
    return path if path.exists() else missing("reference", f"there is no {path.name}: {_HOW}")


def llama_cpp() -> Path:
    """llama.cpp's source tree, as llama-cpp-python's source package holds it."""
    tree = source_tree()
    return tree if tree.exists() else missing("reference", f"there is no source of llama.cpp: {_HOW}")


def schema_suite() -> Path:
    """The folder of JSON Schema's official tests of draft 2020-12."""
    suite = _schema_suite()
    return suite if suite.exists() else missing("reference", f"there are no tests of JSON Schema: {_HOW}")


@cache
def template_names() -> tuple[str, ...]:
    """Names of llama.cpp's chat templates, for `pytest.mark.parametrize`; empty where they are missing."""
    return tuple(sorted(path.name for path in (source_tree() / "models" / "templates").glob("*.jinja")))


@cache
def vocabulary_names() -> tuple[str, ...]:
    """Names of llama.cpp's vocabularies (`qwen2`, `llama-bpe`, …); empty where they are missing."""
    paths = (source_tree() / "models").glob("ggml-vocab-*.gguf")
    return tuple(sorted(path.stem.removeprefix("ggml-vocab-") for path in paths))


def template(name: str) -> str:
    """The text of one of llama.cpp's chat templates."""
    return (llama_cpp() / "models" / "templates" / name).read_text()


def vocabulary(name: str) -> Path:
    """The file of one of llama.cpp's vocabularies: a GGUF without tensors."""
    return llama_cpp() / "models" / f"ggml-vocab-{name}.gguf"
