"""A GGUF model that answers whatever it is asked with one text, so that a test decides what "the model" says.

It is a real Llama that llama.cpp computes: its layer adds nothing, each token's embedding is a direction of its own,
and the output weights lead from each token to the one after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np

from models import CHATML, byte_spellings

SPECIALS = ("<|bos|>", "<|im_start|>", "<|im_end|>")
MERGED = "th"
"""llama.cpp takes no vocabulary without a merge."""
HEAD = 32
PIECE_CHARS = 4


THOUGHT = ("<think>", "Is it ", "wet?\n", "Look ", "out.", "</think>")
SWITCHED = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
"""With its switch the prompt ends where `THOUGHT` does, so that the model goes on with the answer."""


def write_script_model(
    path: Path,
    text: str | Sequence[str],
    *,
    context_length: int = 4096,
    template: str | None = CHATML,
    controls: Sequence[str] = (),
    is_endless: bool = False,
    feed_forward: int = HEAD,
) -> Path:
    """Write a model to `path` whose every answer is `text`, or with `is_endless` says it again and again. Its chat
    template, ChatML by default, must end with a line break; None: it has none, and UMA's ends with a colon. `controls`
    are parts of the text that are control tokens, each in it once. A list of texts has the answer's tokens as they are
    to be. A large `feed_forward` makes a token take milliseconds.
    """
    pieces = tokens_of(text, controls) if isinstance(text, str) else list(text)
    first = 256 + len(SPECIALS) + 1
    n_vocab = first + len(pieces)
    width = -(-n_vocab // HEAD) * HEAD
    following = {ord("\n" if template else ":"): first} | {
        first + index: first + index + 1 for index in range(len(pieces))
    }
    end = 256 + SPECIALS.index("<|im_end|>")
    following[n_vocab - 1] = first if is_endless else end
    output = np.zeros((n_vocab, width), np.float32)
    for token, after in following.items():
        output[after, token] = 1
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Script")
    writer.add_context_length(context_length)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(width // HEAD)
    writer.add_head_count_kv(width // HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*byte_spellings(), *SPECIALS, MERGED, *pieces])
    normal, control, shown = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
    writer.add_token_types(
        [normal] * 256
        + [control] * len(SPECIALS)
        + [normal]
        + [control if each in controls else shown for each in pieces]
    )
    writer.add_token_merges([" ".join(MERGED)])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(end)
    writer.add_eot_token_id(end)
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)
    ones, square, narrow = np.ones(width, np.float32), (width, width), (feed_forward, width)
    tensors = {
        "token_embd.weight": np.eye(n_vocab, width, dtype=np.float32),
        "output_norm.weight": ones,
        "output.weight": output,
        "blk.0.attn_norm.weight": ones,
        "blk.0.ffn_norm.weight": ones,
        **{f"blk.0.attn_{name}.weight": np.zeros(square, np.float32) for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}.weight": np.zeros(narrow, np.float32) for name in ("gate", "up")},
        "blk.0.ffn_down.weight": np.zeros((width, feed_forward), np.float32),
    }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokens_of(text: str, controls: Sequence[str]) -> list[str]:
    """`text` in pieces, the `controls` among them."""
    parts = re.split("(" + "|".join(map(re.escape, controls)) + ")", text) if controls else [text]
    seen = set(controls)
    return [piece for part in parts for piece in ([part] if part in controls else pieces_of(part, seen))]


def pieces_of(text: str, seen: set[str]) -> Iterator[str]:
    """`text` in pieces none of which is among those `seen`, as a vocabulary's tokens have to be different."""
    begin = 0
    while begin < len(text):
        end = begin + PIECE_CHARS
        while text[begin:end] in seen and end < len(text):
            end += 1
        if len(text) - end < PIECE_CHARS:
            end = len(text)  # a last piece of one character would be a token that there is already
        piece = text[begin:end]
        if piece in seen:
            raise ValueError(f"the text ends with {piece!r}, which it had before; end it with something else")
        seen.add(piece)
        yield piece
        begin = end
