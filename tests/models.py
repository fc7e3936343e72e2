"""Tiny GGUF files with random weights, for tests of anything that loads a model: deterministic, made in milliseconds.

    path = write_model(tmp_path / "tiny.gguf")                         # a Llama, bytes as tokens, ChatML template
    path = write_model(tmp_path / "tiny.gguf", chat_template=None)     # no template
    path = write_model(tmp_path / "tiny.gguf", kind="sliding-window")  # Gemma 2: every 2nd layer sees 16 tokens
    path = write_model(tmp_path / "tiny.gguf", kind="recurrent")       # Mamba
    path = write_model(tmp_path / "tiny.gguf", kind="hybrid")          # Jamba: a Mamba and an attention layer
    path = write_model(tmp_path / "not-so-tiny.gguf", feed_forward=24_000)  # 37 MB of weights
    path = write_word_model(tmp_path / "words.gguf", fill_in=FILL_IN)   # a Llama, words as tokens, fills in the middle
    path = write_large_cells(tmp_path / "7b.gguf", layers=32, kv_heads=8)    # the KV of a 7 B model, hardly any weights
    path = write_encoder(tmp_path / "bert.gguf", pooling="cls")        # BERT: it embeds, or with "rank" it ranks
    path = write_causal_reranker(tmp_path / "qwen.gguf", template)     # Qwen 3: it generates, and ranks
    first, *_ = write_split_model(tmp_path / "big", count=3)           # the same Llama in three files

`hybrids.py` has further kinds.

Their vocabulary is the 256 bytes (token `n` is byte `n`), a few merged pairs, and the specials of `SPECIALS`; so every
text can be tokenized, and greedy output is some fixed nonsense that depends on every token before it. `metadata` adds
or replaces keys; `TOKENIZER_NONE` as `tokenizer` leaves the vocabulary out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt

Kind = Literal["attention", "sliding-window", "recurrent", "hybrid"]
Tensors = dict[str, npt.NDArray[np.float32]]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"))
SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<shown>")
BOS, EOS, IM_START, IM_END, SHOWN = (256 + len(MERGES) + index for index in range(len(SPECIALS)))
"""Token ids. All are control tokens but `SHOWN`, a user-defined token, which is part of the text."""
N_VOCAB = 256 + len(MERGES) + len(SPECIALS)
TOKENIZER_NONE = "none"

EMBED, HEADS, KV_HEADS, FF, LAYERS = 64, 2, 1, 96, 2
HEAD = EMBED // HEADS
INNER, STATE, CONV, DT_RANK = 2 * EMBED, 8, 4, 8
WINDOW = 16

_ARCHITECTURE: dict[Kind, str] = {
    "attention": "llama",
    "sliding-window": "gemma2",
    "recurrent": "mamba",
    "hybrid": "jamba",
}


def write_model(
    path: Path,
    *,
    kind: Kind = "attention",
    chat_template: str | None = CHATML,
    context_length: int = 512,
    tokenizer: str = "gpt2",
    pre_tokenizer: str = "gpt-2",
    add_bos: bool = True,
    seed: int = 0,
    feed_forward: int = FF,
    metadata: Mapping[str, Any] | None = None,
    architecture: str | None = None,
) -> Path:
    """Write a model and return its path. `architecture` only changes what the file says of itself."""
    writer = gguf.GGUFWriter(path, architecture or _ARCHITECTURE[kind])
    write_metadata(writer, kind, context_length, feed_forward, dict(metadata or {}))
    write_tokenizer(writer, tokenizer, pre_tokenizer, add_bos, chat_template)
    for name, tensor in random_tensors(kind, np.random.default_rng(seed), feed_forward).items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path


def write_large_cells(path: Path, *, layers: int, kv_heads: int, context_length: int = 4_096) -> Path:
    """Write a Llama whose attention has the shape of a large model's, 32 heads of 128, on an embedding of 8 figures.

    It is there for what llama.cpp says of it: the weights are zeros.
    """
    heads, head, embed = 32, 128, 8
    writer = gguf.GGUFWriter(path, "llama")
    shape = {
        "embedding_length": embed,
        "block_count": layers,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head,
    }
    write_metadata(writer, "attention", context_length, embed, {f"llama.{key}": value for key, value in shape.items()})
    write_tokenizer(writer, "gpt2", "gpt-2", True, None)
    shapes = {
        "attn_q": (heads * head, embed), "attn_k": (kv_heads * head, embed), "attn_v": (kv_heads * head, embed),
        "attn_output": (embed, heads * head), "ffn_gate": (embed, embed), "ffn_up": (embed, embed),
        "ffn_down": (embed, embed), "attn_norm": (embed,), "ffn_norm": (embed,),
    }  # fmt: skip
    weights = {f"blk.{index}.{name}": size for index in range(layers) for name, size in shapes.items()}
    weights |= {"token_embd": (N_VOCAB, embed), "output": (N_VOCAB, embed), "output_norm": (embed,)}
    for name, size in weights.items():
        writer.add_tensor(f"{name}.weight", np.zeros(size, np.float32))
    finish(writer)
    return path


YES, NO = ord("y"), ord("n")
"""The tokens between which `write_causal_reranker`'s model decides."""


