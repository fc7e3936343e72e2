"""A GGUF file's header, and descriptions of files that have none.

A header says everything but the weights: what `uma models` lists, which part of a split model a file is, and whether
the file is complete. It is checked before llama.cpp loads a file, so that errors can be reported in plain words.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import llama_cpp.llama_cpp as lib

from uma.constraints import show
from uma.errors import ModelError
from uma.gguf import BLOCK_BYTES, MAGIC, UINT32, VERSIONS, VOCABULARY, HeaderReader
from uma.llama.log import LOG

VOCABULARY_KIND = "tokenizer.ggml.model"
NO_VOCABULARY = ("no_vocab", "none")
"""Kinds of vocabulary that llama.cpp does not read."""

DAMAGED = "its header is damaged, so download it again: "
MAX_FIGURE = 2**31 - 1
"""Maximum of a number in a header: llama.cpp uses signed numbers of 32 bits."""
MAX_LAYERS = 512
"""llama.cpp's `LLAMA_MAX_LAYERS`. A header with more ends the process, by an assertion."""
MAX_EXPERTS = 1_024
"""llama.cpp's `LLAMA_MAX_EXPERTS`, which is asserted, too."""
MAX_PARTS = 2**16 - 1
"""Maximum parts of a split model: its header counts them with 16 bits."""
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# fmt: off
FULLY_ROTATED = frozenset((
    "apertus", "arcee", "arctic", "baichuan", "chameleon", "codeshell", "cogvlm", "cohere2moe", "dbrx", "deci",
    "deepseek", "dots1", "dream", "ernie4_5", "ernie4_5-moe", "exaone", "exaone-moe", "exaone4", "falcon",
    "gpt-oss", "granite", "granite_swa", "granitemoe", "graniteswitch", "grok", "grovemoe", "hunyuan-dense",
    "hunyuan-moe", "hunyuan_vl", "hy_v3", "internlm2", "jais2", "llada", "llada-moe", "llama", "llama-embed",
    "llama4", "maincoder", "mellum", "minicpm", "mistral3", "olmo", "olmo2", "olmoe", "orion", "paddleocr",
    "pangu-embedded", "plamo", "pockettts", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl",
    "qwen3vlmoe", "rnd1", "seed_oss", "smallthinker", "smollm3", "starcoder2", "talkie", "xverse",
))
"""Architectures whose keys and values have heads of one size, which are rotated completely: llama.cpp's graph of each
asserts `n_embd_head == n_rot`, except for gpt-oss, whose weights have one of these sizes and whose graph the other."""
EQUAL_HEADS = FULLY_ROTATED | frozenset((
    "afmoe", "bailingmoe2", "bert", "bitnet", "bloom", "chatglm", "cohere2", "command-r", "eurobert", "glm4",
    "glm4moe", "gpt2", "gptneox", "granitehybrid", "jais", "jina-bert-v2", "jina-bert-v3", "laguna", "maple",
    "minimax-01", "minimax-m2", "minimax-m3", "modern-bert", "mpt", "muse-glimmer", "nanbeige", "nemotron",
    "nemotron_h", "nemotron_h_moe", "neo-bert", "nomic-bert", "nomic-bert-moe", "openelm", "phi2", "phi3", "phimoe",
    "qwen", "qwen35", "qwen35moe", "refact", "spark2_5", "stablelm", "starcoder", "t5", "t5encoder",
))
"""Architectures whose keys and values have heads of one size: `n_embd_head == hparams.n_embd_head_k()`."""
# fmt: on
TRIED = EQUAL_HEADS | frozenset(("gemma2", "gemma3", "jamba", "lfm2", "mamba", "qwen3next"))
"""Architectures of which every figure that the tensors' shapes do not confirm was changed in a test, and no other than
those checked here ended llama.cpp's process."""
_FIGURE = re.compile(r"(^|[._])(count|length|size)(_|$)")
"""Pattern of keys for a count or a size."""


HEADER_BYTES = (BLOCK_BYTES, 2**24, 2**28)
"""Sizes of the beginnings of a file that are read in turn until the header is complete; 16 MiB hold most
vocabularies."""
ALIGNMENT = 32
"""Alignment of the weights where the header does not state one."""


def _function(name: str, result: Any) -> Any:
    # ggml is a dependency of the llama library, so its functions are found through the same handle.
    function = getattr(lib._lib, name)
    function.argtypes, function.restype = [ctypes.c_int], result
    return function


_type_name = _function("ggml_type_name", ctypes.c_char_p)
_type_size = _function("ggml_type_size", ctypes.c_size_t)
_block_size = _function("ggml_blck_size", ctypes.c_int64)


