"""GGUF files in the making: headers, fields of other files, and random weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt


class File:
    """A file in the making; the same random weights every time."""

    def __init__(self, path: Path, architecture: str, most_gain: float = math.inf) -> None:
        """`most_gain`: what asks for more than that in `matrix` or `full` gets that."""
        self._writer = gguf.GGUFWriter(path, architecture)
        self._architecture = architecture
        self._rng = np.random.default_rng(0)
        self._most_gain = most_gain

    def header(self, **fields: bool | int | float | list[int] | list[float]) -> None:
        """Fields of the architecture; `__` in a name stands for a dot."""
        add = {bool: self._writer.add_bool, int: self._writer.add_uint32, float: self._writer.add_float32}
        for name, value in fields.items():
            add.get(type(value), self._writer.add_array)(f"{self._architecture}.{name.replace('__', '.')}", value)

    def text(self, name: str, value: str) -> None:
        """A field that is a text, by its whole name."""
        self._writer.add_string(name, value)

    def copy_fields(self, source: Path, is_wanted: Callable[[str], bool], template: str) -> int:
        """Fields of another file, with `template` for its chat template; how many tokens its vocabulary has."""
        fields = {name: field for name, field in gguf.GGUFReader(source).fields.items() if is_wanted(name)}
        for name, field in fields.items():
            if name != "tokenizer.chat_template":
                self._writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
        self._writer.add_chat_template(template)
        return len(fields["tokenizer.ggml.tokens"].data)

    def matrix(self, name: str, *shape: int, gain: float = 1) -> None:
        """Random weights with a deviation of `gain` over the root of the columns. Vocabularies are F16, others F32."""
        gain = min(gain, self._most_gain)
        weights = self._rng.standard_normal(shape, dtype=np.float32) * np.float32(gain / shape[-1] ** 0.5)
        self.add(name, weights.astype(np.float16) if shape[0] > 10_000 else weights)

    def full(self, name: str, shape: int | tuple[int, ...], value: float = 1) -> None:
        """The same value everywhere."""
        self.add(name, np.full(shape, min(value, self._most_gain), np.float32))

    def uniform(self, name: str, shape: int | tuple[int, ...], low: float, high: float) -> None:
        """Random values between two."""
        self.add(name, self._rng.uniform(low, high, shape).astype(np.float32))

    def add(self, name: str, data: npt.NDArray[np.generic], kind: gguf.GGMLQuantizationType | None = None) -> None:
        """A tensor as it is."""
        self._writer.add_tensor(name, data, raw_dtype=kind)

    def close(self) -> None:
        """Write all of it."""
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()