def write_causal_reranker(path: Path, template: str, *, has_classifier: bool = True) -> Path:
    """Write a Qwen 3 that ranks by how much likelier `YES` is than `NO` to come after `template`: as llama.cpp's
    converter writes Qwen3-Reranker, the classifier is these two rows of the output weights.
    """
    writer = gguf.GGUFWriter(path, "qwen3")
    extra = {
        "qwen3.pooling_type": 4,
        "qwen3.classifier.output_labels": ["yes", "no"],
        "tokenizer.chat_template.rerank": template,
    }
    write_metadata(writer, "attention", 512, FF, extra)
    write_tokenizer(writer, "gpt2", "gpt-2", True, None)
    tensors = random_tensors("attention", np.random.default_rng(0))
    for index in range(LAYERS):
        tensors |= {f"blk.{index}.attn_{name}_norm.weight": np.ones(HEAD, np.float32) for name in ("q", "k")}
    if has_classifier:
        tensors["cls.output.weight"] = tensors["output.weight"][[YES, NO]]
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path


def write_encoder(
    path: Path,
    *,
    pooling: Literal["mean", "cls", "rank"] = "mean",
    context_length: int = 128,
    seed: int = 0,
    words: Sequence[str] = (),
    rerank_template: str | None = None,
) -> Path:
    """Write a BERT of random weights, which gives embeddings or, with `rank`, a score of a pair of texts.

    `words` are further pieces of its vocabulary, as GGUF spells them.
    """
    writer, rng = gguf.GGUFWriter(path, "bert"), np.random.default_rng(seed)
    values = {
        "general.name": "Tiny encoder",
        "general.file_type": 0,
        "bert.context_length": context_length,
        "bert.embedding_length": EMBED,
        "bert.block_count": LAYERS,
        "bert.feed_forward_length": FF,
        "bert.attention.head_count": HEADS,
        "bert.attention.layer_norm_epsilon": 1e-5,
        "bert.attention.causal": False,
        "bert.pooling_type": {"mean": 1, "cls": 2, "rank": 4}[pooling],
    }
    for key, value in values.items():
        add(writer, key, value)
    if rerank_template is not None:
        writer.add_string("tokenizer.chat_template.rerank", rerank_template)
    pieces = [*_word_pieces(), *words]
    _write_word_pieces(writer, pieces)
    for name, tensor in _encoder_tensors(rng, len(pieces), context_length, ranks=pooling == "rank").items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path


WORD_PIECE_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def _word_pieces() -> list[str]:
    """BERT's specials, then each printable ASCII character, beginning a word and within one."""
    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    return [*WORD_PIECE_SPECIALS, *(f"\u2581{each}" for each in characters), *characters]


def _write_word_pieces(writer: gguf.GGUFWriter, pieces: list[str]) -> None:
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    specials = len(WORD_PIECE_SPECIALS)
    writer.add_token_types([gguf.TokenType.CONTROL] * specials + [gguf.TokenType.NORMAL] * (len(pieces) - specials))
    writer.add_token_type_count(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)


