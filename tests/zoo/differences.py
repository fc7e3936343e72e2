"""Where UMA's prompts are not llama-server's, by the difference that docs/templates.md tells of them."""

from __future__ import annotations

from conversations import PROMPTS

ALL = ("begun", "begun, off", "begun behind a thought", "begun within a thought")
BEFORE_TEXT = ("begun", "begun, off")
BEHIND = ("begun", "begun, off", "begun behind a thought")
WITH_TOOLS = tuple(name for name, each in PROMPTS.items() if each.tools)
THOUGHT = ("begun behind a thought", "begun within a thought")

DIFFERENT: dict[str, dict[tuple[str, ...], tuple[str, ...]]] = {
    "`on` and `off` change the prompt": {
        ("plain, off", "turns, off", "one result, off"): ("ByteDance-Seed-OSS.jinja",),
        ("plain, off", "turns, off"): ("Cohere2MoE.jinja", "Kimi-K3.jinja"),
        ("one result, off",): ("Cohere2MoE.jinja", "Kimi-K3.jinja"),
        WITH_TOOLS: ("MiniMax-M3.jinja",),
        tuple(name for name in WITH_TOOLS if name != "one result, off"): ("tencent-Hy3.jinja",),
        ("begun, off",): ("Kimi-K3.jinja",),
        ("plain", "system", "turns", "two of the user", "system again", "thought"): (
            "MiniMax-M3.jinja",
            "tencent-Hy3.jinja",
        ),
        ("plain, off", "turns, off", *ALL): ("MiniMax-M3.jinja",),
        ("plain",): ("ibm-granite-granite-3.3-2B-Instruct.jinja",),
        ("begun", *THOUGHT): ("tencent-Hy3.jinja",),
    },
    "thinking of earlier turns, or an empty `<think>` for it, is left out": {
        ("thought",): ("GLM-4.7-Flash.jinja", "LFM2.5-8B-A1B.jinja", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja"),
        ("turns", "system again", "thought"): (
            "deepseek-ai-DeepSeek-V4-Flash-0731.jinja",
            "deepseek-ai-DeepSeek-V4.jinja",
        ),
        ("turns, off", "one result, off"): ("poolside-Laguna-S-2.1.jinja",),
    },
    "the text of an earlier turn with thinking stays": {
        ("thought",): ("unsloth-mistral-Devstral-Small-2507.jinja",),
    },
    "it becomes a message of the user": {
        ("system again",): (
            "Bielik-11B-v3.0-Instruct.jinja",
            "HuggingFaceTB-SmolLM3-3B.jinja",
            "MiniMax-M1.jinja",
            "MiniMax-M2.jinja",
            "NVIDIA-Nemotron-Nano-v2.jinja",
            "Reka-Edge.jinja",
            "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja",
            "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
            "llama-cpp-deepseek-r1.jinja",
            "llama-cpp-rwkv-world.jinja",
            "openai-gpt-oss-120b.jinja",
        ),
    },
    "a text beside a call stays": {("text beside a call",): ("google-gemma-4-31B-it-interleaved.jinja",)},
    "tools are described in the system message": {
        WITH_TOOLS: (
            "HuggingFaceTB-SmolLM3-3B.jinja",
            "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja",
            "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
            "deepseek-ai-DeepSeek-V3.1.jinja",
            "fireworks-ai-llama-3-firefunction-v2.jinja",
            "llama-cpp-rwkv-world.jinja",
            "microsoft-Phi-3.5-mini-instruct.jinja",
        ),
    },
    "the role of a result is its tool's name": {
        WITH_TOOLS: ("Kimi-K2-Instruct.jinja", "Kimi-K2-Thinking.jinja"),
    },
    "earlier calls are in the message's text": {
        WITH_TOOLS: ("LFM2-8B-A1B.jinja", "LFM2.5-Instruct.jinja"),
    },
    "the thinking before a call is shown": {("thought before a call",): ("upstage-Solar-Open-100B.jinja",)},
    "where an answer is continued": {
        ("begun",): (
            "deepseek-ai-DeepSeek-V4-Flash-0731.jinja",
            "deepseek-ai-DeepSeek-V4.jinja",
            "google-gemma-4-31B-it-interleaved.jinja",
            "google-gemma-4-31B-it.jinja",
        ),
        ("begun, off",): (
            "GLM-4.7-Flash.jinja",
            "Reka-Edge.jinja",
            "Spark2.5.jinja",
            "poolside-Laguna-S-2.1.jinja",
            "poolside-Laguna-XS-2.1.jinja",
            "poolside-Laguna-XS.2.jinja",
        ),
        BEFORE_TEXT: (
            "Apriel-1.6-15b-Thinker-fixed.jinja",
            "Bielik-11B-v3.0-Instruct.jinja",
            "ByteDance-Seed-OSS.jinja",
            "Cohere2MoE.jinja",
            "LFM2.5-8B-A1B.jinja",
            "mistralai-Ministral-3-14B-Reasoning-2512.jinja",
            "muse-glimmer.jinja",
            "openai-gpt-oss-120b.jinja",
        ),
        BEHIND: (
            "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja",
            "NVIDIA-Nemotron-Nano-v2.jinja",
            "StepFun3.5-Flash.jinja",
        ),
        THOUGHT: ("Kimi-K2-Thinking.jinja", "poolside-Laguna-XS-2.1.jinja", "poolside-Laguna-XS.2.jinja"),
        ("begun", *THOUGHT): ("GLM-4.6.jinja",),
        ALL: (
            "CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja",
            "HuggingFaceTB-SmolLM3-3B.jinja",
            "Kimi-K2-Instruct.jinja",
            "LFM2-8B-A1B.jinja",
            "LFM2.5-Instruct.jinja",
            "Qwen-QwQ-32B.jinja",
            "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja",
            "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
            "ibm-granite-granite-3.3-2B-Instruct.jinja",
            "llama-cpp-deepseek-r1.jinja",
            "llama-cpp-rwkv-world.jinja",
            "microsoft-Phi-3.5-mini-instruct.jinja",
            "moonshotai-Kimi-K2.jinja",
            "unsloth-mistral-Devstral-Small-2507.jinja",
            "upstage-Solar-Open-100B.jinja",
        ),
    },
}
"""By a difference: conversations of `PROMPTS`, and the templates by which these differ so."""


def differences_of(template_name: str) -> set[str]:
    """The conversations whose prompts by this template are not llama-server's."""
    return {
        conversation
        for rows in DIFFERENT.values()
        for conversations, templates in rows.items()
        if template_name in templates
        for conversation in conversations
    }
