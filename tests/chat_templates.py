"""Chat templates of each family's published form, written for these tests, and what a model of the family writes.

Each template renders a conversation with two calls so that `WRITTEN` stands in it: the calls `weather(PARIS)` and
`add(SUM)`. Marks stand in one piece here; in a model's vocabulary many of them are one token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from jinja2 import Template

from uma.chat.families import Family
from uma.engine.intake import rendering
from uma.llama.sandbox import compiled, rendered
from uma.llama.template import ChatTemplate

PARIS, SUM = '{"city": "Paris", "note": "a \\"b\\" }"}', '{"a": 1, "b": [2, {"c": null}]}'
ONE = '{"name": "weather", "arguments": ' + PARIS + "}"
TWO = '{"name": "add", "arguments": ' + SUM + "}"
TOOLS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "note": {"type": "string"}}},
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}},
}

_EACH_TOOL = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
_CALLS = "{% for c in m.tool_calls or [] %}{% set name = c.function.name %}{% set args = c.function.arguments %}"
_INST = "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{% endif %}"
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "CALL{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
HERMES_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\\n' if not loop.first }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
"""Calls of the message `m`, as Hermes and Qwen write them."""
_THINK = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}"


def _chatml(call: str) -> str:
    return _EACH_TOOL + _CHATML.replace("CALL", call) + _THINK


_DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<\uff5cUser\uff5c>{{ m.content }}"
    "{% elif m.role == 'tool' %}<\uff5ctool\u2581output\u2581begin\uff5c>{{ m.content }}"
    "<\uff5ctool\u2581output\u2581end\uff5c>{% elif m.content is none %}<\uff5cAssistant\uff5c>"
    "<\uff5ctool\u2581calls\u2581begin\uff5c>" + _CALLS + "<\uff5ctool\u2581call\u2581begin\uff5c>CALL"
    "<\uff5ctool\u2581call\u2581end\uff5c>{% endfor %}<\uff5ctool\u2581calls\u2581end\uff5c>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}<\uff5cAssistant\uff5c>"
)
_GEMMA_VALUES = (
    "{% macro value(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is mapping %}{{ '{' }}"
    "{% for k, each in v | dictsort %}{{ ',' if not loop.first }}{{ k }}:{{ value(each) }}{% endfor %}{{ '}' }}"
    "{% elif v is sequence %}[{% for each in v %}{{ ',' if not loop.first }}{{ value(each) }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)


def _gemma(turn: str, opening: str, closing: str, quote: str) -> str:
    return (
        _GEMMA_VALUES.replace("QUOTE", quote)
        + _EACH_TOOL
        + (
            "{% for m in messages %}"
            + turn
            + "{{ m.role }}\n{{ m.content }}"
            + _CALLS
            + opening
            + "call:{{ name }}{{ value(args) }}"
            + closing
            + "{% endfor %}\n{% endfor %}"
            + turn
            + "model\n"
        )
    )


TEMPLATES = {
    "hermes": _chatml(
        '{{ \'\\n\' }}<tool_call>\n{"name": "{{ name }}", "arguments": {{ args | tojson }}}\n</tool_call>'
    ),
    "mistral": (
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
        + _INST
        + "{% if m.tool_calls %}[TOOL_CALLS]["
        "{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}]{% endif %}'
        "{% endfor %}"
    ),
    "mistral-args": (
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
        + _INST
        + _CALLS
        + "[TOOL_CALLS]{{ name }}[ARGS]{{ args | tojson }}{% endfor %}"
        "{% endfor %}{# [THINK] … [/THINK] #}"
    ),
    "llama3": (
        _EACH_TOOL + "{% for m in messages %}{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>"
        "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '; ' if not loop.first }}"
        '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}{% endfor %}'
    ),
    "granite": (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% if m.tool_calls %}<|tool_call|>["
        "{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}]{% endif %}'
        "{% endfor %}"
    ),
    "phi": (
        "<|tool|>{{ tools | tojson }}<|/tool|>{% for m in messages %}{{ m.content }}{% if m.tool_calls %}<|tool_call|>["
        "{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}]<|/tool_call|>'
        "{% endif %}{% endfor %}"
    ),
    "deepseek-v3": _DEEPSEEK.replace(
        "CALL", "function<\uff5ctool\u2581sep\uff5c>{{ name }}\n```json\n{{ '' + c.function.arguments }}\n```"
    ).replace(
        "{% endfor %}<\uff5ctool\u2581calls\u2581end",
        "{{ '\n' if not loop.last }}{% endfor %}<\uff5ctool\u2581calls\u2581end",
    ),
    "deepseek-v3.1": _DEEPSEEK.replace("CALL", "{{ name }}<\uff5ctool\u2581sep\uff5c>{{ args | tojson }}")
    + "{% if thinking %}<think>{% else %}</think>{% endif %}",
    "qwen3-coder": _chatml(
        "{{ '\\n' }}<tool_call>\n<function={{ name }}>\n{% for key, value in args.items() %}<parameter={{ key }}>\n"
        "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    "glm-4": (
        _EACH_TOOL
        + "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
        + _CALLS
        + "{{ '\\n' }}<tool_call>{{ name }}\n{% for key, value in args.items() %}<arg_key>{{ key }}</arg_key>\n"
        "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>"
        "{% endfor %}{% endfor %}<|assistant|>" + _THINK
    ),
    "gemma": _gemma("<start_of_turn>", "<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma-4": _gemma("<|turn>", "<|tool_call>", "<tool_call|>", '<|"|>') + "{# <|channel>thought\n<channel|> #}",
    "harmony": (
        "<|start|>developer<|message|># Tools\n\nnamespace functions { {% for tool in tools or [] %}"
        "type {{ tool.function.name }} = any;{% endfor %} }<|end|>{% for m in messages %}"
        "{% if m.tool_calls %}"
        + _CALLS
        + "<|start|>assistant to=functions.{{ name }}<|channel|>commentary json<|message|>"
        "{{ args | tojson }}<|call|>{% endfor %}{% elif m.role == 'assistant' %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% else %}"
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
    ),
    "generic": "{% for message in messages %}{{ message.content }}{% endfor %}",
}

WRITTEN = {
    "hermes": f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>",
    "mistral": f"[TOOL_CALLS][{ONE}, {TWO}]",
    "mistral-args": f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]add[ARGS]{SUM}",
    "llama3": f"{ONE}; {TWO}".replace("arguments", "parameters"),
    "granite": f"<|tool_call|>[{ONE}, {TWO}]",
    "phi": f"<|tool_call|>[{ONE}, {TWO}]<|/tool_call|>",
    "deepseek-v3": (
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>"
        f"weather\n```json\n{PARIS}\n```<\uff5ctool\u2581call\u2581end\uff5c>\n<\uff5ctool\u2581call\u2581begin\uff5c>"
        f"function<\uff5ctool\u2581sep\uff5c>add\n```json\n{SUM}\n```<\uff5ctool\u2581call\u2581end\uff5c>"
        "<\uff5ctool\u2581calls\u2581end\uff5c>"
    ),
    "deepseek-v3.1": (
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>weather<\uff5ctool\u2581sep\uff5c>"
        f"{PARIS}<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>add"
        f"<\uff5ctool\u2581sep\uff5c>{SUM}<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>"
    ),
    "qwen3-coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=note>\n"
        'a "b" }\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>\n1\n'
        '</parameter>\n<parameter=b>\n[2, {"c": null}]\n</parameter>\n</function>\n</tool_call>'
    ),
    "glm-4": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>note</arg_key>\n"
        '<arg_value>a "b" }</arg_value>\n</tool_call>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n'
        '<arg_key>b</arg_key>\n<arg_value>[2, {"c": null}]</arg_value>\n</tool_call>'
    ),
    "gemma": (
        '<start_function_call>call:weather{city:<escape>Paris<escape>,note:<escape>a "b" }<escape>}<end_function_call>'
        "<start_function_call>call:add{a:1,b:[2,{c:null}]}<end_function_call>"
    ),
    "gemma-4": (
        '<|tool_call>call:weather{city:<|"|>Paris<|"|>,note:<|"|>a "b" }<|"|>}<tool_call|>'
        "<|tool_call>call:add{a:1,b:[2,{c:null}]}<tool_call|>"
    ),
    "harmony": (
        f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{PARIS}<|call|>"
        f"<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{SUM}<|call|>"
    ),
    "generic": f"{ONE}\n{TWO}",
}
"""Both calls, as the template shows them and as the model writes them."""


class RendersHere:
    """`RenderProcesses` without processes: to start one for a template takes longer than all that is rendered by it."""

    def __init__(self, setup: list[str]) -> None:
        self._source, *self._tokens = setup
        self._template: Template | None = None

    def start(self) -> None:
        pass

    def render(self, conversation: dict[str, Any]) -> str:
        self._template = self._template or compiled(self._source)
        return rendered(self._template, json.loads(json.dumps(conversation)), *self._tokens)

    def close(self) -> None:
        pass


@contextmanager
def rendering_here() -> Iterator[None]:
    """A block in which templates are made that are rendered in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uma.llama.template.RenderProcesses", RendersHere)
        yield


@cache
def family_of(source: str) -> Family | str:
    """How calls are written, as a template shows it."""
    with rendering_here():
        return rendering.family_of(ChatTemplate(source, "", ""))