def _encoder_tensors(rng: np.random.Generator, n_vocab: int, context_length: int, *, ranks: bool) -> Tensors:
    tensors = {
        "token_embd.weight": _matrix(rng, n_vocab, EMBED, gain=6.0),
        "token_types.weight": _matrix(rng, 2, EMBED),
        "position_embd.weight": _matrix(rng, context_length, EMBED, gain=3.0),
        "token_embd_norm.weight": _ones(EMBED),
        "token_embd_norm.bias": np.zeros(EMBED, np.float32),
    }
    if ranks:
        tensors |= {"cls.weight": _matrix(rng, EMBED, EMBED), "cls.bias": np.zeros(EMBED, np.float32)}
        tensors |= {"cls.output.weight": _matrix(rng, 1, EMBED, gain=3.0), "cls.output.bias": np.zeros(1, np.float32)}
    for index in range(LAYERS):
        shapes = {
            "attn_q": (EMBED, EMBED), "attn_k": (EMBED, EMBED), "attn_v": (EMBED, EMBED), "attn_output": (EMBED, EMBED),
            "ffn_up": (FF, EMBED), "ffn_down": (EMBED, FF),
        }  # fmt: skip
        for name, (rows, columns) in shapes.items():
            tensors[f"blk.{index}.{name}.weight"] = _matrix(rng, rows, columns, gain=2.0)
            tensors[f"blk.{index}.{name}.bias"] = np.zeros(rows, np.float32)
        for name in ("attn_output_norm", "layer_output_norm"):
            tensors[f"blk.{index}.{name}.weight"] = _ones(EMBED)
            tensors[f"blk.{index}.{name}.bias"] = np.zeros(EMBED, np.float32)
    return tensors


def write_vocabulary(
    path: Path,
    *,
    pre_tokenizer: str = "gpt-2",
    merges: Sequence[tuple[str, str]] = MERGES,
    words: Sequence[str] = (),
) -> Path:
    """Write a file that holds a vocabulary and no weights, as llama.cpp's own tests use them.

    `words` are further tokens, as GPT-2 spells them, to which no merges lead.
    """
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata(writer, "attention", 512, FF, {})
    write_tokenizer(writer, "gpt2", pre_tokenizer, True, None, merges, words)
    finish(writer)
    return path


def merges_of(text: str) -> list[tuple[str, str]]:
    """Merges of any two characters that stand side by side in `text`: only a pre-tokenizer keeps those apart."""
    spelling = byte_spellings()
    spelled = ["".join(spelling[byte] for byte in each.encode()) for each in text]
    within = [(each[:end], each[end]) for each in spelled for end in range(1, len(each))]
    return list(dict.fromkeys([*within, *pairwise(spelled)]))


def write_sentence_pieces(path: Path, text: str, unknown: str = "") -> Path:
    """Write a file that holds a SentencePiece vocabulary and no weights: the 256 bytes, each character of `text` but
    those of `unknown`, and any two that stand side by side there.
    """
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata(writer, "attention", 512, FF, {})
    spelled = [each for each in text.replace(" ", "\u2581") if each not in unknown]
    pairs = [left + right for left, right in pairwise(spelled)]
    pieces = list(dict.fromkeys(["\u2581", *spelled, *pairs, *(left + right[1] for left, right in pairwise(pairs))]))
    specials, raw = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*specials, *raw, *pieces])
    writer.add_token_types(
        [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, *[kinds.NORMAL] * len(pieces)]
    )
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(pieces))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    finish(writer)
    return path


COMMON_WORDS = "the and to was in her his she he they of it that said day you with had little for on very is one"
COMMON_PAIRS = (
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic "
    "ne ea ra ce li ch ll be ma si om ur us im |> <|"
)
FILL_IN = {"fim_pre": "<PRE>", "fim_suf": "<SUF>", "fim_mid": "<MID>", "fim_rep": "<REP>", "fim_sep": "<SEP>"}
"""GGUF's names of the tokens for filling in the middle, and how `write_word_model` spells them."""


