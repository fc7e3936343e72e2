"""Writes `uma/data/attention-64.gguf` and `-128.gguf`, with which UMA measures what attention takes on a CPU.

Llamas of one layer that is attention and little else. Their weights mean nothing, and are the same on any machine.

    python examples/tiny_model/attention.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

EMBED, VOCAB = 8, 64
HEADS = {64: (6, 2), 128: (8, 2)}
"""By their values, how many heads of queries and of keys."""
N_CTX = 4_096


def write(path: Path, head_size: int) -> None:
    """Write one of them."""
    heads, kv_heads = HEADS[head_size]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"UMA Attention {head_size}")
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(EMBED)
    writer.add_feed_forward_length(EMBED)
    writer.add_block_count(1)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{token}" for token in range(VOCAB)])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * VOCAB)
    writer.add_token_merges(["t 0"])
    for name, size in _shapes(heads * head_size, kv_heads * head_size).items():
        writer.add_tensor(f"{name}.weight", _weights(*size))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(width: int, kv_width: int) -> dict[str, tuple[int, ...]]:
    layer = {
        "attn_q": (width, EMBED), "attn_k": (kv_width, EMBED), "attn_v": (kv_width, EMBED),
        "attn_output": (EMBED, width), "ffn_gate": (EMBED, EMBED), "ffn_up": (EMBED, EMBED),
        "ffn_down": (EMBED, EMBED), "attn_norm": (EMBED,), "ffn_norm": (EMBED,),
    }  # fmt: skip
    ends = {"token_embd": (VOCAB, EMBED), "output": (VOCAB, EMBED), "output_norm": (EMBED,)}
    return {**{f"blk.0.{name}": size for name, size in layer.items()}, **ends}


def _weights(*size: int) -> npt.NDArray[np.float32]:
    """From -0.5 to 0.5 in no order, and ones for a norm. Multiples of a power of two: no machine rounds them."""
    if len(size) == 1:
        return np.ones(size, np.float32)
    mixed = (np.arange(np.prod(size), dtype=np.uint64) * np.uint64(2654435761) >> np.uint64(12)) % np.uint64(256)
    return (mixed.astype(np.float32) / np.float32(256) - np.float32(0.5)).reshape(size)


def main() -> None:
    for head_size in HEADS:
        write(Path(sys.argv[1]) / f"attention-{head_size}.gguf", head_size)


if __name__ == "__main__":
    main()
