"""The coding agents that `uma launch` starts: how each is told of a server, without a change to what is the user's.

Everything goes by variables, by options, or by a file in a temporary folder that ends with the agent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs


@attrs.frozen
class AgentPlace:
    """Where an agent finds its model."""

    url: str
    """The server's, without a path."""
    model: str
    context_tokens: int
    key: str
    folder: Path
    """Folder for files of the agent's configuration."""


@attrs.frozen
class Start:
    """What an agent is started with, beside the user's own arguments and variables."""

    options: Sequence[str] = ()
    variables: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Agent:
    """A program that `uma launch` knows."""

    program: str
    install: str
    """The command that installs it."""
    start: Callable[[AgentPlace], Start]


CLAUDES_LEAST_TOKENS = 65_536
"""Minimum context that Claude Code is told of: it keeps some 33,000 tokens of it for an answer and its compaction, and
would refuse its own first prompt of 18,000. Untold, it shortens a conversation once the server says that it is too
long.
"""


def _claude(place: AgentPlace) -> Start:
    sizes = ["CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_AUTO_COMPACT_WINDOW"]
    models = ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"]
    models += [f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")]
    return Start(
        variables={
            "ANTHROPIC_BASE_URL": place.url,
            "ANTHROPIC_AUTH_TOKEN": place.key,
            "ANTHROPIC_API_KEY": "",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **dict.fromkeys(models, place.model),
            **dict.fromkeys(sizes if place.context_tokens >= CLAUDES_LEAST_TOKENS else (), str(place.context_tokens)),
        }
    )


def _codex(place: AgentPlace) -> Start:
    provider = {"name": "UMA", "base_url": f"{place.url}/v1", "wire_api": "responses", "env_key": "UMA_AGENT_KEY"}
    settings = {
        "model": place.model,
        "model_context_window": place.context_tokens,
        "model_provider": "uma",
        **{f"model_providers.uma.{name}": value for name, value in provider.items()},
    }
    pairs = [("-c", f"{name}={json.dumps(value)}") for name, value in settings.items()]  # JSON's scalars are TOML's
    return Start([text for pair in pairs for text in pair], {"UMA_AGENT_KEY": place.key})


def _opencode(place: AgentPlace) -> Start:
    model = {"name": place.model, "limit": {"context": place.context_tokens, "output": _output_tokens(place)}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "UMA",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": place.key},
        "models": {place.model: model},
    }
    name = f"uma/{place.model}"
    config = {
        "provider": {"uma": provider},
        "model": name,
        "small_model": name,
        "share": "disabled",
        "autoupdate": False,
    }
    return Start(variables={"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"})


def _aider(place: AgentPlace) -> Start:
    name, file = f"openai/{place.model}", place.folder / "aider.json"
    sizes = {"max_input_tokens": place.context_tokens, "max_output_tokens": _output_tokens(place)}
    file.write_text(json.dumps({name: {**sizes, "litellm_provider": "openai", "mode": "chat"}}))
    options = ["--model", name, "--weak-model", name, "--model-metadata-file", str(file)]
    options += ["--no-show-model-warnings", "--no-analytics", "--no-check-update"]
    return Start(options, {"OPENAI_API_BASE": f"{place.url}/v1", "OPENAI_API_KEY": place.key})


def _qwen(place: AgentPlace) -> Start:
    file = place.folder / "qwen.json"  # what the user and the project set goes before it
    file.write_text(json.dumps({"model": {"generationConfig": {"contextWindowSize": place.context_tokens}}}))
    variables = {"OPENAI_BASE_URL": f"{place.url}/v1", "OPENAI_API_KEY": place.key, "OPENAI_MODEL": place.model}
    return Start(
        ["--auth-type", "openai", "--model", place.model], {**variables, "QWEN_CODE_SYSTEM_DEFAULTS_PATH": str(file)}
    )


def _pi(place: AgentPlace) -> Start:
    model = {
        "id": place.model,
        "name": place.model,
        "reasoning": False,
        "input": ["text"],
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        "contextWindow": place.context_tokens,
        "maxTokens": _output_tokens(place),
    }
    provider = {
        "baseUrl": f"{place.url}/v1",
        "apiKey": "UMA_AGENT_KEY",
        "api": "openai-completions",
        "models": [model],
    }
    file = place.folder / "uma.js"
    file.write_text(f"export default (pi) => pi.registerProvider('uma', {json.dumps(provider)});\n")
    return Start(["--extension", str(file), "--provider", "uma", "--model", place.model], {"UMA_AGENT_KEY": place.key})


def _output_tokens(place: AgentPlace) -> int:
    """A quarter of the context is kept for an answer."""
    return max(1, place.context_tokens // 4)


AGENTS: Mapping[str, Agent] = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("codex", "npm install -g @openai/codex", _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
    "aider": Agent("aider", "python -m pip install aider-install && aider-install", _aider),
    "qwen": Agent("qwen", "npm install -g @qwen-code/qwen-code", _qwen),
    "pi": Agent("pi", "npm install -g @mariozechner/pi-coding-agent", _pi),
}
"""Agents by the name that `uma launch` takes."""