def write_word_model(
    path: Path,
    *,
    chat_template: str | None = CHATML,
    context_length: int = 512,
    fill_in: Mapping[str, str] | None = None,
    name: str = "Tiny test model",
) -> Path:
    """Write a Llama of random weights with a SentencePiece vocabulary: `<unk>`, `<s>`, `</s>`, the 256 bytes,
    characters, common words and their beginnings, and the marks of `fill_in`. What it generates is visible text.
    """
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata(writer, "attention", context_length, FF, {"general.name": name})
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    beginnings = [f"\u2581{word[:end]}" for word in COMMON_WORDS.split() for end in range(1, len(word) + 1)]
    pieces = list(dict.fromkeys(["\u2581", *map(chr, range(33, 127)), *COMMON_PAIRS.split(), *beginnings]))
    marks = dict(fill_in or {})
    kinds = gguf.TokenType
    first, last = 3 + 256, 3 + 256 + len(pieces)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(
        ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *marks.values()]
    )
    special = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
    normal, control = [kinds.NORMAL] * len(pieces), [kinds.CONTROL] * len(marks)
    writer.add_token_types([*special, *[kinds.BYTE] * 256, *normal, *control])
    writer.add_token_scores([0.0] * first + [float(len(each)) for each in pieces] + [0.0] * len(marks))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for index, key in enumerate(marks):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", last + index)
    tensors = random_tensors("attention", np.random.default_rng(0), n_vocab=last + len(marks))
    tensors["output.weight"][:first] = 0  # never the likeliest among so many random ones
    tensors["output.weight"][last:] = 0
    for key, tensor in tensors.items():
        writer.add_tensor(key, tensor)
    finish(writer)
    return path


def write_split_model(prefix: Path, *, count: int = 2, seed: int = 0) -> list[Path]:
    """Write a model in `count` files, `prefix-00001-of-0000N.gguf` and so on, and return their paths."""
    tensors = list(random_tensors("attention", np.random.default_rng(seed)).items())
    share = -(-len(tensors) // count)
    paths = [prefix.with_name(f"{prefix.name}-{part + 1:05d}-of-{count:05d}.gguf") for part in range(count)]
    for part, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        if part == 0:
            write_metadata(writer, "attention", 512, FF, {})
            write_tokenizer(writer, "gpt2", "gpt-2", True, CHATML)
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(tensors))
        for name, tensor in tensors[part * share : (part + 1) * share]:
            writer.add_tensor(name, tensor)
        finish(writer)
    return paths


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(
    writer: gguf.GGUFWriter, kind: Kind, context_length: int, feed_forward: int, extra: dict[str, Any]
) -> None:
    name = writer.arch
    values: dict[str, Any] = {
        "general.name": "Tiny test model",
        "general.license": "MIT",
        "general.description": "Random weights, for tests.",
        "general.file_type": 0,
        f"{name}.context_length": context_length,
        f"{name}.embedding_length": EMBED,
        f"{name}.block_count": LAYERS,
        f"{name}.feed_forward_length": 0 if kind == "recurrent" else feed_forward,
        f"{name}.attention.head_count": 0 if kind == "recurrent" else HEADS,
        f"{name}.attention.layer_norm_rms_epsilon": 1e-5,
    }
    if kind in ("recurrent", "hybrid"):
        values |= {
            f"{name}.ssm.conv_kernel": CONV,
            f"{name}.ssm.inner_size": INNER,
            f"{name}.ssm.state_size": STATE,
            f"{name}.ssm.time_step_rank": DT_RANK,
        }
    if kind == "hybrid":
        values[f"{name}.attention.head_count_kv"] = [0, KV_HEADS]
    elif kind != "recurrent":
        values |= {f"{name}.attention.head_count_kv": KV_HEADS, f"{name}.rope.dimension_count": HEAD}
    if kind == "sliding-window":
        values |= {
            f"{name}.attention.key_length": HEAD,
            f"{name}.attention.value_length": HEAD,
            f"{name}.attention.sliding_window": WINDOW,
            f"{name}.attn_logit_softcapping": 50.0,
            f"{name}.final_logit_softcapping": 30.0,
        }
    for key, value in (values | extra).items():
        add(writer, key, value)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def write_tokenizer(
    writer: gguf.GGUFWriter,
    tokenizer: str,
    pre_tokenizer: str,
    add_bos: bool,
    chat_template: str | None,
    merges: Sequence[tuple[str, str]] = MERGES,
    words: Sequence[str] = (),
) -> None:
    writer.add_tokenizer_model(tokenizer)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    if tokenizer == TOKENIZER_NONE:
        return
    writer.add_tokenizer_pre(pre_tokenizer)
    plain = list(dict.fromkeys([*byte_spellings(), *("".join(pair) for pair in merges), *words]))
    writer.add_token_list([*plain, *SPECIALS])
    normal, control, shown = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
    writer.add_token_types([normal] * len(plain) + [control] * (len(SPECIALS) - 1) + [shown])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    shift = len(plain) - len(byte_spellings()) - len(MERGES)
    writer.add_bos_token_id(BOS + shift)
    writer.add_eos_token_id(EOS + shift)
    writer.add_eot_token_id(IM_END + shift)
    writer.add_add_bos_token(add_bos)


