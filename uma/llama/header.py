"""A GGUF file's header, read by ggml's own reader, and what can be said of a file that has none.

A header says everything but the weights: what `uma models` lists, which part of a split model a file is, and whether
the file is all there. It is checked before llama.cpp loads a file, so that what is wrong can be said in plain words.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import attrs
import llama_cpp.llama_cpp as lib

from uma.constraints import show
from uma.errors import ModelError
from uma.llama import backend
from uma.llama.log import LOG

MAGIC = b"GGUF"
VERSIONS = range(2, 4)

STRING, ARRAY = 8, 9
"""`gguf_type`."""

VOCABULARY, VOCABULARY_KIND = b"tokenizer.ggml.tokens", b"tokenizer.ggml.model"
NO_VOCABULARY = ("no_vocab", "none")
"""Kinds with which llama.cpp reads no vocabulary."""

DAMAGED = "its header is damaged, so download it again: "
MAX_FIGURE = 2**31 - 1
"""Maximum of a figure in a header: llama.cpp hands them on as signed numbers of 32 bits."""
MAX_LAYERS = 512
"""llama.cpp's `LLAMA_MAX_LAYERS`. A header with more ends the process, by an assertion."""
MAX_EXPERTS = 1_024
"""llama.cpp's `LLAMA_MAX_EXPERTS`, which is asserted too."""
MAX_PARTS = 2**16 - 1
"""Maximum parts of a split model: its header counts them with 16 bits."""
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_FIGURE = re.compile(r"(^|[._])(count|length|size)(_|$)")
"""Pattern in the name of each key that says how many or how large."""


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _function(name: str, arguments: list[Any], result: Any) -> Any:
    # ggml is a dependency of the llama library, so its functions are found through the same handle.
    function = getattr(lib._lib, name)
    function.argtypes = arguments
    function.restype = result
    return function


