"""What is accepted of llama.cpp's server tests: files left out, numbers that the model decides, and differences."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

LEFT_OUT: Mapping[str, str] = {
    "test_lora.py": "LoRA adapters",
    "test_mcp_servers.py": "llama-server as a client of MCP servers",
    "test_router.py": "one server for several models",
    "test_stream.py": "one server for several models",
    "test_sleep.py": "a model that is unloaded while idle",
    "test_speculative.py": "a draft model that is downloaded",
    "test_tools_builtin.py": "tools that the server itself runs",
    "test_vision_api.py": "images",
}
"""Files of what UMA does not have at all, and what that is."""

LOOKS: Mapping[str, Mapping[str, str]] = {
    "test_chat_completion.py": {"== n_prompt": "== looks(n_prompt)"},
    "test_completion.py": {"== n_prompt": "== looks(n_prompt)"},
    "test_rerank.py": {"== n_tokens": "== looks(n_tokens)"},
    "test_embedding.py": {"== n_tokens": "== looks(n_tokens)", "== 2 * 9": "== looks(2 * 9)"},
}
"""Replaced in the tests' text: numbers of tokens that only the model's vocabulary decides."""

DIFFERENCES: Sequence[tuple[str, str]] = ()
"""Patterns of tests' names, and why these fail."""


def reason_for(test: str) -> str | None:
    """Why it is right that this test fails; None where it is not."""
    return next((reason for pattern, reason in DIFFERENCES if re.search(pattern, test)), None)