@attrs.frozen
class Header:
    """Metadata of a GGUF file, without its weights."""

    path: Path
    size_bytes: int
    """Size of this file alone."""
    metadata: dict[str, Any]
    """Strings, numbers and booleans by key. Of an array only its length is kept, under its key."""
    tensor_types: dict[str, int]
    """Count of numbers stored in each ggml type, by the type's name such as `q8_0`."""
    needed_bytes: int
    """Minimum size of a complete file with this header."""
    data_offset: int
    """Offset of the weights."""
    by_layer: dict[str, tuple[float, ...]]
    """Arrays of numbers by key without the architecture's name: usually a figure for each layer."""
    tensor_bytes: dict[str, int]
    """Size of each tensor in this file, by name."""
    tensor_widths: dict[str, int]
    """First dimension of each tensor, by name."""

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    @property
    def has_classifier(self) -> bool:
        """Whether there are weights that turn a text's state into scores, as in some rerankers."""
        return any(name.startswith("cls.") for name in self.tensor_bytes)

    @property
    def parameters(self) -> int:
        """Count of numbers stored in this file."""
        return sum(self.tensor_types.values())

    @property
    def context_length(self) -> int:
        """Tokens that the model was trained for; 0 where the header does not state it."""
        return int(self.metadata.get(f"{self.architecture}.context_length", 0))

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary; 0 where the header has none."""
        return int(self.metadata.get("tokenizer.ggml.tokens", 0))

    @property
    def decision_type(self) -> str:
        """Kind of decision model that the file says it is; empty for any other."""
        return str(self.metadata.get(f"{self.architecture}.decision.type") or "")

    @property
    def n_layers(self) -> int:
        """Number of layers, without prediction layers, which llama.cpp does not load."""
        figures = (
            self.metadata.get(f"{self.architecture}.{key}", 0) for key in ("block_count", "nextn_predict_layers")
        )
        total, guessing = (figure if isinstance(figure, int) else 0 for figure in figures)
        return total - guessing

    @property
    def quantization(self) -> str:
        """Name such as `Q8_0`: the file's own, otherwise the type of most of its numbers."""
        file_type = self.metadata.get("general.file_type")
        if name := file_type_name(file_type):
            return name
        common = max(self.tensor_types, key=lambda name: self.tensor_types[name], default="unknown")
        return common.upper()

    @property
    def split(self) -> tuple[int, int]:
        """Number of this part, from 1, and number of parts; (1, 1) for a model in one file."""
        count = int(self.metadata.get("split.count", 0))
        return (int(self.metadata.get("split.no", 0)) + 1, count) if count > 1 else (1, 1)


def type_name(kind: int) -> str:
    """Name such as `q8_0` of ggml's number for a tensor type."""
    return str(_type_name(kind).decode())


def file_type_name(number: Any) -> str:
    """Name such as `Q4_K_M` of a value of `general.file_type`; empty for an unknown value."""
    return _FILE_TYPES.get(number, "") if isinstance(number, int) else ""


def _file_type_name(number: int) -> str:
    """Common name such as `Q4_K_M` for llama.cpp's "Q4_K - Medium"."""
    name: str = lib.llama_ftype_name(number).decode()
    name = name.removeprefix("all ").replace("Q2_K - Medium", "Q2_K").replace(" MoE", "_MOE")
    name = re.sub(r" - (Small|Medium|Large)$", lambda match: "_" + match[1][0], name)
    return re.sub(r" (mix )?- .*", "", name)


def part_path(path: Path, part: int, count: int) -> Path:
    """Path of part `part` (from 1) of a split model, beside `path`, named as llama.cpp names parts."""
    return path.with_name(f"{model_stem(path)}-{part:05d}-of-{count:05d}.gguf")


def model_stem(path: Path) -> str:
    """Name of a model's file without its extension and, for a split model, without the part's number."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)


def part_number(path: Path) -> int | None:
    """Number of a split model's part in its file name, from 1; None for a model in one file."""
    match = re.search(r"-(\d{5})-of-\d{5}$", path.stem)
    return int(match[1]) if match else None


