"""Small Llamas of random weights with a real vocabulary and a real chat template: every family without its weights.

The vocabulary's metadata are copied as the bytes that they are: `gguf` takes a minute to read and write 260,000 tokens.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
from reference import vocabulary

EMBED, FEED_FORWARD, CONTEXT = 32, 64, 4_096
"""A vocabulary of 260,000 tokens has 17 MB of weights with so few figures each."""

_NEAREST = {
    "Qwen3.5": "qwen35",
    "Distill-Llama": "llama-bpe",
    "Qwen": "qwen2",
    "QwQ": "qwen2",
    "MiMo": "qwen2",
    "Hermes": "llama-bpe",
    "Nemo-": "llama-spm",
    "Mistral": "llama-spm",
    "Ministral": "llama-spm",
    "Devstral": "llama-spm",
    "deepseek": "deepseek-llm",
    "gemma": "gemma-4",
    "granite": "starcoder",
    "Phi-3.5": "phi-3",
    "gpt-oss": "gpt-2",
    "Cohere": "command-r",
    "rwkv": "gpt-neox",
}
"""Vocabularies by a part of a template's name, the first that fits; `llama-bpe` for all others."""


def nearest_vocabulary(template_name: str) -> str:
    """The name of llama.cpp's vocabulary that is a template's own, or the nearest to it."""
    return next((found for part, found in _NEAREST.items() if part in template_name), "llama-bpe")


_ALIGNMENT = 32
"""GGUF's: tensors begin at multiples of so many bytes."""
_UINT32, _FLOAT32, _STRING, _ARRAY = 4, 6, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value of each of GGUF's types that has a size of its own."""
_TENSOR_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}


def write_zoo_model(path: Path, vocabulary_name: str, chat_template: str) -> Path:
    """Write a model with llama.cpp's vocabulary of this name and a chat template, and return its path."""
    fields = {
        name: value
        for name, value in _fields(vocabulary(vocabulary_name).read_bytes()).items()
        if name.startswith("tokenizer.") or name == "general.name"  # by which llama.cpp knows Phi 3's
    }
    fields |= {"general.architecture": _text("llama"), "tokenizer.chat_template": _text(chat_template)}
    numbers = {"context_length": CONTEXT, "embedding_length": EMBED, "feed_forward_length": FEED_FORWARD}
    numbers |= {"block_count": 1, "attention.head_count": 1, "attention.head_count_kv": 1}
    numbers |= {"rope.dimension_count": EMBED}
    fields |= {f"llama.{name}": struct.pack("<II", _UINT32, value) for name, value in numbers.items()}
    fields["llama.attention.layer_norm_rms_epsilon"] = struct.pack("<If", _FLOAT32, 1e-5)
    n_tokens = struct.unpack_from("<Q", fields["tokenizer.ggml.tokens"], 8)[0]
    path.write_bytes(_gguf(fields, _tensors(n_tokens)))
    return path


def _tensors(n_tokens: int) -> dict[str, npt.NDArray[np.floating]]:
    rng = np.random.default_rng(0)

    def weights(rows: int, columns: int, scale: float) -> npt.NDArray[np.floating]:
        return (rng.standard_normal((rows, columns), np.float32) * scale).astype(np.float16)

    made: dict[str, npt.NDArray[np.floating]] = {"token_embd.weight": weights(n_tokens, EMBED, 1.0)}
    made["output_norm.weight"] = np.ones(EMBED, np.float32)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        made[f"blk.0.{name}.weight"] = weights(EMBED, EMBED, 0.2)
    for name, rows, columns in (
        ("ffn_gate", FEED_FORWARD, EMBED),
        ("ffn_up", FEED_FORWARD, EMBED),
        ("ffn_down", EMBED, FEED_FORWARD),
    ):
        made[f"blk.0.{name}.weight"] = weights(rows, columns, 0.2)
    for name in ("attn_norm", "ffn_norm"):
        made[f"blk.0.{name}.weight"] = np.ones(EMBED, np.float32)
    return made


def _gguf(fields: dict[str, bytes], tensors: dict[str, npt.NDArray[np.floating]]) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    head += b"".join(_name(name) + value for name, value in fields.items())
    data = b""
    for name, tensor in tensors.items():
        shape = struct.pack(f"<I{tensor.ndim}Q", tensor.ndim, *reversed(tensor.shape))
        head += _name(name) + shape + struct.pack("<IQ", _TENSOR_TYPES[tensor.dtype], len(data))
        data += _padded(tensor.tobytes())
    return _padded(head) + data


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)


def _name(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _text(text: str) -> bytes:
    return struct.pack("<I", _STRING) + _name(text)


def _fields(data: bytes) -> dict[str, bytes]:
    """A GGUF file's metadata: each name's type and value, as the file has them."""
    (count,) = struct.unpack_from("<Q", data, 16)
    at, found = 24, {}
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", data, at)
        start = at + 8 + length
        (kind,) = struct.unpack_from("<I", data, start)
        name, at = data[at + 8 : start].decode(), _behind(data, start + 4, kind)
        found[name] = data[start:at]
    return found


def _behind(data: bytes, at: int, kind: int) -> int:
    """Where a value that begins at `at` ends."""
    if kind == _STRING:
        return at + 8 + int.from_bytes(data[at : at + 8], "little")
    if kind != _ARRAY:
        return at + _SIZES[kind]
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner in _SIZES:
        return at + _SIZES[inner] * int(count)
    for _ in range(count):
        at = _behind(data, at, inner)
    return at
