"""Every conversation in every chat template that llama.cpp keeps: nothing of it is lost, and every switch arrives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import product

import attrs
import pytest
from conversations import ASKED, CALLED, CONVERSATIONS, SAID, SYSTEM, THOUGHT, TOOLS, given
from reference import template, template_names

from uma.chat.families import thinking_of
from uma.engine.intake.rendering import rendered
from uma.llama.template import ChatTemplate
from uma.types import Message, ReasoningMode, Request

SYSTEM_WITH_THE_LAST_QUESTION = {"mistralai-Mistral-Nemo-Instruct-2407.jinja"}
"""Templates that show the system message only where the user's message is the last one."""
CALLS_ALONE = {
    "Cohere2MoE.jinja",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja",
    "MiniMax-M1.jinja",
    "upstage-Solar-Open-100B.jinja",
    "Mistral-Small-3.2-24B-Instruct-2506.jinja",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja",
    "meta-llama-Llama-3.1-8B-Instruct.jinja",
    "meta-llama-Llama-3.2-3B-Instruct.jinja",
    "meta-llama-Llama-3.3-70B-Instruct.jinja",
    "mistralai-Mistral-Nemo-Instruct-2407.jinja",
    "muse-glimmer.jinja",
}
"""Templates that show of a message with calls the calls alone."""
SWITCHED = {
    "ByteDance-Seed-OSS.jinja": ("off",),
    "Cohere2MoE.jinja": ("off",),
    "MiniMax-M3.jinja": ("on", "off"),
    "tencent-Hy3.jinja": ("on",),
}
"""Templates with a switch of their own name, and what changes their prompt."""


SHOWS_THINKING = {
    "Cohere2MoE.jinja",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja",
    "Kimi-K2-Thinking.jinja",
    "Kimi-K3.jinja",
    "LFM2.5-8B-A1B.jinja",
    "MiniMax-M2.jinja",
    "MiniMax-M3.jinja",
    "openbmb-MiniCPM5-1B.jinja",
    "tencent-Hy3.jinja",
    "upstage-Solar-Open-100B.jinja",
    "Bielik-11B-v3.0-Instruct.jinja",
    "ByteDance-Seed-OSS.jinja",
    "GLM-4.6.jinja",
    "GLM-4.7-Flash.jinja",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja",
    "Qwen-Qwen3-0.6B.jinja",
    "Qwen3.5-4B.jinja",
    "Spark2.5.jinja",
    "StepFun3.5-Flash.jinja",
    "google-gemma-4-31B-it-interleaved.jinja",
    "google-gemma-4-31B-it.jinja",
    "inclusionai-ling-3.0-flash.jinja",
    "mistralai-Ministral-3-14B-Reasoning-2512.jinja",
    "muse-glimmer.jinja",
    "openai-gpt-oss-120b.jinja",
    "poolside-Laguna-S-2.1.jinja",
    "poolside-Laguna-XS-2.1.jinja",
    "poolside-Laguna-XS.2.jinja",
}
"""Templates that show the thinking before a call, among those whose calls are parsed."""


@pytest.fixture(scope="module", params=template_names())
def name(request: pytest.FixtureRequest) -> str:
    given: str = request.param
    return given


@pytest.fixture(scope="module")
def zoo(name: str, renders_here: None) -> Iterator[ChatTemplate]:
    made = ChatTemplate(template(name), "<s>", "</s>")
    yield made
    made.close()


def asked(zoo: ChatTemplate, conversation: str) -> Request | None:
    """The request as the engine gives it to the template; None for calls in a form that is not parsed."""
    if conversation in CONVERSATIONS:
        return Request("a", messages=CONVERSATIONS[conversation])
    return given(zoo.source, Request("a", messages=CALLED[conversation], tools=TOOLS))


