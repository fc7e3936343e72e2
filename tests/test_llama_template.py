"""Claims about chat templates: what models' own templates may use, and what a broken or hostile one cannot do."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from models import CHATML, write_model
from uma.errors import TemplateError
from uma.llama.model import Model
from uma.llama.template import ChatTemplate
from uma.types import Message

TALK = (Message("system", "Be brief."), Message("user", "Hi!"), Message("assistant", "Hello."), Message("user", "Bye"))


def render(source: str | None, messages: tuple[Message, ...] = TALK, bos: str = "<s>", eos: str = "</s>") -> str:
    return ChatTemplate(source, bos, eos).render(messages)


def refusal(source: str, messages: tuple[Message, ...] = TALK) -> str:
    with pytest.raises(TemplateError) as caught:
        render(source, messages)
    return caught.value.message


def test_a_model_without_a_template_gets_the_plain_one() -> None:
    assert render(None) == "System: Be brief.\n\nUser: Hi!\n\nAssistant: Hello.\n\nUser: Bye\n\nAssistant:"
    assert not ChatTemplate(None, "", "").is_own


def test_a_template_of_the_models_own_is_used() -> None:
    assert render(CHATML, TALK[1:2]) == "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(CHATML, "", "").is_own


def test_a_llama_style_template_renders_as_its_authors_meant() -> None:
    source = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (('<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n') if loop.first and system else '') }}
        {{- message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
    expected = "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi! [/INST] Hello.</s>[INST] Bye [/INST]"
    assert render(source) == expected
    assert "refuses them: Roles must alternate" in refusal(source, (TALK[1], TALK[1]))


def test_blocks_leave_no_blank_lines() -> None:
    assert render(
        "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n", TALK[:2]
    ) == ("system\nuser\n")


def test_names_that_hugging_face_templates_expect_are_there() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().astimezone().year)
    assert json.loads(render("{{ messages | tojson }}")) == [{"role": m.role, "content": m.content} for m in TALK]
    assert render("{{ {'b': '<ä>', 'a': 1} | tojson }}") == '{"b": "<ä>", "a": 1}'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'
    assert render("{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }} {% endfor %}") == (
        "system user "
    )
    assert render("{% generation %}{{ bos_token }}{% endgeneration %}x") == "<s>x"
    assert render("{% if tools is none and not custom_tools is defined %}yes{% endif %}") == "yes"
    assert render(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    ) == ("4")
    assert render("{% for i in range(3) %}{{ i }}{% endfor %}") == "012"
    assert render("{{ '=' * 5 }}{{ 2 ** 8 }}") == "=====256"


def test_nothing_is_escaped() -> None:
    assert render("{{ messages[0].content }}", (Message("user", "<b> & \"'"),)) == "<b> & \"'"


def test_a_broken_template_is_named_with_its_line() -> None:
    assert refusal("line one\n{% for m in messages %}\n{{ m.role }").startswith(
        "messages: the model's chat template is broken: line 3: "
    )
    assert "line 2: Encountered unknown tag 'nonsense'" in refusal("\n{% nonsense %}")


def test_a_failing_template_is_named_with_its_line() -> None:
    assert "fails in line 2: 'dict object' has no attribute 'x'" in refusal("\n{{ messages[0].x.y }}")
    assert "fails in line 1: " in refusal("{{ 1 // 0 }}{{ messages[0].content }}")
    assert "fails in line 3: " in refusal("\n\n{{ messages[99]['content'] }}")
    assert "fails in line 1: " in refusal("{{ messages[0].content + 1 }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ raise_exception.__globals__.items() }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    assert "chat template fails" in refusal(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000000000) %}x{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 100000000000 }}",
        "{{ 100000000000 * [messages] }}",
        "{{ 9 ** 999999999 }}",
        "{{ 9 ** 1000 ** 1000 ** 1000 }}",
        "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
        "{{ lipsum(100000000) }}",
    ],
)
def test_a_template_cannot_run_or_write_without_end(source: str) -> None:
    assert "chat template fails" in refusal(source)


def test_each_rendering_has_its_own_bound() -> None:
    template = ChatTemplate("{% for i in range(600000) %}{% endfor %}ok", "", "")
    assert [template.render(TALK), template.render(TALK)] == ["ok", "ok"]


@pytest.mark.parametrize("own_bos", [True, False])
def test_the_beginning_of_text_is_never_doubled_and_never_missing(tmp_path: Path, own_bos: bool) -> None:
    source = ("{{ bos_token }}" if own_bos else "") + CHATML
    with Model.load(write_model(tmp_path / "tiny.gguf", chat_template=source)) as model:
        text = model.chat_template.render(TALK)
        tokens = model.vocab.tokenize(text, add_special=model.chat_template.needs_bos(text), parse_special=True)
        assert tokens.tolist().count(model.vocab.bos) == 1
        assert tokens[0] == model.vocab.bos


def test_a_broken_template_does_not_stop_the_model_from_loading(tmp_path: Path) -> None:
    with Model.load(write_model(tmp_path / "tiny.gguf", chat_template="{% if %}")) as model:
        assert model.info.has_chat_template
        with pytest.raises(TemplateError, match="broken: line 1"):
            model.chat_template.render(TALK)
