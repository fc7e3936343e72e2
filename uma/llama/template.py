"""Chat templates: render a conversation as the text that the model was trained on.

A template is a program in a model file. If it is provably cheap, as most plain ones are, it is rendered in this
process. Any other is rendered by a child process that is killed when it takes too long, so no template and no
conversation can delay more than its own request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
from jinja2 import Template, meta, nodes

from uma import json_text
from uma.errors import TemplateError
from uma.llama.fitting import described, forms_of, one_system, without_system
from uma.llama.render_process import RenderProcesses
from uma.llama.sandbox import RefusedError, UnusableError, compiled, environment, rendered
from uma.types import EFFORT_NAMES, EFFORTS, Message, Tool

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] | trim }}\n\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Template for models without one: `User: …`, a blank line, `Assistant: …`, and so on, ending with `Assistant:`."""
PLAIN_TURN = "\nUser:"
"""Beginning of the next turn in the plain template: a model that writes it would go on with both sides of the
conversation."""


class ChatTemplate:
    """A model's chat template, or the plain one where `source` is None. Safe to use from several threads."""

    def __init__(self, source: str | None, bos: str, eos: str) -> None:
        self.is_own = source is not None
        self.source = PLAIN_TEMPLATE if source is None else source
        self.bos = bos
        self.eos = eos
        self._processes = RenderProcesses([self.source, bos, eos])
        self._shown: dict[tuple[Message, ...], bool] = {}

    @cached_property
    def is_cheap(self) -> bool:
        """Whether `render` takes time in proportion to the conversation, and can be called where nothing may block."""
        return is_provably_cheap(self.source)

    def start(self) -> None:
        """Start the child process, if one will be needed, so that the first rendering does not wait for it."""
        if not self.is_cheap:
            self._processes.start()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        switches: Mapping[str, Any] | None = None,
        *,
        opens_answer: bool = True,
    ) -> str:
        """Render the conversation, ready for the assistant's answer unless `opens_answer` is false. `tools` and the
        calls of messages have Hugging Face's form; `switches` are the template's own variables, such as
        `enable_thinking`. Messages that the template refuses are given to it in the form that it expects
        (`fitting.forms_of`), where there is one.

        Raises `TemplateError` with the reason (and line) where the template is broken, takes too long, or refuses these
        messages, and `Overloaded` where the machine is too busy. Unless the template `is_cheap`, and there are no
        `tools` that it reads, this waits for a child process: at most `render_process.DEADLINE_SEC` of CPU time for
        each form. If `render_process.RENDERERS` other threads are rendering, it first waits for one of them.
        """
        messages = self._visible(messages)
        try:
            return self._fitted(messages, tools, switches or {}, opens_answer=opens_answer)
        except TemplateError:
            if not tools:
                raise
            tools = [described(tool) for tool in tools]
            return self._fitted(messages, tools, switches or {}, opens_answer=opens_answer)

    def _fitted(
        self, messages: Sequence[Message], tools: Sequence[Tool], switches: Mapping[str, Any], *, opens_answer: bool
    ) -> str:
        refusal: RefusedError | None = None
        for form in forms_of(messages):
            try:
                text = self._rendered(form, tools, switches, opens_answer=opens_answer)
                return text + self._opening(text, form, tools, switches) if opens_answer else text
            except RefusedError as error:
                refusal = refusal or error
            except UnusableError as error:
                raise _template_error(error) from error.__cause__
        assert refusal is not None
        raise _template_error(refusal)

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Tool], switches: Mapping[str, Any], *, opens_answer: bool
    ) -> str:
        conversation = {
            "messages": _turns(messages, self._traits),
            "tools": [_function(tool) for tool in tools] or None,
            "switches": dict(switches),
            "opens_answer": opens_answer,
        }
        # (A template that ignores tools stays cheap with them, and each start renders with tools to derive its calls.)
        if self.is_cheap and not (tools and "tools" in self.variables):
            return rendered(self._template, conversation, self.bos, self.eos)
        return self._processes.render(conversation)

    def _opening(
        self, text: str, messages: Sequence[Message], tools: Sequence[Tool], switches: Mapping[str, Any]
    ) -> str:
        """Beginning of an answer, where the template closes the last message without opening one, such as Gemma 4's
        after a text with calls and their results.
        """
        if not self._user_end or not text.endswith(self._user_end):
            return ""
        if text != self._rendered(messages, tools, switches, opens_answer=False):
            return ""
        asked = self._rendered(_QUESTION, (), switches, opens_answer=False)
        return self._rendered(_QUESTION, (), switches, opens_answer=True).removeprefix(asked)

    @cached_property
    def _user_end(self) -> str:
        """Text that the template writes behind a user's message, before it opens an answer; empty where the two cannot
        be told apart.
        """
        try:
            asked = self._rendered(_QUESTION, (), {}, opens_answer=False)
            opened = self._rendered(_QUESTION, (), {}, opens_answer=True)
        except UnusableError:
            return ""
        end = asked.partition(_QUESTION[0].content)[2]
        return end if opened.startswith(asked) and not opened.endswith(end) else ""

    def _visible(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The conversation without system messages in places where the template would silently drop them."""
        places = [at for at, message in enumerate(messages) if message.role == "system"]
        if places and places != [0] and not self._shows(_SYSTEMS):
            messages = one_system(messages)
        if places[:1] == [0] and not self._shows(_SYSTEMS[:2]):
            messages = without_system(messages)
        return messages

    def _shows(self, messages: tuple[Message, ...]) -> bool:
        """Whether the rendered text contains each system message, provided that it contains the other messages; True
        where the template refuses the messages.
        """
        if messages not in self._shown:
            try:
                text = self._rendered(messages, (), {}, opens_answer=True)
                self._shown[messages] = {message.role for message in messages if message.content not in text} != {
                    "system"
                }
            except UnusableError:
                self._shown[messages] = True
        return self._shown[messages]

    def close(self) -> None:
        """End the child processes for good, whatever they are rendering. Harmless when repeated."""
        self._processes.close()

    @cached_property
    def _traits(self) -> _TemplateTraits:
        return _traits_of(self.source)

    @cached_property
    def _template(self) -> Template:
        return compiled(self.source)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads without setting them itself; none where it is broken."""
        try:
            return frozenset(meta.find_undeclared_variables(environment().parse(self.source)))
        except Exception:  # noqa: BLE001  (whatever is wrong is told by `render`)
            return frozenset()

    @cached_property
    def switches(self) -> frozenset[str]:
        """Names among `variables` that a request can set: without those that every conversation has, and those that the
        template only sets itself.
        """
        tree = _tree_of(self.source)
        if tree is None:
            return frozenset()
        own = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
        asked: list[nodes.Node | None] = [
            test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined", "none")
        ]
        asked += [filtered.node for filtered in tree.find_all(nodes.Filter) if filtered.name in ("default", "d")]
        optional = {question.name for question in asked if isinstance(question, nodes.Name)}
        return self.variables - (own - optional) - _GIVEN

    @cached_property
    def efforts(self) -> tuple[str, ...]:
        """Values that the template accepts for reasoning effort, the lowest first; none without such a variable."""
        names, tree = self.switches & set(EFFORT_NAMES), _tree_of(self.source)
        if not names or tree is None:
            return ()
        checks = (
            check.ops[0].expr
            for check in tree.find_all(nodes.Compare)
            if isinstance(check.expr, nodes.Name) and check.expr.name in names and check.ops[0].op == "notin"
        )
        for taken in checks:
            if isinstance(taken, nodes.List | nodes.Tuple):
                words = {item.value for item in taken.items if isinstance(item, nodes.Const)}
                return (*sorted(words - set(EFFORTS)), *(effort for effort in EFFORTS if effort in words))
        return EFFORTS[1:]

    def needs_bos(self, rendered: str) -> bool:
        """Whether the tokenizer must add the beginning of text, because the template did not write it."""
        return not (self.bos and rendered.startswith(self.bos))


_GIVEN = frozenset(
    ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "range", "raise_exception", "strftime_now")
)
"""Variables that every conversation has."""
_SYSTEMS = tuple(
    Message(role, f"UMA looks for text {number}")
    for number, role in enumerate(("system", "user", "assistant", "system", "user"))
)
"""Conversation with a system message in the middle, to see what a template leaves out."""
_QUESTION = (_SYSTEMS[1],)
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
"""Keys of a message in which templates expect the thinking of an earlier turn, the most common first."""


