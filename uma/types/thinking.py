"""The variables of chat templates that say whether to think, and how much, with their values."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

THINKING_SWITCHES: Mapping[str, tuple[Any, Any]] = MappingProxyType(
    {
        "enable_thinking": (True, False),
        "thinking": (True, False),
        "reasoning": (True, False),
        "thinking_mode": ("enabled", "disabled"),
    }
)
"""Names by which templates are asked for thinking or for none, and the values for it: most by the first, DeepSeek's
and Granite's by `thinking`, Cohere's by `reasoning`, MiniMax's by the last."""
THINKING_BUDGET = "thinking_budget"
"""Seed-OSS' variable for the number of tokens to think; 0 asks for no thinking."""
EFFORT_NAMES = ("reasoning_effort", "reasoning_strength", "thinking_effort")
"""Names by which templates are told how much to think: most by the first, Muse's and Kimi K3's by the others."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Words for it, the least first."""
NO_EFFORT = "no_think"
"""The effort that asks Hunyuan for no thinking; without an effort it does not think either."""
