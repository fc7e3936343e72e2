"""Tiny Gemma 4 models with random weights, and assistants that draft for them out of their cells.

model = write_gemma4(folder / "model.gguf")
assistant = write_assistant(folder / "assistant.gguf")
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from models import CHATML, EMBED, FF, HEAD, HEADS, KV_HEADS, N_VOCAB, finish, write_metadata, write_tokenizer

LAYERS, NARROW, WINDOW = 4, 48, 128
"""Layers of the model, of which every second one has a window; figures of a token within its assistant; tokens of a
window, which snapshots are made of: of smaller ones none is worth one."""
WINDOWED = [True, False]
"""Layers of the assistant: each reads the cells of the model's last one of its kind."""
Values = dict[str, npt.NDArray[np.float32]]


def write_gemma4(path: Path, *, context_length: int = 1_024) -> Path:
    """Write a model and return its path."""
    rng = np.random.default_rng(0)
    values = {"token_embd": _random(rng, N_VOCAB, EMBED, gain=0.7), "output": _random(rng, N_VOCAB, EMBED, gain=3)}
    values |= {"output_norm": _ones(EMBED), "rope_freqs": _ones(HEAD // 2)}
    for index in range(LAYERS):
        layer = _layer(rng, EMBED) | {"attn_k_norm": _ones(HEAD)}
        layer |= {f"attn_{name}": _random(rng, KV_HEADS * HEAD, EMBED, gain=2) for name in "kv"}
        values |= {f"blk.{index}.{name}": value for name, value in layer.items()}
    shape = {"embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0, "block_count": LAYERS}
    return _write(
        path, "gemma4", values, shape | {"attention.sliding_window_pattern": [True, False] * 2}, context_length
    )


def write_assistant(path: Path, *, embed: int = EMBED, kv_heads: int = KV_HEADS, context_length: int = 1_024) -> Path:
    """Write an assistant for models whose embedding has `embed` figures, and return its path."""
    rng, layers = np.random.default_rng(1), len(WINDOWED)
    values = {"token_embd": _random(rng, N_VOCAB, NARROW, gain=3), "output_norm": _ones(NARROW)}
    values |= {"nextn.pre_projection": _random(rng, NARROW, 2 * embed), "rope_freqs": _ones(HEAD // 2)}
    values |= {"nextn.post_projection": _random(rng, embed, NARROW)}
    for index in range(layers):
        layer = _layer(rng, NARROW) | {"layer_output_scale": _ones(1)}
        values |= {f"blk.{index}.{name}": value for name, value in layer.items()}
    shape = {"embedding_length": NARROW, "embedding_length_out": embed, "block_count": layers}
    shape |= {"nextn_predict_layers": layers, "attention.head_count_kv": kv_heads}
    return _write(
        path, "gemma4-assistant", values, shape | {"attention.sliding_window_pattern": WINDOWED}, context_length
    )


def _write(path: Path, kind: str, values: Values, shape: dict[str, Any], context_length: int) -> Path:
    writer = gguf.GGUFWriter(path, kind)
    lengths = {f"attention.{which}_length{swa}": HEAD for which in ("key", "value") for swa in ("", "_swa")}
    shape = {**lengths, "attention.sliding_window": WINDOW, "rope.dimension_count_swa": HEAD, **shape}
    write_metadata(writer, "attention", context_length, FF, {f"{kind}.{key}": value for key, value in shape.items()})
    write_tokenizer(writer, "gpt2", "gpt-2", True, CHATML)
    for name, value in values.items():
        writer.add_tensor(f"{name}.weight", value)
    finish(writer)
    return path


def _layer(rng: np.random.Generator, width: int) -> Values:
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    return {
        **{name: _ones(width) for name in norms},
        "attn_q_norm": _ones(HEAD),
        "attn_q": _random(rng, HEADS * HEAD, width, gain=2),
        "attn_output": _random(rng, width, HEADS * HEAD, gain=2),
        "ffn_gate": _random(rng, FF, width),
        "ffn_up": _random(rng, FF, width),
        "ffn_down": _random(rng, width, FF),
    }


def _ones(size: int) -> npt.NDArray[np.float32]:
    return np.ones(size, np.float32)


def _random(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = rng.standard_normal((rows, columns), dtype=np.float32)
    return values * np.float32(gain / columns**0.5)
