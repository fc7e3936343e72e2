"""One rule for the names of models, on the command line, over HTTP and on the socket."""

from __future__ import annotations

import difflib

import pytest

from uma.models.names import meant, nearest_model

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


MANY = tuple(f"m{number}-{name}" for number in range(60) for name in ("gemma-3-270m-q4_k_m", "qwen2.5-coder-0.5b"))


@pytest.mark.parametrize(
    ("asked", "near"),
    [("m7-gema-3-270m-q4_k_m", "m7-gemma-3-270m-q4_k_m"), ("M59-QWEM", "m59-qwen2.5-coder-0.5b"), ("zz-17", None)],
)
def test_a_name_is_compared_at_length_with_those_alone_that_have_enough_of_its_letters(
    monkeypatch: pytest.MonkeyPatch, asked: str, near: str | None
) -> None:
    compared: list[float] = []
    compare = difflib.SequenceMatcher.quick_ratio

    def counted(matcher: difflib.SequenceMatcher[str]) -> float:
        compared.append(compare(matcher))
        return compared[-1]

    monkeypatch.setattr(difflib.SequenceMatcher, "quick_ratio", counted)
    assert nearest_model(asked, MANY) == (f"; did you mean {near}?" if near else "")
    assert len(compared) <= (2 * len(MANY) if near else 0)
