"""Errors of single fields: as text for people, and with the field's path for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self


class Wrong(str):
    """A line of an error's message about one field: `field: why`. It is a `str`, so that messages join such lines with
    others, and programs need not parse the text for the field.
    """

    field: str
    """Path of the field, such as `messages[2].content`; empty for a line about the whole object."""
    why: str

    def __new__(cls, field: str, why: str) -> Self:
        """A line about a field."""
        line = super().__new__(cls, f"{field}: {why}" if field else why)
        line.field, line.why = field, why
        return line

    def __reduce__(self) -> tuple[type[Wrong], tuple[str, str]]:  # pickle would pass the whole text only
        return Wrong, (self.field, self.why)

    def below(self, path: str) -> Wrong:
        """The line with the field's path prefixed by `path`, the path of its object."""
        separator = "." if path and self.field and not self.field.startswith("[") else ""
        return Wrong(path + separator + self.field, self.why)

    def renamed(self, names: Mapping[str, str]) -> Wrong:
        """The line with another name for the field, or for a field that contains it."""
        for end in range(len(self.field), 0, -1):
            is_whole = end == len(self.field) or self.field[end] in ".["
            if is_whole and (own := names.get(self.field[:end])) is not None:
                return Wrong(own + self.field[end:], self.why)
        return self


def below(path: str, lines: Iterable[str]) -> list[str]:
    """Lines about an object at `path`."""
    return [line.below(path) if isinstance(line, Wrong) else f"{path}.{line}" if path else line for line in lines]


def renamed(lines: Iterable[str], names: Mapping[str, str]) -> list[str]:
    """Lines with other names for the fields in `names`, and for fields inside of these."""
    return [line.renamed(names) if isinstance(line, Wrong) else line for line in lines]


OTHERS = {
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "dims": "dimensions",
    "stop_token_ids": "stop",
    "guided_json": "json_schema",
    "structured_outputs": "json_schema",
    "response_format": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "repeat_penalty": "repetition_penalty",
    "max_model_len": "n_ctx",
    "n_threads": "threads",
    "lora_path": "lora",
    "input_schema": "parameters",
    "use_tqdm": "progress",
    "lora_request": "model",
}
"""Names in other tools, and the equivalent here."""


def nearest(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    """`; did you mean X?`, or empty where no known word is near. A common `prefix` does not count as similarity."""
    if (own := OTHERS.get(word)) in (known := [*known]):
        return f"; did you mean {own}?"
    from difflib import get_close_matches  # noqa: PLC0415  (only a typo needs it)

    close = get_close_matches(
        word.removeprefix(prefix), [candidate.removeprefix(prefix) for candidate in known], n=1, cutoff=0.6
    )
    return f"; did you mean {prefix}{close[0]}?" if close else ""