_open = _function("gguf_init_from_file", [ctypes.c_char_p, _InitParams], ctypes.c_void_p)
_free = _function("gguf_free", [ctypes.c_void_p], None)
_find = _function("gguf_find_key", [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_int64)
_n_keys = _function("gguf_get_n_kv", [ctypes.c_void_p], ctypes.c_int64)
_key = _function("gguf_get_key", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_char_p)
_type = _function("gguf_get_kv_type", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int)
_text = _function("gguf_get_val_str", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_char_p)
_array_length = _function("gguf_get_arr_n", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_size_t)
_array_type = _function("gguf_get_arr_type", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int)
_array_data = _function("gguf_get_arr_data", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_void_p)
_array_text = _function("gguf_get_arr_str", [ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t], ctypes.c_char_p)
_data_offset = _function("gguf_get_data_offset", [ctypes.c_void_p], ctypes.c_size_t)
_n_tensors = _function("gguf_get_n_tensors", [ctypes.c_void_p], ctypes.c_int64)
_tensor_name = _function("gguf_get_tensor_name", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_char_p)
_tensor_type = _function("gguf_get_tensor_type", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int)
_tensor_offset = _function("gguf_get_tensor_offset", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_size_t)
_tensor_size = _function("gguf_get_tensor_size", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_size_t)
_tensor_shape = _function("gguf_get_tensor_ne", [ctypes.c_void_p, ctypes.c_int64], ctypes.POINTER(ctypes.c_int64))
_type_name = _function("ggml_type_name", [ctypes.c_int], ctypes.c_char_p)

_NUMBERS: dict[int, tuple[str, Any]] = {
    0: ("u8", ctypes.c_uint8),
    1: ("i8", ctypes.c_int8),
    2: ("u16", ctypes.c_uint16),
    3: ("i16", ctypes.c_int16),
    4: ("u32", ctypes.c_uint32),
    5: ("i32", ctypes.c_int32),
    6: ("f32", ctypes.c_float),
    7: ("bool", ctypes.c_bool),
    10: ("u64", ctypes.c_uint64),
    11: ("i64", ctypes.c_int64),
    12: ("f64", ctypes.c_double),
}
"""End of the functions' names and C's type, by `gguf_type`."""
_SCALARS: dict[int, Callable[[int, int], Any]] = {
    number: _function(f"gguf_get_val_{name}", [ctypes.c_void_p, ctypes.c_int64], ctype)
    for number, (name, ctype) in _NUMBERS.items()
}


@attrs.frozen
class Header:
    """What a GGUF file says of itself, without its weights."""

    path: Path
    size_bytes: int
    """Size of this file alone."""
    metadata: dict[str, Any]
    """Strings, numbers and booleans by key. Of an array only its length is kept, under its key."""
    tensor_types: dict[str, int]
    """How many numbers are stored in each ggml type, by the type's name such as `q8_0`."""
    needed_bytes: int
    """The least size of a whole file with this header."""
    data_offset: int
    """Where the weights begin."""
    by_layer: dict[str, tuple[float, ...]]
    """Arrays of numbers by key, with the architecture's name left out: as a rule a figure for each layer."""
    tensor_bytes: dict[str, int]
    """Size of each tensor in this file, by its name."""
    tensor_widths: dict[str, int]
    """First dimension of each of them."""

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    @property
    def has_classifier(self) -> bool:
        """Whether there are weights that turn a text's state into scores: some of a reranker's."""
        return any(name.startswith("cls.") for name in self.tensor_bytes)

    @property
    def parameters(self) -> int:
        """Numbers stored in this file."""
        return sum(self.tensor_types.values())

    @property
    def context_length(self) -> int:
        """Tokens the model was trained for; 0 where the header does not say."""
        return int(self.metadata.get(f"{self.architecture}.context_length", 0))

    @property
    def n_layers(self) -> int:
        """Layers, without those that only guess further tokens, which llama.cpp does not load."""
        figures = (
            self.metadata.get(f"{self.architecture}.{key}", 0) for key in ("block_count", "nextn_predict_layers")
        )
        total, guessing = (figure if isinstance(figure, int) else 0 for figure in figures)
        return total - guessing

    @property
    def quantization(self) -> str:
        """Name such as `Q8_0`: what the file says it is, else the type that most of its numbers have."""
        file_type = self.metadata.get("general.file_type")
        if name := file_type_name(file_type):
            return name
        common = max(self.tensor_types, key=lambda name: self.tensor_types[name], default="unknown")
        return common.upper()

    @property
    def split(self) -> tuple[int, int]:
        """Which part of how many, counted from 1; (1, 1) for a model in one file."""
        count = int(self.metadata.get("split.count", 0))
        return (int(self.metadata.get("split.no", 0)) + 1, count) if count > 1 else (1, 1)


def file_type_name(number: Any) -> str:
    """`Q4_K_M` for what `general.file_type` holds; empty where that is no such number."""
    return _FILE_TYPES.get(number, "") if isinstance(number, int) else ""


def _file_type_name(number: int) -> str:
    """`Q4_K_M`, as files and people call it, for llama.cpp's "Q4_K - Medium"."""
    name: str = lib.llama_ftype_name(number).decode()
    name = name.removeprefix("all ").replace("Q2_K - Medium", "Q2_K").replace(" MoE", "_MOE")
    name = re.sub(r" - (Small|Medium|Large)$", lambda match: "_" + match[1][0], name)
    return re.sub(r" (mix )?- .*", "", name)


def part_path(path: Path, part: int, count: int) -> Path:
    """The file of part `part` (from 1) of a split model, named beside `path` as llama.cpp names parts."""
    return path.with_name(f"{model_stem(path)}-{part:05d}-of-{count:05d}.gguf")


def model_stem(path: Path) -> str:
    """A file's name without its ending and, of a part of a split model, without the part's number."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)


def part_number(path: Path) -> int | None:
    """Which part of a split model a file is by its name, counted from 1; None for a model in one file."""
    match = re.search(r"-(\d{5})-of-\d{5}$", path.stem)
    return int(match[1]) if match else None


def read_parts(path: Path) -> list[Header]:
    """The headers of all parts of a model, given its first. One for a model in one file. Raises `ModelError`."""
    first = read(path)
    part, count = first.split
    if part != 1:
        start = part_path(path, 1, count)
        raise ModelError(f"{path}: is part {part} of {count} of a split model; load it by its first part, {start}")
    parts = [first]
    for number in range(2, count + 1):
        expected = part_path(path, number, count)
        if not os.path.exists(expected):
            raise ModelError(f"{path}: its part {number} of {count} is missing: there is no {expected}")
        parts.append(read(expected))
        if parts[-1].split != (number, count):
            raise ModelError(f"{expected}: is not part {number} of {count} of {path}")
    return parts


def impossible_figure(metadata: Mapping[str, Any], by_layer: Mapping[str, Sequence[float]]) -> str | None:
    """What a header says that no model can be; None where all its figures are possible.

    Believed, such a figure ends the process in llama.cpp, by an assertion, or keeps the planning of memory busy for
    hours. `by_layer` has the arrays of numbers, as in `Header`.
    """
    own = f"{metadata.get('general.architecture')}."

    def number(name: str) -> int:
        value = metadata.get(own + name)
        return value if isinstance(value, int) else 0

    experts, groups = number("expert_count"), number("expert_group_count")
    bounds = {
        "split.count": (0, MAX_PARTS),
        "split.no": (0, MAX_PARTS),
        VOCABULARY.decode(): (0, MAX_FIGURE),
        **{key: (0, MAX_FIGURE) for key in metadata if key.startswith(own) and _FIGURE.search(key)},
        own + "block_count": (1, MAX_LAYERS),
        own + "nextn_predict_layers": (0, number("block_count")),
        own + "full_attention_interval": (1, MAX_FIGURE),
        own + "expert_count": (0, MAX_EXPERTS),
        # Of one expert some architectures have all, whatever is used of it.
        own + "expert_used_count": (0, experts if experts > 1 else 1),
        own + "expert_group_count": (0, max(0, experts - 1)),
    }
    if groups > 1:
        bounds[own + "expert_group_used_count"] = (1, groups - 1)
    for key, (least, most) in bounds.items():
        for value in by_layer.get(key.removeprefix(own), (metadata.get(key, least),)):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else show(value)
                return f"{key} is {shown}, and it can be {least:,} to {most:,}"
    used = by_layer.get("expert_used_count", (number("expert_used_count"),))
    if experts > 0 and used and not any(used):
        return f"{own}expert_used_count is 0, and it can be 1 to {experts:,}"
    scaling = metadata.get(own + "rope.scaling.type", ROPE_SCALINGS[0])
    if scaling not in ROPE_SCALINGS:
        return f"{own}rope.scaling.type is {show(scaling)}, and it can be {', '.join(ROPE_SCALINGS)}"
    return None


def _contradiction(header: Header) -> str | None:
    """What a header says that its other figures or its tensors' shapes contradict, of what llama.cpp believes until an
    assertion or a loop without an end; other figures its loader compares with the shapes.
    """
    own = f"{header.architecture}."

    def number(name: str) -> int:
        value = None if name in header.by_layer else header.metadata.get(own + name)
        return value if isinstance(value, int) else 0

    heads = number("attention.head_count")
    most = number("attention.key_length") or (number("embedding_length") // heads if heads else 0)
    rotated = number("rope.dimension_count")
    is_said = f"{own}rope.dimension_count" in header.metadata and "rope.dimension_count" not in header.by_layer
    if heads and most and is_said and (rotated % 2 or not 2 <= rotated <= most):
        return f"{own}rope.dimension_count is {rotated:,}, and it can be an even number from 2 to {most:,}"
    said = {"token_embd.weight": "embedding_length", "ssm_out.weight": "ssm.inner_size"}
    for name, width in header.tensor_widths.items():
        key = said.get(re.sub(r"^blk\.\d+\.", "", name), "")
        if own + key in header.metadata and number(key) != width:
            return f"{own}{key} is {number(key):,}, and {name} has {width:,}"
    return None


def read(path: Path) -> Header:
    """Read a file's header. Raises `ModelError`, naming the file and the reason, where there is no whole one, or one
    whose figures no model can have.
    """
    size = _check_is_file(path)
    with path.open("rb") as file:
        start = file.read(512)
    _check_magic(path, start)
    backend.start()
    with _HeaderReader(path) as reader:
        header = reader.header(size)
    if header.needed_bytes > size:
        raise ModelError(
            f"{path}: is cut short: it has {size:,} of at least {header.needed_bytes:,} bytes. "
            "Copy or download it again"
        )
    if (problem := impossible_figure(header.metadata, header.by_layer) or _contradiction(header)) is not None:
        raise ModelError(f"{path}: {DAMAGED}{problem}")
    return header


def check_vocabulary(path: Path) -> None:
    """Raise `ModelError` for the vocabulary of a file, whose header has been read, that llama.cpp does not survive.

    Takes a tenth of a second for 150,000 tokens, so it is for files that are about to be loaded.
    """
    with _HeaderReader(path) as reader:
        reader.check_vocabulary()


def _check_is_file(path: Path) -> int:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISDIR(status.st_mode):
        inside = sorted(inner.name for inner in path.glob("*.gguf")) if os.access(path, os.R_OK) else []
        hint = f"name a file in it, such as {path / inside[0]}" if inside else "there is no .gguf file in it"
        raise ModelError(f"{path}: is a directory; {hint}")
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path}: is not a regular file")
    if not os.access(path, os.R_OK):
        raise ModelError(f"{path}: cannot be read: permission denied")
    if status.st_size == 0:
        raise ModelError(f"{path}: is empty (0 bytes)")
    return status.st_size


_FOREIGN: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"PK\x03\x04|\x80[\x02-\x05]"), "a PyTorch checkpoint"),
    (re.compile(rb".{8}\{", re.DOTALL), "a safetensors file"),
    (re.compile(rb"ggml|lmgg|tjgg|fmgg|algg"), "a GGML file of before 2023, which llama.cpp no longer reads"),
    (re.compile(rb"version https://git-lfs"), "a Git LFS pointer, not the file itself: run `git lfs pull`"),
    (re.compile(rb"\s*<(!doctype|html|\?xml)", re.IGNORECASE), "a web page, so the download went wrong"),
    (re.compile(rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf"), "a compressed archive: unpack it first"),
)


def _check_magic(path: Path, start: bytes) -> None:
    if not start.startswith(MAGIC):
        if MAGIC.startswith(start):
            raise ModelError(f"{path}: is cut short: it has {len(start)} bytes. Copy or download it again")
        looks = next((name for pattern, name in _FOREIGN if pattern.match(start)), None)
        raise ModelError(f"{path}: is not a GGUF file" + (f"; it looks like {looks}" if looks else ""))
    version = int.from_bytes(start[4:8], "little")
    if len(start) < 24:
        raise ModelError(f"{path}: is cut short: it has {len(start)} bytes. Copy or download it again")
    if int.from_bytes(start[4:8], "big") in VERSIONS:
        raise ModelError(f"{path}: is a big-endian GGUF file, which this machine cannot use")
    if version not in VERSIONS:
        raise ModelError(f"{path}: has GGUF version {version}; this llama.cpp reads versions 2 and 3")


class _HeaderReader:
    """Owner of one `gguf_context`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        mark = LOG.mark
        self._handle: int | None = _open(os.fsencode(path), _InitParams(no_alloc=True, ctx=None))
        if not self._handle:
            raise ModelError(f"{path}: its header is cut short or damaged{quoted(mark)}")

    def header(self, size: int) -> Header:
        handle = self._handle
        keys = [(_key(handle, index).decode("utf-8", "replace"), index) for index in range(_n_keys(handle))]
        types: dict[str, int] = {}
        sizes: dict[str, int] = {}
        widths: dict[str, int] = {}
        data_offset = end = int(_data_offset(handle))
        for index in range(_n_tensors(handle)):
            name = _type_name(_tensor_type(handle, index)).decode()
            shape = _tensor_shape(handle, index)
            types[name] = types.get(name, 0) + shape[0] * shape[1] * shape[2] * shape[3]
            tensor = _tensor_name(handle, index).decode("utf-8", "replace")
            sizes[tensor] = taken = int(_tensor_size(handle, index))
            widths[tensor] = int(shape[0])
            end = max(end, data_offset + _tensor_offset(handle, index) + taken)
        metadata = {key: self._value(index) for key, index in keys}
        own = f"{metadata.get('general.architecture')}."
        by_layer = {
            key.removeprefix(own): self._numbers(index)
            for key, index in keys
            if key.startswith(own) and _type(handle, index) == ARRAY and _array_type(handle, index) in _NUMBERS
        }
        return Header(self._path, size, metadata, types, int(end), data_offset, by_layer, sizes, widths)

    def check_vocabulary(self) -> None:
        """Raise `ModelError` where a token is there twice: llama.cpp's loader would end the process by an assertion."""
        index = _find(self._handle, VOCABULARY)
        kind = _find(self._handle, VOCABULARY_KIND)
        if index < 0 or _type(self._handle, index) != ARRAY or _array_type(self._handle, index) != STRING:
            return
        if kind >= 0 and self._value(kind) in NO_VOCABULARY:
            return
        # Converted once: a vocabulary has hundreds of thousands of tokens.
        handle, key = ctypes.c_void_p(self._handle), ctypes.c_int64(index)
        read: Iterator[bytes] = map(_array_text, repeat(handle), repeat(key), range(self._value(index)))
        tokens = [token or b"[EMPTY_%d]" % id for id, token in enumerate(read)]
        if len(set(tokens)) == len(tokens):
            return
        first: dict[bytes, int] = {}
        id, token = next((id, token) for id, token in enumerate(tokens) if first.setdefault(token, id) != id)
        raise ModelError(
            f"{self._path}: its vocabulary has {show(token.decode('utf-8', 'replace'))} twice, as token "
            f"{first[token]} and as token {id}, which llama.cpp cannot load. Convert the model again"
        )

    def _value(self, index: int) -> Any:
        kind = _type(self._handle, index)
        if kind == STRING:
            return _text(self._handle, index).decode("utf-8", "replace")
        if kind == ARRAY:
            return int(_array_length(self._handle, index))
        return _SCALARS[kind](self._handle or 0, index)

    def _numbers(self, index: int) -> tuple[float, ...]:
        """A short array of numbers or booleans."""
        ctype = _NUMBERS[_array_type(self._handle, index)][1]
        length = int(_array_length(self._handle, index))
        return tuple((ctype * length).from_address(_array_data(self._handle, index))) if length else ()

    def __enter__(self) -> _HeaderReader:
        return self

    def __exit__(self, *_: object) -> None:
        _free(self._handle)
        self._handle = None


def quoted(mark: int) -> str:
    """What llama.cpp's log gave as a problem after `mark`, for the end of an error message; empty where it did not.

    The names of C functions that llama.cpp puts in front of its lines are left out.
    """
    lines = LOG.since(mark)
    problems = [line for line in lines if line.is_problem] or lines
    texts = [re.sub(r"^(\w+: )+", "", line.text) for line in problems[-4:]]
    unique = list(dict.fromkeys(text for text in texts if text))
    return ". llama.cpp says: " + "; ".join(unique) if unique else ""


_FILE_TYPES = {number: name for number in range(64) if (name := _file_type_name(number)) and "unknown" not in name}
