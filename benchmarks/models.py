"""The models that are measured: one with random weights of a real shape, which needs no download, and two real ones.

The random weights mean nothing, the shapes do: a Llama of 100 million parameters, Q8_0, 32,000 tokens of vocabulary,
which is the small end of what people run on a CPU and the hard end for a server (the faster the model, the more a
server's own time shows). The tokenizer is real: prompts made of its words survive text and back, token for token, so
peers that take only text get exactly the same prompts as those that take token ids.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random

import attrs
import gguf
import numpy as np
import numpy.typing as npt

from benchmarks.cache import cache_dir
from benchmarks.reference import RealModel, fetch_model

VERSION = 2
"""Part of the cached file's name: raise it when what is written changes."""

CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxz", "aeiouy"
SYLLABLES = tuple(consonant + vowel for consonant in CONSONANTS for vowel in VOWELS)
SPACE = "Ġ"
"""How byte-level BPE writes a space."""
SPM_SPACE = "▁"
"""How SentencePiece writes it."""
SPECIALS = ("<unk>", "<s>", "</s>")
WHISPER = 0.002
"""Scale of what the layers of a model that recites add to a word's embedding: it shall still be told by it. At ten
times as much the next word's logit is 4.9 instead of `CLARITY`, and the text goes on elsewhere after 3 words."""
CLARITY = 7.2
"""Its logit of the next word, where those of the others of the text are random, with a deviation of a quarter: with
temperature 1 and `top_k` 40 it goes on elsewhere in the text after 25 words on average, with temperature 2 after 2."""


@attrs.frozen
class Shape:
    """A Llama's dimensions. The defaults are the 100 M-parameter shape all figures are about."""

    name: str = "llama-100m"
    layers: int = 12
    width: int = 768
    heads: int = 12
    kv_heads: int = 4
    feed_forward: int = 2048
    vocab: int = 32_000
    context: int = 32_768
    recites: int = 0
    """Words of a text that the model knows by heart: each one's successor is by far the likeliest next word. It costs
    what the same shape costs otherwise, but what it generates repeats. 0: what it generates is random."""

    @property
    def kv_width(self) -> int:
        """Columns of a key or value row."""
        return self.width // self.heads * self.kv_heads


SHAPES = {
    "100m": Shape(),
    "500m": Shape(name="llama-500m", layers=24, width=896, heads=14, kv_heads=2, feed_forward=4864, vocab=152_000),
}
"""Random models that `--shape` chooses from: the second has the vocabulary of Qwen2.5 and its smallest model's
dimensions, so that sampling and the last matrix cost what they cost with a large vocabulary."""
REAL: dict[str, tuple[RealModel, Shape]] = {
    "smollm2": ("smollm2", Shape("SmolLM2-135M-Instruct", 30, 576, 9, 3, 1536, 49_152, 8_192)),
    "gemma3": ("gemma3", Shape("Gemma 3 270M", 18, 640, 4, 1, 2048, 262_144)),
}
"""Real models that `--shape` chooses from, with their dimensions."""


@attrs.frozen
class Vocabulary:
    """Tokens in id order, and the merges that make them."""

    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    words: Sequence[int]
    """Ids of whole words with a space before: what prompts are made of. Those of random models are two syllables long,
    and a range."""


def vocabulary(size: int) -> Vocabulary:
    """Specials, bytes, syllables, words with and without a space, and longer words to fill up.

    Syllables are one consonant and one vowel, so no merge can start in the middle of another: a text of words has one
    tokenization only.
    """
    words = ["".join(pair) for pair in itertools.product(SYLLABLES, SYLLABLES)]
    tokens = [*SPECIALS, *gguf_bytes(), *SYLLABLES, *words, *(SPACE + word for word in words)]
    merges = [f"{syllable[0]} {syllable[1]}" for syllable in SYLLABLES]
    merges += [f"{word[:2]} {word[2:]}" for word in words]
    merges += [f"{SPACE} {word}" for word in words]
    endings = ("ka", *(syllable for syllable in SYLLABLES if syllable != "ka"))
    longer = itertools.product(endings, words)
    for ending, word in itertools.islice(longer, max(0, size - len(tokens))):
        tokens.append(f"{word}{ending}")
        merges.append(f"{word} {ending}")
    first_word = len(SPECIALS) + 256 + len(SYLLABLES) + len(words)
    return Vocabulary(tuple(tokens), tuple(merges), range(first_word, first_word + len(words)))


