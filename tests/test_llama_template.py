"""Claims about chat templates: what models' own templates may use, and what a broken or hostile one cannot do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from reference import template

from harness import PATIENCE_SEC
from models import CHATML, write_model
from uma.errors import TemplateError
from uma.llama.model import Model
from uma.llama.template import PLAIN_TEMPLATE, ChatTemplate
from uma.types import Message, Tool, ToolCall

TALK = (Message("system", "Be brief."), Message("user", "Hi!"), Message("assistant", "Hello."), Message("user", "Bye"))


def render(source: str | None, messages: tuple[Message, ...] = TALK, bos: str = "<s>", eos: str = "</s>") -> str:
    template = ChatTemplate(source, bos, eos)
    try:
        return template.render(messages)
    finally:
        template.close()


def refusal(source: str, messages: tuple[Message, ...] = TALK) -> str:
    with pytest.raises(TemplateError) as caught:
        render(source, messages)
    return caught.value.message


def test_a_model_without_a_template_of_its_own_gets_the_plain_one() -> None:
    assert render(None) == "System: Be brief.\n\nUser: Hi!\n\nAssistant: Hello.\n\nUser: Bye\n\nAssistant:"
    assert render(CHATML, TALK[1:2]) == "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    assert (ChatTemplate(None, "", "").is_own, ChatTemplate(CHATML, "", "").is_own) == (False, True)


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("{% if on is defined and not on %}{{ messages[0].off }}{% endif %}", {"on", "messages"}),
        ("{% set on = on | default(true) %}{{ on }}", {"on"}),
        ("{% if not on is defined %}{% set on = false %}{% endif %}{{ on }}", {"on"}),
        ("{% set on = true %}{% for off in messages %}{{ on ~ off }}{% endfor %}", {"messages"}),
        ("{% if", set()),
    ],
)
def test_what_a_template_is_told_from_outside_is_known(source: str, variables: set[str]) -> None:
    assert ChatTemplate(source, "", "").variables == variables


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
    assert "refuses them: Roles must alternate" in refusal(source, (TALK[2], TALK[1]))


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
    assert render("{{ messages[0].content }}", (Message("user", "<b> & \"'"),)) == "<b> & \"'", "nothing is escaped"
    blocks = "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n"
    assert render(blocks, TALK[:2]) == "system\nuser\n", "blocks leave no blank lines"


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("meta-llama-Llama-3.1-8B-Instruct.jinja", "Today Date: %d %b %Y"),
        ("meta-llama-Llama-3.2-3B-Instruct.jinja", "Today Date: %d %b %Y"),
        ("meta-llama-Llama-3.3-70B-Instruct.jinja", "Today Date: %d %b %Y"),
        ("fireworks-ai-llama-3-firefunction-v2.jinja", "%b %d %Y"),
    ],
)
def test_a_model_is_told_the_date_of_today(name: str, form: str) -> None:
    before = datetime.now().astimezone()
    text = render(template(name), TALK)
    assert any(each.strftime(form) in text for each in (before, datetime.now().astimezone()))


def test_a_broken_or_failing_template_is_named_with_its_line() -> None:
    broken = refusal("line one\n{% for m in messages %}\n{{ m.role }")
    assert broken.startswith("messages: the model's chat template is broken: line 3: ")
    assert "line 2: Encountered unknown tag 'nonsense'" in refusal("\n{% nonsense %}")
    assert "fails in line 2: 'dict object' has no attribute 'x'" in refusal("\n{{ messages[0].x.y }}")
    assert "fails in line 1: " in refusal("{{ 1 // 0 }}{{ messages[0].content }}")
    assert "fails in line 3: " in refusal("\n\n{{ messages[99]['content'] }}")
    assert "fails in line 1: " in refusal("{{ messages[0].content + 1 }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.clear() }}",
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


GROWS = "{% set ns = namespace(x='x') %}{% for m in messages %}LOOP{% endfor %}{{ ns.x | length }}"


@pytest.mark.parametrize(
    "source",
    [
        GROWS.replace("LOOP", "{% set ns.x = ns.x ~ ns.x %}"),
        GROWS.replace("LOOP", "{% set ns.x = ns.x + ns.x %}"),
        GROWS.replace("LOOP", "{% set ns.x = ns.x | replace('x', 'xxxx') %}"),
        GROWS.replace("LOOP", "{% set ns.x = [ns.x, ns.x] | join %}"),
        "{{ 'x' | center(10000000000) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '{:10000000000}'.format(1) }}",
    ],
)
def test_no_template_and_no_conversation_takes_the_memory(source: str) -> None:
    talk = tuple(Message("user", str(number)) for number in range(3_000))
    assert "chat template fails" in refusal(source, talk)


def test_after_a_rendering_that_was_killed_the_next_one_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uma.llama.render_process.DEADLINE_SEC", 0.2)
    source = (
        "{% if messages[0].content == 'slow' %}{% for a in messages %}{% for b in messages %}{% for c in messages %}"
    )
    source += "{% endfor %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(source, "", "")
    with pytest.raises(TemplateError, match=r"takes longer than 0\.2 s"):
        template.render([Message("user", "slow")] * 1_000)
    assert template.render([Message("user", "quick")] * 1_000) == "quick"
    template.close()


def test_each_rendering_has_a_bound_of_its_own() -> None:
    template = ChatTemplate("{% for i in range(600000) %}{% endfor %}{{ messages[0].content }}", "", "")
    assert template.render(TALK) == template.render(TALK) == "Be brief."
    template.close()


def test_a_child_process_that_was_killed_is_told_of_and_replaced() -> None:
    with child_of(ChatTemplate("{% set x = 1 %}{{ messages[0].content }}", "", "")) as (template, child):
        child.kill()
        child.wait(PATIENCE_SEC)
        with pytest.raises(TemplateError, match="its process ended"):
            template.render(TALK)
        assert template.render(TALK) == "Be brief."


def test_no_child_process_is_left_behind() -> None:
    with child_of(ChatTemplate("{% set x = 1 %}{{ messages[0].content }}", "", "")) as (template, child):
        template.close()
        assert not child.is_running()
        with pytest.raises(TemplateError, match="model is closed"):
            template.render(TALK)


@contextmanager
def child_of(template: ChatTemplate) -> Iterator[tuple[ChatTemplate, psutil.Process]]:
    """A template that has rendered, and its child process."""
    before = set(psutil.Process().children())
    assert template.render(TALK) == "Be brief."
    (child,) = set(psutil.Process().children()) - before
    try:
        yield template, child
    finally:
        template.close()


@pytest.mark.parametrize(
    ("source", "is_cheap"),
    [
        (PLAIN_TEMPLATE, True),
        (CHATML, True),
        ("{{ bos_token }}{% for m in messages %}{% if loop.first %}{{ m.role | upper }}{% endif %}{% endfor %}", True),
        ("{{ messages[0]['content'] + eos_token }}", True),
        ("{% for m in messages %}{{ messages[0].role }}{{ m.content }}{% endfor %}{{ messages[0].content }}", True),
        ("{% for m in messages %}{{ messages[0].content }}{% endfor %}", False),
        ("{% for m in messages %}{% if messages[0]['content'] == m.content %}x{% endif %}{% endfor %}", False),
        ("{% for m in messages %}{{ (m.content + messages[-1]['content']) | trim }}{% endfor %}", False),
        pytest.param("{% for m in messages %}" + 10_000 * "x" + "{% endfor %}", False, id="a long text for each"),
        ("{{ messages }}", False),
        ("{% for m in messages %}{{ messages }}{% endfor %}", False),
        ("{% for m in messages %}{{ messages | length }}{% endfor %}", False),
        ("{% for m in messages %}{% for c in m.content %}x{% endfor %}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content * 1000 }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content | center(100000) }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content | replace('', m.content) }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content.replace('', m.content) }}{% endfor %}", False),
        ("{% set x = messages[0].content %}{{ x }}", False),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", False),
        ("{% for i in range(1000000) %}x{% endfor %}", False),
        ("{% for loop in messages %}{{ loop.content }}{% endfor %}", False),
    ],
)
def test_what_is_rendered_in_this_process_takes_time_in_proportion_to_the_conversation(
    source: str, is_cheap: bool
) -> None:
    template = ChatTemplate(source, "", "")
    assert template.is_cheap == is_cheap
    assert ChatTemplate("{% set x = 1 %}" + source, "", "").is_cheap is False


def test_both_ways_to_render_give_the_same() -> None:
    talk = (*TALK, Message("user", "ä\u2028 \U0001f600 {{ 1 }}\n"))
    for source in (PLAIN_TEMPLATE, CHATML):
        assert render(source, talk) == render("{% set x = 1 %}" + source, talk)


def test_tools_that_a_cheap_template_does_not_read_start_no_process_for_it() -> None:
    before, template = set(psutil.Process().children()), ChatTemplate(CHATML, "", "")
    assert template.render(TALK, [Tool("now")]) == template.render(TALK)
    assert set(psutil.Process().children()) <= before
    template.close()


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


STRICT = "google-gemma-2-2b-it.jinja"
"""A template that takes no system message, and demands that roles alternate."""


def test_messages_that_a_strict_template_refuses_are_merged_with_their_neighbours() -> None:
    said = Message("assistant", "Hello.")
    text = render(template(STRICT), (TALK[0], TALK[1], Message("user", "Are you there?"), said, TALK[3]))
    assert "<start_of_turn>user\nBe brief.\nHi!\n\nAre you there?<end_of_turn>" in text
    assert "Conversation roles must alternate" in refusal(template(STRICT), (said, TALK[1]))


def test_a_conversation_that_is_merged_keeps_its_beginning() -> None:
    turns = (*TALK, Message("user", "Please."), Message("system", "Say no more."), *TALK[2:])
    for end in (2, 4, 5, 6):
        before = render(template(STRICT), turns[:end]).rpartition("<end_of_turn>")[0]
        assert render(template(STRICT), turns).startswith(before)


def test_a_system_message_that_a_template_would_leave_out_is_the_users() -> None:
    first_alone = "{{ messages[0].content }}{% for m in messages[1:] %}{% if m.role != 'system' %}|{{ m.content }}"
    source = first_alone + "{% endif %}{% endfor %}"
    assert render(source, (*TALK, Message("system", "Now in French."))) == "Be brief.|Hi!|Hello.|Bye|Now in French."
    none_at_all = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}|{% endif %}{% endfor %}"
    assert render(none_at_all, TALK[:2]) == "Be brief.\nHi!|"


def test_ids_of_calls_are_what_mistral_takes() -> None:
    call = ToolCall("toolu_01A09q90qw90lq917835lq9", "weather", "{}")
    turns = (TALK[1], Message("assistant", "", (call,)), Message("tool", "Rain.", (), call.id), TALK[3])
    text = render(template("mistralai-Mistral-Nemo-Instruct-2407.jinja"), turns)
    (id,) = re.findall(r'"id": "([a-zA-Z0-9]{9})"', text)
    assert f'"call_id": "{id}"' in text
    assert "Rain." in text
    assert "Bye" in text


def test_parallel_calls_come_one_by_one_where_a_template_takes_no_others() -> None:
    calls = tuple(ToolCall(str(at), f"tool_{at}", "{}") for at in range(2))
    results = tuple(Message("tool", f"result {call.id}", (), call.id) for call in calls)
    turns = (TALK[1], Message("assistant", "", calls), *results)
    text = render(template("meta-llama-Llama-3.1-8B-Instruct.jinja"), turns)
    places = [text.index(each) for each in ("tool_0", "result 0", "tool_1", "result 1")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja", "llama-cpp-deepseek-r1.jinja"])
def test_a_template_that_asks_for_tools_is_content_with_none(name: str) -> None:
    assert "Bye" in render(template(name), TALK)