def _template_error(error: UnusableError) -> TemplateError:
    return TemplateError.at("messages", f"the model's chat template {error}")


def _tree_of(source: str) -> nodes.Template | None:
    try:
        return environment().parse(source)
    except Exception:  # noqa: BLE001  (whatever is wrong is told by `render`)
        return None


@attrs.frozen
class _TemplateTraits:
    """A template's expectations where Hugging Face's format leaves a choice."""

    arguments_as_text: bool = False
    """Whether calls' arguments must be text, because the template joins them with `+`."""
    no_content_is_none: bool = False
    """Whether the content of a message with nothing but calls must be None."""
    thought_key: str | None = None
    """Key of a message in which it expects the thinking of an earlier turn."""
    thought_is_a_part: bool = False
    """Whether it expects that thinking as a part of the content, of type `thinking`."""
    takes_thought_or_content: bool = False
    """Whether a message with calls can have thinking or content, but not both."""
    results_are_with_calls: bool = False
    """Whether it expects results of calls as `tool_responses` of the message with the calls, and not as messages, as
    the first templates of Gemma 4 do."""


def _traits_of(source: str) -> _TemplateTraits:
    tree = _tree_of(source)
    if tree is None:
        return _TemplateTraits()
    added = {_key_of(side) for add in tree.find_all(nodes.Add) for side in (add.left, add.right)}
    written = {
        _key_of(filtered.node)
        for filtered in tree.find_all(nodes.Filter)
        if filtered.name == "tojson" and filtered.node
    }
    tested = (test.node for test in tree.find_all(nodes.Test) if test.name == "none")
    keys = {_key_of(access) for access in tree.find_all((nodes.Getattr, nodes.Getitem))}
    names = {constant.value for constant in tree.find_all(nodes.Const) if isinstance(constant.value, str)}
    keys |= names & set(_THOUGHT_KEYS)
    compared = (operand.expr for comparison in tree.find_all(nodes.Compare) for operand in comparison.ops)
    has_parts = "reasoning_content" not in keys and any(
        isinstance(comparison, nodes.Const) and comparison.value == "thinking" for comparison in compared
    )
    return _TemplateTraits(
        "arguments" in added - written,
        any(_key_of(checked) == "content" for checked in tested) and not has_parts,
        thought_key=next((key for key in _THOUGHT_KEYS if key in keys), None),
        thought_is_a_part=has_parts,
        takes_thought_or_content="both content and thinking" in source,
        results_are_with_calls="tool_responses" in names | keys and "tool_call_id" not in names | keys,
    )


