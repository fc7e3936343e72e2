"""Converts a GGUF's vocabulary to the tokenizer.json that a frontend needs, and proves that both give the same ids.

Byte-level BPE (`gpt2`), SentencePiece (`llama`) and WordPiece (`bert`) are built from the file's tables. If a text of
many scripts, or a word of the vocabulary, gets other ids than llama.cpp gives, the model is not served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from uma.errors import ConfigError, ModelError

CONTROL, USER_DEFINED, UNKNOWN = 3, 4, 2
"""Kinds of tokens in `tokenizer.ggml.token_type`."""

PROBE = (
    "The quick brown fox, aged 1234567890, can't jump over 3.14 lazy dogs!? \n\n  Two  spaces\tand a tab.\r\n"
    "Fuchs für Öl, été, garçon, señor, Łódź, Ελληνικά, Кириллица, עברית, العربية, हिन्दी, ไทย, 한국어, 日本語の文章, "
    "中文字符,\u3000全角。 🙂👩‍💻🇪🇺 e\u0301 ﬁ ½ x² <tag> {json: [1, 2]} def f(x):\n    return x**2  # ok\n"
    "বাংলা ভাষা ১২৩, தமிழ் மொழி, తెలుగు, ಕನ್ನಡ, മലയാളം, ગુજરાતી, ਪੰਜਾਬੀ, සිංහල, ქართული ენა, Հայերեն լեզու, አማርኛ ቋንቋ፣ "
    "ភាសាខ្មែរ, ລາວ, မြန်မာ, བོད་ཡིག, Монгол ᠮᠣᠩᠭᠣᠯ, "
    "فارسی ۱۲۳, اُردُو, ייִדיש, Tiếng Việt, Ўзбек, ᏣᎳᎩ, ⵜⴰⵎⴰⵣⵉⵖⵜ, 粵語, ひらがな カタカナ ﾊﾝｶｸ\n"
    "ଓଡ଼ିଆ ଭାଷା ୧୨, ދިވެހި, ܣܘܪܝܝܐ, ߒߞߏ, ᐃᓄᒃᑎᑐᑦ, ꆈꌠꉙ, ꦧꦱꦗꦮ, ᬩᬮᬶ, ᮞᮥᮔ᮪ᮓ, ᱥᱟᱱᱛᱟᱲᱤ, ꯃꯩꯇꯩ, ㄅㄆㄇㄈ, ⲕⲏⲙⲓ, 𞤀𞤣𞤤𞤢𞤥, 𐌲𐌿𐍄𐌹𐍃𐌺\n"
    "It's WE'LL I'm they'd 'tis 12,345.67 €5 №7 ~~x~~ 😀😀 \u200bzero\u00a0hard\ttab  \n\n\n end \n"
)
"""Text of every kind that pre-tokenizers treat differently."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_WHOLE_WORDS = (
    "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
)  # fmt: skip
"""Values of `tokenizer.ggml.pre` for which llama.cpp takes a word that is a token as it is, without merges."""
_SPLITS = {
    **dict.fromkeys(_WHOLE_WORDS, _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN2),
    "qwen35": _QWEN35,
}
"""Regular expression that splits text before merging, by `tokenizer.ggml.pre`; others are split as GPT-2 does."""
_SINGLE_DIGITS = frozenset(
    {"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"}
)
"""Values of `tokenizer.ggml.pre` that split as GPT-2 does, after splitting off each single digit."""
MAX_WORDS = 2_000
"""Maximum number of the vocabulary's own words that are compared, each by itself."""


class _TokenizerFile:
    """The tokenizer's part of a GGUF file."""

    def __init__(self, path: Path) -> None:
        self._fields = gguf.GGUFReader(path).fields
        self.tokens: list[str] = self.get("tokens")
        self.kinds: list[int] = self.get("token_type") or [1] * len(self.tokens)

    def get(self, name: str) -> Any:
        """`tokenizer.ggml.NAME`, or None."""
        field = self._fields.get(f"tokenizer.ggml.{name}")
        return None if field is None else field.contents()