def gguf_bytes() -> list[str]:
    """The 256 characters byte-level BPE writes bytes with: printable ones as they are, the rest from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = itertools.count(0x100)
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@attrs.frozen
class BenchModel:
    """A model file and how to write prompts for it."""

    path: Path
    shape: Shape
    vocabulary: Vocabulary
    weights: str = "random weights, Q8_0"
    """Their origin and type in words."""

    def prompt(self, rng: Random, n_tokens: int) -> tuple[int, ...]:
        """Random word tokens. From two generators with different seeds, prompts share no prefix worth caching."""
        return tuple(rng.choices(self.vocabulary.words, k=n_tokens))

    def recital(self, rng: Random) -> tuple[int, ...]:
        """The whole text that the model knows by heart, begun somewhere."""
        words, count = self.vocabulary.words, self.shape.recites
        start = rng.randrange(count)
        return tuple(words[(start + index) % count] for index in range(count))

    def jumps(self, tokens: Sequence[int]) -> int:
        """How often a text that is known by heart went on with another word than its next."""
        return sum((after - before) % self.shape.recites != 1 for before, after in itertools.pairwise(tokens))

    def text(self, token_ids: tuple[int, ...]) -> str:
        """The text that tokenizes to exactly these word tokens."""
        return "".join(self.vocabulary.tokens[token] for token in token_ids).replace(SPACE, " ").replace(SPM_SPACE, " ")


def named_model(name: str) -> BenchModel:
    """The model that `--shape` names, random or real.

    Raises `subprocess.CalledProcessError` where a real one cannot be downloaded.
    """
    if name in SHAPES:
        return bench_model(SHAPES[name])
    real, shape = REAL[name]
    path = fetch_model(real)
    field = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"]
    tokens = tuple(str(token) for token in field.contents())
    words = [id for id, token in enumerate(tokens) if re.fullmatch(f"[{SPACE}{SPM_SPACE}][a-z]{{4,8}}", token)]
    return BenchModel(path, shape, Vocabulary(tokens, (), words), f"real weights, {path.stem}")


def bench_model(shape: Shape | None = None) -> BenchModel:
    """The model file, from the cache or written now (a few seconds)."""
    shape = shape or Shape()
    vocab = vocabulary(shape.vocab)
    path = cache_dir() / f"{shape.name}-v{VERSION}-q8_0.gguf"
    if not path.exists():
        # Written beside and renamed, so that a run broken off leaves no half file under the real name.
        partial = path.with_suffix(f".{os.getpid()}.partial")
        write_model(partial, shape, vocab)
        partial.rename(path)
    return BenchModel(path, shape, vocab)


def write_model(path: Path, shape: Shape, vocab: Vocabulary) -> None:
    """Write a GGUF file with random weights, the same ones every time."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_metadata(writer, shape, vocab)
    rng = np.random.default_rng(0)
    embedding: npt.NDArray[np.float32] | None = None
    for name, (rows, columns) in _matrices(shape).items():
        weights = rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)
        if name == "output.weight":
            assert embedding is not None
            weights = _recital_output(shape, vocab, embedding)
        elif name == "token_embd.weight":
            embedding = weights
            if not shape.recites:
                # The output matrix is tied to it: a zero row's logit is 0, which never wins among 31,700 random ones,
                # so only tokens that are visible text are generated and every peer's stream has one piece of text a
                # token.
                weights[: vocab.words[0] - len(SYLLABLES) - len(vocab.words)] = 0
        elif shape.recites and name.endswith(("attn_output.weight", "ffn_down.weight")):
            weights *= np.float32(WHISPER)
        quantized = gguf.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in _norms(shape):
        writer.add_tensor(name, np.ones(shape.width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _recital_output(shape: Shape, vocab: Vocabulary, embedding: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """An output matrix whose largest logit is that of the next word of the text: the row of each is the embedding of
    the word before it.
    """
    weights = np.zeros_like(embedding)
    words = vocab.words[0] + np.arange(shape.recites)
    weights[np.roll(words, -1)] = embedding[words] * np.float32(CLARITY / shape.width**0.5)
    return weights


def _write_metadata(writer: gguf.GGUFWriter, shape: Shape, vocab: Vocabulary) -> None:
    writer.add_name(f"{shape.name} with random weights, for speed measurements only")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(vocab.tokens))
    writer.add_token_merges(list(vocab.merges))
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control] * len(SPECIALS) + [normal] * (len(vocab.tokens) - len(SPECIALS)))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    matrices = {"token_embd.weight": (shape.vocab, shape.width)}
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        matrices[block + "attn_q.weight"] = (shape.width, shape.width)
        matrices[block + "attn_k.weight"] = (shape.kv_width, shape.width)
        matrices[block + "attn_v.weight"] = (shape.kv_width, shape.width)
        matrices[block + "attn_output.weight"] = (shape.width, shape.width)
        matrices[block + "ffn_gate.weight"] = (shape.feed_forward, shape.width)
        matrices[block + "ffn_up.weight"] = (shape.feed_forward, shape.width)
        matrices[block + "ffn_down.weight"] = (shape.width, shape.feed_forward)
    return matrices | ({"output.weight": (shape.vocab, shape.width)} if shape.recites else {})


def _norms(shape: Shape) -> list[str]:
    layers = [f"blk.{layer}.{kind}.weight" for layer in range(shape.layers) for kind in ("attn_norm", "ffn_norm")]
    return [*layers, "output_norm.weight"]


def parameters(shape: Shape) -> int:
    """Weights in all, the tied output matrix counted once."""
    return sum(rows * columns for rows, columns in _matrices(shape).values()) + len(_norms(shape)) * shape.width