def _key_of(node: nodes.Node) -> str | None:
    """Last key of `message.content` or `message['content']`; None for any other node."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    return getattr(node.arg, "value", None) if isinstance(node, nodes.Getitem) else None


def _turns(messages: Sequence[Message], traits: _TemplateTraits) -> list[dict[str, Any]]:
    """Messages in the template's form."""
    if not traits.results_are_with_calls:
        return [_turn(message, traits) for message in messages]
    turns: list[dict[str, Any]] = []
    before: Message | None = None
    for message in messages:
        calling = turns[-1] if turns and turns[-1].get("tool_calls") else None
        if calling is not None and message.role == "tool":
            calling.setdefault("tool_responses", []).append(_result(message, calling["tool_calls"]))
        elif calling is not None and before is not None and before.role == "tool" and _goes_on(calling, message):
            calling["content"] = message.content
        else:
            turns.append(_turn(message, traits))
        before = message
    return turns


def _goes_on(calling: dict[str, Any], message: Message) -> bool:
    """Whether a message behind results continues the turn that made the calls."""
    return message.role == "assistant" and not (message.tool_calls or message.reasoning or calling["content"])


def _result(message: Message, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A tool's result with the tool's name."""
    names = {call["id"]: call["function"]["name"] for call in calls}
    return {"name": names.get(message.tool_call_id) or message.name or "unknown", "response": message.content}


def _turn(message: Message, traits: _TemplateTraits) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        turn |= _thought(message, message.reasoning, traits)
    if message.tool_calls:
        if not message.content and traits.no_content_is_none and isinstance(turn["content"], str):
            turn["content"] = None
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if traits.arguments_as_text else json_text.loads(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        turn["name"] = message.name
    return turn


def _thought(message: Message, thought: str, traits: _TemplateTraits) -> dict[str, Any]:
    """Members for the thinking of an earlier turn, where the template reads it."""
    if traits.thought_is_a_part:
        answer = [{"type": "text", "text": message.content}] if message.content else []
        return {"content": [{"type": "thinking", "thinking": thought}, *answer]}
    if traits.thought_key is None:
        return {}
    if message.tool_calls and message.content and traits.takes_thought_or_content:
        return {traits.thought_key: f"{thought}\n\n{message.content}", "content": ""}
    return {traits.thought_key: thought}


def _function(tool: Tool) -> dict[str, Any]:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


_CHEAP_NODES = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.Const,
    nodes.If,
    nodes.CondExpr,
    nodes.Compare,
    nodes.Operand,
    nodes.And,
    nodes.Or,
    nodes.Not,
    nodes.Test,
)
"""Nodes whose own time does not depend on values, or is linear in the size of one message."""
_CHEAP_FILTERS = frozenset({"trim", "capitalize", "upper", "lower"})
_CHEAP_NAMES = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token", "loop", "tools"})
_CHEAP_ATTRIBUTES = frozenset({"role", "content", "first", "last", "index", "index0", "length"})
_MAX_CHEAP_CHARS = 8_192
"""Maximum length of a cheap template: its own text is written once for each message, too."""


def is_provably_cheap(source: str) -> bool:
    """Whether rendering takes time in proportion to the messages, whatever they contain.

    That holds if a template only writes parts of messages, in each iteration of its own message: without nested loops,
    calls, macros, or variables of its own, nothing in it can grow. A broken template is cheap as well.
    """
    if len(source) > _MAX_CHEAP_CHARS:
        return False
    tree = _tree_of(source)
    return tree is None or all(_is_cheap(node, set(), is_in_loop=False) for node in tree.body)


def _is_cheap(node: nodes.Node, loop_names: set[str], *, is_in_loop: bool) -> bool:
    if isinstance(node, nodes.For):
        target = node.target
        is_over_messages = isinstance(node.iter, nodes.Name) and node.iter.name == "messages"
        if not isinstance(target, nodes.Name) or target.name in _CHEAP_NAMES:
            return False
        if is_in_loop or not is_over_messages or node.recursive or node.test or node.else_:
            return False
        return all(_is_cheap(statement, {target.name}, is_in_loop=True) for statement in node.body)
    if isinstance(node, nodes.Name):
        # `messages` itself must not be written or compared: that would take time for all of them.
        return node.ctx == "load" and node.name in (_CHEAP_NAMES | loop_names) - {"messages"}
    if isinstance(node, nodes.Getattr | nodes.Getitem):
        return _is_cheap_part(node, loop_names, is_in_loop=is_in_loop)
    if isinstance(node, nodes.Filter):
        is_bare = not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
        if node.name not in _CHEAP_FILTERS or not is_bare or node.node is None:
            return False
    elif isinstance(node, nodes.Add | nodes.Concat):
        pass  # joins parts of one message: no variable holds the result, so it cannot grow
    elif not isinstance(node, _CHEAP_NODES):
        return False
    return all(_is_cheap(child, loop_names, is_in_loop=is_in_loop) for child in node.iter_child_nodes())


def _is_cheap_part(node: nodes.Getattr | nodes.Getitem, loop_names: set[str], *, is_in_loop: bool) -> bool:
    """Whether it is `message.role`, `message['content']`, `loop.first`, or `messages[0]['role']`.

    Inside a loop `messages[0].content` is not cheap: written once for each message, it grows with the product of the
    two. A role has at most 64 letters.
    """
    key, whole = _key_of(node), node.node
    if isinstance(whole, nodes.Getitem):  # messages[0]
        is_one = isinstance(whole.node, nodes.Name) and whole.node.name == "messages"
        is_bounded = key in _CHEAP_ATTRIBUTES and not (is_in_loop and key == "content")
        return is_one and isinstance(getattr(whole.arg, "value", None), int) and is_bounded
    return isinstance(whole, nodes.Name) and whole.name in {*loop_names, "loop"} and key in _CHEAP_ATTRIBUTES
