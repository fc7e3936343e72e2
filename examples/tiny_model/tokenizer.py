"""The vocabulary: byte-level BPE of GPT-2's kind, trained on the recipe's own text.

All 256 bytes are tokens, so every text can be encoded and comes back as it went in. llama.cpp knows the scheme as model
"gpt2" with the pre-tokenizer "gpt-2"; nothing else may be done to the text here (no normalizing, no space put in
front), or the two would disagree.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import dialogue

SPECIAL = (dialogue.BOS, dialogue.TURN, dialogue.END)


def train(size: int, documents: int, seed: int) -> Tokenizer:
    """A tokenizer of `size` tokens, the special ones first, learnt from that many documents."""
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=_special(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = Random(seed)
    tokenizer.train_from_iterator((_plain(dialogue.document(rng)) for _ in range(documents)), trainer)
    return tokenizer


def of_tokens(tokens: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    """The tokenizer that has these tokens, each with its place as its id, and these merges."""
    tokenizer = _byte_level(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.add_special_tokens(_special())
    return tokenizer


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _special() -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in SPECIAL]


def _plain(document: str) -> str:
    for token in SPECIAL:
        document = document.replace(token, "\n")
    return document


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))