def read_parts(path: Path) -> list[Header]:
    """Headers of all parts of a model, given its first part. One for a model in one file. Raises `ModelError`."""
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
    """A figure of a header that no model can have, as a message; None where all are possible.

    llama.cpp would trust such a figure, and end the process by an assertion, or memory planning would loop for hours.
    `by_layer` has the arrays of numbers, as in `Header`.
    """
    own = f"{metadata.get('general.architecture')}."

    def number(name: str) -> int:
        value = metadata.get(own + name)
        return value if isinstance(value, int) else 0

    experts, groups = number("expert_count"), number("expert_group_count")
    bounds = {
        "split.count": (0, MAX_PARTS),
        "split.no": (0, MAX_PARTS),
        VOCABULARY: (0, MAX_FIGURE),
        **{key: (0, MAX_FIGURE) for key in metadata if key.startswith(own) and _FIGURE.search(key)},
        own + "block_count": (1, MAX_LAYERS),
        own + "nextn_predict_layers": (0, number("block_count")),
        own + "full_attention_interval": (1, MAX_FIGURE),
        own + "expert_count": (0, MAX_EXPERTS),
        # With one expert, some architectures state any number of used ones.
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
    for key, value in metadata.items():
        is_epsilon = key.startswith(own) and key.endswith("_epsilon")
        if is_epsilon and not (isinstance(value, float | int) and 0 <= value < math.inf):
            return f"{key} is {show(value)}, and it can be a number from 0"
    scaling = metadata.get(own + "rope.scaling.type", ROPE_SCALINGS[0])
    if scaling not in ROPE_SCALINGS:
        return f"{own}rope.scaling.type is {show(scaling)}, and it can be {', '.join(ROPE_SCALINGS)}"
    return None


def _contradiction(header: Header) -> str | None:
    """A figure of a header that contradicts other figures or the tensors' shapes, as a message. Only figures that
    llama.cpp trusts until an assertion or an endless loop; its loader compares all others with the shapes.
    """
    own = f"{header.architecture}."

    def number(name: str) -> int:
        return _figure(header, name)

    heads, (most, values) = number("attention.head_count"), _head_sizes(header)
    rotated = number("rope.dimension_count")
    is_said = f"{own}rope.dimension_count" in header.metadata and "rope.dimension_count" not in header.by_layer
    if not rotated and number("attention.key_length_mla"):
        is_said = False  # latent attention without positions (GLM 5 Next)
    if (
        heads
        and values != most
        and header.architecture in EQUAL_HEADS
        and "attention.value_length" not in header.by_layer
    ):
        return f"{own}attention.key_length is {most:,}, and {own}attention.value_length is {values:,}"
    if heads and most and is_said and (rotated % 2 or not 2 <= rotated <= most):
        return f"{own}rope.dimension_count is {rotated:,}, and it can be an even number from 2 to {most:,}"
    if header.architecture == "step35" and rotated % 4:  # some of its layers rotate half of the dimensions
        return f"{own}rope.dimension_count is {rotated:,}, and it can be a multiple of 4"
    if heads and most and is_said and rotated != most and header.architecture in FULLY_ROTATED:
        return f"{own}rope.dimension_count is {rotated:,}, and it can be {most:,}"
    sections = sum(header.by_layer.get("rope.dimension_sections", ()))
    if heads and most and not 0 <= sections <= most:
        return f"{own}rope.dimension_sections are {sections:,} together, and can be 0 to {most:,}"
    said = {"token_embd.weight": "embedding_length", "ssm_out.weight": "ssm.inner_size"}
    for name, width in header.tensor_widths.items():
        key = said.get(re.sub(r"^blk\.\d+\.", "", name), "")
        if own + key in header.metadata and number(key) != width:
            return f"{own}{key} is {number(key):,}, and {name} has {width:,}"
    return None


def _figure(header: Header, name: str, unsaid: int = 0) -> int:
    value = None if name in header.by_layer else header.metadata.get(f"{header.architecture}.{name}")
    return value if isinstance(value, int) else unsaid


def _head_sizes(header: Header) -> tuple[int, int]:
    """Size of a head of the keys, and of the values."""
    heads = _figure(header, "attention.head_count")
    share = _figure(header, "embedding_length") // heads if heads else 0
    return _figure(header, "attention.key_length", share), _figure(header, "attention.value_length", share)


def needs_trial(header: Header) -> bool:
    """Whether only llama.cpp can tell if it computes the model: the assertions of its architecture's graph are unknown,
    its keys and values have heads of two sizes, or it has prediction heads.
    """
    keys, values = _head_sizes(header)
    has_heads = _figure(header, "nextn_predict_layers") > 0
    return header.architecture not in TRIED or (keys != values and header.architecture not in EQUAL_HEADS) or has_heads


def read(path: Path) -> Header:
    """Read a file's header. Raises `ModelError`, naming the file and the reason, where it is incomplete, or has figures
    that no model can have.
    """
    size = _check_is_file(path)
    with path.open("rb") as file:
        start = file.read(512)
    _check_magic(path, start)
    header = _header_of(whole_header(path), path, size)
    if header.needed_bytes > size:
        raise ModelError(
            f"{path}: is cut short: it has {size:,} of at least {header.needed_bytes:,} bytes. "
            "Copy or download it again"
        )
    if (problem := impossible_figure(header.metadata, header.by_layer) or _contradiction(header)) is not None:
        raise ModelError(f"{path}: {DAMAGED}{problem}")
    return header


def check_vocabulary(path: Path) -> None:
    """Raise `ModelError` for a vocabulary with a token twice, at which llama.cpp's loader would end the process by an
    assertion. The file's header must have been read.
    """
    reader = whole_header(path)
    if reader.metadata.get(VOCABULARY_KIND) in NO_VOCABULARY:
        return
    tokens = [token or b"[EMPTY_%d]" % id for id, token in enumerate(reader.vocabulary())]
    if len(set(tokens)) == len(tokens):
        return
    first: dict[bytes, int] = {}
    id, token = next((id, token) for id, token in enumerate(tokens) if first.setdefault(token, id) != id)
    raise ModelError(
        f"{path}: its vocabulary has {show(token.decode('utf-8', 'replace'))} twice, as token {first[token]} and as "
        f"token {id}, which llama.cpp cannot load. Convert the model again"
    )


def _check_is_file(path: Path) -> int:
    try:
        status = path.stat()
    except FileNotFoundError:
        link = f"; it is a link to {path.readlink()}" if path.is_symlink() else ""
        raise ModelError(f"{path}: no such file{link}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISDIR(status.st_mode):
        inside = sorted(inner.name for inner in path.glob("*.gguf")) if os.access(path, os.R_OK) else []
        hint = "there is no .gguf file in it"
        if inside:
            hint = f"name a file in it, such as {path / inside[0]}; with UMA_MODELS={path} each has a name"
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


def whole_header(path: Path) -> HeaderReader:
    """A reader that has read a file's whole header. Raises `ModelError` where it is cut short or damaged."""
    why = ""
    with path.open("rb") as file:
        for n_bytes in HEADER_BYTES:
            file.seek(0)
            reader = HeaderReader(file.read(n_bytes))
            try:
                reader.read_keys()
                reader.read_tensors()
            except EOFError:
                if len(reader.block) < n_bytes:
                    break
            except ValueError as error:
                why = f": {error}"
                break
            else:
                return reader
    raise ModelError(f"{path}: its header is cut short or damaged{why}")


def _header_of(reader: HeaderReader, path: Path, size: int) -> Header:
    types, sizes, widths, weights_bytes = dict[str, int](), dict[str, int](), dict[str, int](), 0
    for tensor in reader.tensors:
        block = _block_size(tensor.kind) if tensor.kind < lib.GGML_TYPE_COUNT else 0
        if not block or (tensor.shape and tensor.shape[0] % block):
            raise ModelError(f"{path}: {DAMAGED}tensor {show(tensor.name)} has a wrong type, {tensor.kind}")
        name, count = type_name(tensor.kind), math.prod(tensor.shape)
        types[name] = types.get(name, 0) + count
        sizes[tensor.name] = taken = count // block * _type_size(tensor.kind)
        widths[tensor.name] = tensor.shape[0] if tensor.shape else 1
        weights_bytes = max(weights_bytes, tensor.offset + taken)
    alignment = reader.metadata.get("general.alignment", ALIGNMENT)
    # (ggml asserts the type of this key.)
    if reader.kinds.get("general.alignment", UINT32) != UINT32 or alignment <= 0:
        raise ModelError(f"{path}: {DAMAGED}general.alignment is {show(alignment)}")
    offset = -(-reader.n_bytes // alignment) * alignment if reader.tensors else reader.n_bytes
    own = f"{reader.metadata.get('general.architecture')}."
    by_layer = {key.removeprefix(own): numbers for key, numbers in reader.numbers.items() if key.startswith(own)}
    return Header(path, size, reader.metadata, types, offset + weights_bytes, offset, by_layer, sizes, widths)


def quoted(mark: int) -> str:
    """Problems in llama.cpp's log after `mark`, for the end of an error message; empty where there are none.

    The names of C functions in front of llama.cpp's lines are left out.
    """
    lines = LOG.since(mark)
    problems = [line for line in lines if line.is_problem] or lines
    texts = [re.sub(r"^(\w+: )+", "", line.text) for line in problems[-4:]]
    unique = list(dict.fromkeys(text for text in texts if text))
    return ". llama.cpp says: " + "; ".join(unique) if unique else ""


_FILE_TYPES = {number: name for number in range(64) if (name := _file_type_name(number)) and "unknown" not in name}