def test_no_message_is_lost_and_none_refused(zoo: ChatTemplate, name: str) -> None:
    for conversation, messages in (CONVERSATIONS | CALLED).items():
        if (request := asked(zoo, conversation)) is None:
            continue
        text = rendered(zoo, request)
        hidden = [SYSTEM] if name in SYSTEM_WITH_THE_LAST_QUESTION and conversation in CALLED else []
        hidden += [each for each in messages if each.tool_calls] if name in CALLS_ALONE else []
        for each in messages:
            assert each.content in text or each in hidden, (conversation, each)
            for call in each.tool_calls:
                assert call.name in text, conversation


def test_thinking_is_switched_on_and_off_by_the_template_s_own_names(zoo: ChatTemplate, name: str) -> None:
    plain_request = Request("a", messages=(SYSTEM, ASKED))
    modes: dict[ReasoningMode, bool] = {"on": True, "off": False}
    for mode, is_on in modes.items():
        by_hand = {"enable_thinking": is_on, "thinking": is_on}
        switched = rendered(zoo, attrs.evolve(plain_request, reasoning=mode))
        if name in SWITCHED:
            assert (switched != rendered(zoo, plain_request)) == (mode in SWITCHED[name]), mode
        else:
            assert switched == rendered(zoo, attrs.evolve(plain_request, chat_template_kwargs=by_hand)), mode


def test_thinking_of_an_earlier_turn_reaches_a_template_that_reads_it(zoo: ChatTemplate, name: str) -> None:
    request = asked(zoo, "thought before a call")
    if request is not None:
        assert ("I must look." in rendered(zoo, request)) == (name in SHOWS_THINKING)


def test_an_answer_that_has_begun_is_gone_on_with(zoo: ChatTemplate) -> None:
    marks = thinking_of(zoo.source)
    modes: tuple[ReasoningMode | None, ...] = (None, "on", "off")
    for reasoning, answer in product(modes, (SAID, THOUGHT, Message("assistant", "", reasoning="Bern is"))):
        request = Request("a", messages=(SYSTEM, ASKED), reasoning=reasoning)
        head = rendered(zoo, request)
        prompt = rendered(zoo, attrs.evolve(request, messages=(SYSTEM, ASKED, answer)))
        assert prompt.startswith(head[: head.index(ASKED.content)]), (reasoning, answer)
        if answer.content or marks:
            assert prompt.endswith(answer.content or answer.reasoning or ""), (reasoning, answer)
        if marks is not None:
            behind = prompt[prompt.index(ASKED.content) :]
            assert (behind.rfind(marks.open) > behind.rfind(marks.close)) == (not answer.content), (reasoning, answer)
            assert (answer.reasoning or "") in behind, (reasoning, answer)


@pytest.mark.usefixtures("renders_here")
@pytest.mark.parametrize("conversation", CALLED)
def test_gemma_4_s_first_templates_show_results_as_its_later_ones_do(conversation: str) -> None:
    """The first ones read them only as part of the message with the calls."""
    shown = []
    for each in ("google-gemma-4-31B-it-interleaved.jinja", "google-gemma-4-31B-it.jinja"):
        with closing(ChatTemplate(template(each), "<bos>", "<eos>")) as gemma:
            request = Request("a", messages=CALLED[conversation], tools=TOOLS, reasoning="on")
            shown.append(rendered(gemma, request).partition("<|turn>model\n")[2].replace("\n<channel|>", "<channel|>"))
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    ("name", "messages", "end"),
    [
        ("google-gemma-4-31B-it.jinja", CALLED["text beside a call"], "<turn|>\n<|turn>model\n"),
        ("google-gemma-4-31B-it.jinja", CALLED["two results"], "<tool_response|>"),
        ("Reka-Edge.jinja", (SYSTEM, ASKED, SAID), "<sep>assistant: <think>\n"),
    ],
)
def test_an_answer_is_begun_behind_every_turn_that_is_closed(
    name: str, messages: tuple[Message, ...], end: str
) -> None:
    """Also where the template begins none, as Reka's does behind a message of the assistant's."""
    with closing(ChatTemplate(template(name), "<bos>", "<eos>")) as zoo:
        request = Request("a", messages=messages, reasoning="on", continue_final_message=False)
        assert rendered(zoo, request).endswith(end)
