"""Small random models in place of those that llama.cpp's server tests download.

What they say is noise. What a test reads of a model is there: a SentencePiece vocabulary with `<s>` as token 1, tokens
for filling in the middle, a pooling, a score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from chat_templates import TEMPLATES as FAMILIES

from models import CHATML, FILL_IN, write_encoder, write_word_model

CONTEXT = 8192
"""Tokens of a generating model's context: the most that a test asks for."""

TEMPLATES: Mapping[str, str] = {
    "chatml": CHATML,
    "hermes": FAMILIES["hermes"],
    "llama3": (
        "{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
        "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "command-r": (
        "{% for message in messages %}<|START_OF_TURN_TOKEN|><|{{ 'CHATBOT' if message['role'] == 'assistant' else "
        "message['role'] | upper }}_TOKEN|>{{ message['content'] | trim }}<|END_OF_TURN_TOKEN|>{% endfor %}"
        "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
    ),
}
"""Those that llama-server knows by name, as far as the tests name them, and one with tools."""

_WRITERS: Mapping[str, Callable[[Path, str], Path]] = {
    "infill": lambda path, template: write_word_model(
        path, chat_template=template, context_length=CONTEXT, fill_in=FILL_IN, name=path.stem
    ),
    "bert-bge": lambda path, _: write_encoder(path, pooling="mean", context_length=512),
    "reranker": lambda path, _: write_encoder(path, pooling="rank", context_length=512),
    "stories": lambda path, template: write_word_model(
        path, chat_template=template, context_length=CONTEXT, name=path.stem
    ),
}
"""By a part of the wanted model's name."""


def write_stand_in(path: Path, wanted: str, template: str) -> Path:
    """Write what stands in for the model `wanted` (its repository and file); its path, whose name is the model's.

    `template` is the text of a chat template, or llama-server's name of one.
    """
    kind = next((kind for kind in _WRITERS if kind in wanted), "stories")
    return _WRITERS[kind](path, TEMPLATES.get(template, template))
