"""Small Llamas of random weights with a real vocabulary and a real chat template: every family without its weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from reference import template, vocabulary

EMBED, FEED_FORWARD, CONTEXT = 32, 64, 4_096
"""A vocabulary of 260,000 tokens has 17 MB of weights with so few figures each."""


def write_zoo_model(path: Path, vocabulary_name: str, template_name: str) -> Path:
    """Write a model with llama.cpp's vocabulary and template of these names, and return its path."""
    given = gguf.GGUFReader(vocabulary(vocabulary_name))
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in given.fields.items():
        if name.startswith("tokenizer.") and name != "tokenizer.chat_template":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_chat_template(template(template_name))
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(EMBED)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(EMBED)
    rng = np.random.default_rng(0)
    n_vocab = len(given.fields["tokenizer.ggml.tokens"].data)
    writer.add_tensor("token_embd.weight", rng.normal(0, 1, (n_vocab, EMBED)).astype(np.float16))
    writer.add_tensor("output_norm.weight", np.ones(EMBED, np.float32))
    shapes = {
        "attn_q": (EMBED, EMBED),
        "attn_k": (EMBED, EMBED),
        "attn_v": (EMBED, EMBED),
        "attn_output": (EMBED, EMBED),
    }
    shapes |= {"ffn_gate": (FEED_FORWARD, EMBED), "ffn_up": (FEED_FORWARD, EMBED), "ffn_down": (EMBED, FEED_FORWARD)}
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", rng.normal(0, 0.2, shape).astype(np.float16))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(EMBED, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