def make_tokenizer(path: Path) -> Tokenizer:
    """Tokenizer of a GGUF file. Raises `ModelError` for a kind that cannot be converted."""
    file = _TokenizerFile(path)
    kind = file.get("model")
    if kind == "gpt2":
        made = _byte_level(file)
    elif kind == "llama":
        made = _sentence_piece(file)
    elif kind == "bert":
        made = _word_piece(file)
    else:
        raise ModelError(
            f"{path}: its tokenizer, {kind}, cannot be converted for Dynamo's frontend; --tokenizer-dir takes a "
            "directory with its tokenizer.json"
        )
    _add_special(made, file)
    return made


def _byte_level(file: _TokenizerFile) -> Tokenizer:
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in file.get("merges") or [])]
    kind = str(file.get("pre"))
    tokenizer = Tokenizer(models.BPE(vocab=_vocab(file), merges=merges, ignore_merges=kind in _WHOLE_WORDS))
    pattern = _SPLITS.get(kind)
    if pattern is None:
        as_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated")] if kind in _SINGLE_DIGITS else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, as_gpt2])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: _TokenizerFile) -> Tokenizer:
    vocab, scores = _vocab(file), file.get("scores")
    unknown = next((token for token, kind in zip(file.tokens, file.kinds, strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    if file.get("add_space_prefix") is not False:
        steps.insert(0, normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _word_piece(file: _TokenizerFile) -> Tokenizer:
    """WordPiece tokenizer. GGUF marks pieces that begin a word (`▁`), WordPiece marks all others (`##`)."""
    lowercase = file.get("normalizer.lowercase") is not False
    strips = file.get("normalizer.strip_accents")
    vocab = {
        _word_piece_of(token, kind): id for id, (token, kind) in enumerate(zip(file.tokens, file.kinds, strict=True))
    }
    tokenizer = Tokenizer(
        models.WordPiece(
            vocab=vocab, unk_token=file.tokens[file.get("unknown_token_id")], max_input_chars_per_word=2**31
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=lowercase if strips is None else strips
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _word_piece_of(token: str, kind: int) -> str:
    if kind in (CONTROL, USER_DEFINED, UNKNOWN):
        return token
    return token[1:] if token.startswith("▁") else f"##{token}"


def _merges(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merges as a ranked list of pairs. SentencePiece itself merges the pair whose piece has the highest score."""
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, id in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[id], vocab[left], vocab[right], (left, right)))
    return [pair for *_, pair in sorted(ranked)]


def _vocab(file: _TokenizerFile) -> dict[str, int]:
    return {token: id for id, token in enumerate(file.tokens)}


def _add_special(tokenizer: Tokenizer, file: _TokenizerFile) -> None:
    # In one call: each call makes the library search for all of them again.
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(file.tokens, file.kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        ]
    )


def read_tokenizer(directory: Path) -> Tokenizer:
    """Tokenizer of the tokenizer.json in the directory of `--tokenizer-dir`. Raises `ConfigError`."""
    path = directory / "tokenizer.json"
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # (The library raises a bare `Exception`.)
        raise ConfigError(f"--tokenizer-dir: {path}: {error}") from error


def check_tokenizer(tokenizer: Tokenizer, reference: Callable[[str], Sequence[int]], what: str) -> None:
    """Raise `ModelError`, naming the first difference, where `tokenizer` gives other ids than llama.cpp. `what`
    describes the tokenizer for the message.
    """
    specials = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    between_words = "word".join(["", *(f" {special} a{special}" for special in specials), "."])
    for line in [*PROBE.splitlines(keepends=True), PROBE, between_words, *_words(tokenizer)]:
        ours, theirs = tokenizer.encode(line, add_special_tokens=False).ids, list(reference(line))
        if ours == theirs:
            continue
        at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(theirs))
        raise ModelError(
            f"{what} gives other tokens than llama.cpp: token {at} of {line[:40]!r}… is {ours[at : at + 1]}, not "
            f"{theirs[at : at + 1]}; give a directory with the model's own tokenizer.json by --tokenizer-dir"
        )


def _words(tokenizer: Tokenizer) -> list[str]:
    """Texts of tokens that are words of ASCII letters, spread over the whole vocabulary.

    A file can have words that no merges lead to.
    """
    texts = []
    for token in sorted(tokenizer.get_vocab(with_added_tokens=False)):
        word = token.removeprefix("Ġ").removeprefix("▁")
        if word.isascii() and word.isalpha():
            texts.append(word if word == token else f" {word}")
    return texts[:: max(1, -(-len(texts) // MAX_WORDS))]