def byte_spellings() -> list[str]:
    """GPT-2's way to write each byte as a printable character."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def random_tensors(kind: Kind, rng: np.random.Generator, feed_forward: int = FF, n_vocab: int = N_VOCAB) -> Tensors:
    tensors = {"token_embd.weight": _matrix(rng, n_vocab, EMBED, gain=6.0), "output_norm.weight": _ones(EMBED)}
    if kind != "sliding-window":
        tensors["output.weight"] = _matrix(rng, n_vocab, EMBED, gain=3.0)
    for index in range(LAYERS):
        layer = _layer(kind, index, rng, feed_forward)
        tensors |= {f"blk.{index}.{name}": tensor for name, tensor in layer}
    return tensors


def _layer(
    kind: Kind, index: int, rng: np.random.Generator, feed_forward: int
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    yield "attn_norm.weight", _ones(EMBED)
    if kind == "recurrent" or (kind == "hybrid" and index == 0):
        yield from _mamba(rng, normed=kind == "hybrid")
    else:
        yield from _attention(rng)
    if kind == "sliding-window":
        # Gemma's embedding is its output too, and scaled up: its layers must be loud to have a say in what comes next.
        yield "post_attention_norm.weight", 12 * _ones(EMBED)
        yield "post_ffw_norm.weight", 12 * _ones(EMBED)
    if kind != "recurrent":
        yield "ffn_norm.weight", _ones(EMBED)
        yield "ffn_gate.weight", _matrix(rng, feed_forward, EMBED)
        yield "ffn_up.weight", _matrix(rng, feed_forward, EMBED)
        yield "ffn_down.weight", _matrix(rng, EMBED, feed_forward)


def _attention(rng: np.random.Generator) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    # Strong queries and keys: attention that is far from even makes each output depend on what exactly was before.
    yield "attn_q.weight", _matrix(rng, HEADS * HEAD, EMBED, gain=2.0)
    yield "attn_k.weight", _matrix(rng, KV_HEADS * HEAD, EMBED, gain=2.0)
    yield "attn_v.weight", _matrix(rng, KV_HEADS * HEAD, EMBED)
    yield "attn_output.weight", _matrix(rng, EMBED, HEADS * HEAD, gain=2.0)


def _mamba(rng: np.random.Generator, *, normed: bool) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    yield "ssm_in.weight", _matrix(rng, 2 * INNER, EMBED)
    yield "ssm_conv1d.weight", _matrix(rng, INNER, CONV)
    yield "ssm_conv1d.bias", np.zeros(INNER, np.float32)
    yield "ssm_x.weight", _matrix(rng, DT_RANK + 2 * STATE, INNER)
    yield "ssm_dt.weight", _matrix(rng, INNER, DT_RANK)
    yield "ssm_dt.bias", np.full(INNER, -2.0, np.float32)
    yield "ssm_a", -np.tile(np.arange(1, STATE + 1, dtype=np.float32), (INNER, 1))
    yield "ssm_d", _ones(INNER)
    yield "ssm_out.weight", _matrix(rng, EMBED, INNER, gain=2.0)
    if normed:
        yield "ssm_dt_norm.weight", _ones(DT_RANK)
        yield "ssm_b_norm.weight", _ones(STATE)
        yield "ssm_c_norm.weight", _ones(STATE)


def _matrix(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
    matrix: npt.NDArray[np.float32] = rng.standard_normal((rows, columns), dtype=np.float32)
    matrix *= gain / columns**0.5
    return matrix


def _ones(count: int) -> npt.NDArray[np.float32]:
    return np.ones(count, np.float32)
