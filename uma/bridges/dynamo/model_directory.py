"""Directory that a frontend needs for a model: config.json, tokenizer.json, tokenizer_config.json.

Its name is a hash of its content, and relative to its location. So workers of one model on different machines give the
frontend the same name, and therefore the same card. It is written under another name and renamed, so that workers that
start at the same time do not collide.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs

from uma.types import ModelInfo

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


@attrs.frozen
class ModelFiles:
    """Facts about a model that a frontend needs."""

    info: ModelInfo
    bos: int | None
    eos: int | None
    eos_text: str
    chat_template: str | None
    tokenizer_json: str

    def contents(self) -> dict[str, str]:
        """Text of each file. The same on every machine.

        `bos_token` is empty: the worker puts the beginning of text before a request's tokens, so no template must write
        it.
        """
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "bos_token_id": self.bos,
            "eos_token_id": self.eos,
            "max_position_embeddings": self.info.context_length,
            "vocab_size": self.info.vocab_size,
        }
        tokenizer = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "",
            "eos_token": self.eos_text,
            "add_bos_token": False,
            "model_max_length": self.info.context_length,
        }
        if self.chat_template is not None:
            tokenizer["chat_template"] = self.chat_template
        texts = (_json(config), self.tokenizer_json, _json(tokenizer))
        return dict(zip(FILES, texts, strict=True))


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)


def write(base: Path, files: ModelFiles) -> str:
    """Write the directory below `base` unless it exists. Returns its name, relative to `base`."""
    contents = files.contents()
    digest = hashlib.sha256("\0".join(f"{name}\0{text}" for name, text in sorted(contents.items())).encode())
    name = digest.hexdigest()[:32]
    if (base / name).is_dir():
        return name
    base.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=base, prefix=".new-"))
    for file, text in contents.items():
        (aside / file).write_text(text, encoding="utf-8")
    try:
        aside.rename(base / name)
    except OSError:
        shutil.rmtree(aside)
        if not (base / name).is_dir():  # another worker's rename can have been first
            raise
    return name
