"""One rule for the names of models, on the command line, over HTTP and on the socket."""

from __future__ import annotations

import pytest

from uma.models.names import meant

NAMES = {
    "smol": ("SmolLM2-135M-Instruct-Q8_0",),
    "smol-f16": ("SmolLM2-135M-Instruct-F16",),
    "qwen": ("Qwen/Qwen3-8B-GGUF/qwen3-8b-q4", "Qwen/Qwen3-8B-GGUF:Q4"),
    "QWEN": ("qwen3-8B-Q4",),
    "llama": ("llama3:latest",),
}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("SmolLM2-135M-Instruct-Q8_0", ["smol"]),
        ("smollm2-135m-instruct-q8_0.GGUF", ["smol"]),
        ("smollm2-135m-instruct-q", ["smol"]),
        ("smollm2", ["smol", "smol-f16"]),
        ("qwen3-8b-q4", ["qwen", "QWEN"]),
        ("qwen3-8B-Q4", ["QWEN"]),
        ("qwen3-8b-gguf:q4", ["qwen"]),
        ("llama3", ["llama"]),
        ("Llama", ["llama"]),
        ("llama3:latest", ["llama"]),
        ("lm2", []),
        ("", []),
        (":latest", []),
    ],
)
def test_a_whole_name_goes_before_one_in_other_capitals_and_this_before_a_beginning(
    asked: str, expected: list[str]
) -> None:
    assert meant(asked, NAMES) == expected
