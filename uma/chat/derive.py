"""Derives the form of a model's tool calls from what its chat template renders.

The template renders the same turn with a text, with one call and with two. The names and arguments are known, so the
text around them shows how a call begins, how its parts are spelled, and what stands between two calls and behind the
last. The derived form is then written out, and must equal what the template wrote; otherwise the form is unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from uma import json_text
from uma.chat.families import THINKING, Family
from uma.chat.forms import COUNT, ID, Form, NamedForm, ObjectForm, PairsForm
from uma.prefix import common_size
from uma.types import Message, Tool, ToolCall

Render = Callable[[Sequence[Message], Sequence[Tool]], str]
"""Renders a conversation without opening an answer after it."""

MAX_CHARS = 65_536
"""Maximum length of a rendered question and answer that is analysed."""
_NAMES = ("uma_first", "uma_second")
_IDS = ("umaCall01", "umaCall02")
_KEYS = {"uma_text": "string", "uma_more": "object", "uma_last": "string", "uma_count": "integer"}
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"uma_text": "Oslo Fjord", "uma_more": {"x": [True], "y": "z"}, "uma_last": "a b", "uma_count": 7654321},
    {"uma_text": "Bern Aare", "uma_more": {"x": [False], "y": "w"}, "uma_last": "c d", "uma_count": 1234567},
)
_PARAMETERS = {
    "type": "object",
    "properties": {key: {"type": kind} for key, kind in _KEYS.items()},
    "required": list(_KEYS),
    "additionalProperties": False,
}
_TOOLS = tuple(Tool(name, "", _PARAMETERS) for name in _NAMES)
_JSON_BEFORE_NAME, _JSON_AFTER_NAME = re.compile(r'\{[^{}]*": "$'), re.compile(r'",\s[^{}]*": ')
_TOKEN = re.compile(r'"[^"]*"|\w+|\S')
"""Pattern of a JSON token."""


def derived(render: Render, failure: type[Exception]) -> Family | None:
    """Family of a template's calls; None where it shows none, or an unknown form. `failure` is the exception of
    `render`.
    """
    try:
        plain = render(_turn("Uma says so", 0), _TOOLS)
        asked = render(_turn("", 0)[:1], _TOOLS)
        one, two = (_body(render(_turn("", count), _TOOLS), plain) for count in (1, 2))
        family = _family(one, two if _NAMES[1] in two else None)
    except (failure, ValueError):
        return None
    return attrs.evolve(family, knows_tools=_NAMES[0] in asked)


def _turn(text: str, count: int) -> tuple[Message, ...]:
    calls = [ToolCall(*call) for call in zip(_IDS, _NAMES, map(json.dumps, _ARGUMENTS), strict=True)]
    return (Message("user", "Uma asks"), Message("assistant", text, tuple(calls[:count])))


def _body(text: str, plain: str) -> str:
    """The text of calls, which `plain` has a text instead of: with placeholders for ids, and without thinking before
    it.
    """
    if max(len(text), len(plain)) > MAX_CHARS:
        raise ValueError("it is too long")
    begin = common_size(text, plain)
    if (tag := text.rfind("<", 0, begin)) > text.rfind(">", 0, begin):
        begin = tag  # not the middle of a tag: both texts begin with tags that begin alike
    # Likewise both can end with tags that end alike.
    body = text[begin : _whole(text, len(text) - common_size(text[begin:][::-1], plain[begin:][::-1]))]
    for thinking in THINKING:
        thought, close, rest = body.partition(thinking.close)
        body = rest if close and _NAMES[0] not in thought else body
    for id in _IDS:
        body = body.replace(id, ID)
    for arguments in _ARGUMENTS:
        # Some templates write nested values as Python does, though no model was trained on that, and some indent JSON.
        body = body.replace(repr(arguments["uma_more"]), json.dumps(arguments["uma_more"]))
        spaced = r"\s*".join(map(re.escape, _TOKEN.findall(json.dumps(arguments))))
        body = re.sub(spaced, json.dumps(arguments), body)
    return body.strip()


def _whole(text: str, begin: int) -> int:
    """The index `begin`, or the end of the tag that it is in."""
    return text.find(">", begin) + 1 if text.rfind("<", 0, begin) > text.rfind(">", 0, begin) else begin


@attrs.frozen
class _Shown:
    """One rendered call, divided at its name and its arguments."""

    before: str
    after: str
    values: tuple[str, ...]
    """Text before each argument's name, and between name and value; empty where the arguments are one JSON object."""
    behind: str


def _shown(body: str, at: int) -> _Shown:
    """The call at this index. Raises `ValueError` for an unknown form."""
    name, arguments = _NAMES[at], _ARGUMENTS[at]
    before, _, rest = body.partition(name)
    if name in rest:
        raise ValueError("a name twice")
    after, found, behind = rest.partition(json.dumps(arguments))
    if found:
        return _Shown(before, after, (), behind)
    values = []
    for key, value in arguments.items():
        before_key, _, rest = rest.partition(key)
        before_value, found, rest = rest.partition(value if isinstance(value, str) else json.dumps(value))
        if not found:
            raise ValueError("arguments of an unknown form")
        values += [before_key, before_value]
    return _Shown(before, "", tuple(values), rest)


def _family(one: str, two: str | None) -> Family:
    """Family of the rendered texts of one call and of two. Raises `ValueError` for an unknown form."""
    first = _shown(one, 0)
    head, after, own_head, tail, between, behind = first.before, first.after, first.before, first.behind, "", ""
    if two is not None:
        first, second = _shown(two, 0), _shown(two, 1)
        after = _counted(first.after, second.after)
        head, middle, own_head = _heads(first.before, first.behind.partition(_NAMES[1])[0])
        own_head = own_head.lstrip() if own_head != head else head
        rest = middle[: len(middle) - len(own_head)]
        tail = rest[: common_size(rest, second.behind)].rstrip()
        between, behind = rest[len(tail) :], second.behind[len(tail) :]
    is_block, is_turns = own_head != head, bool(between.strip(" \n,"))
    opening = head[: len(head) - len(own_head)] if is_block else head
    mark, lead, before = _mark(opening, is_block=is_block)
    form, rest = _form(first, own_head if is_block else before, after, tail)
    is_list = is_block and opening.rstrip().endswith("[")
    trail, close = _trail(rest + (behind if is_block else ""), "]" if is_list else "")
    family = Family(
        f"{type(form).__name__} behind {mark}",
        open=mark,
        close=close,
        form=form,
        is_list=is_list,
        is_block=is_block and not is_list,
        is_single=two is None or is_turns,
        lead=lead,
        trail=trail,
        separator="" if is_turns else between,
    )
    if not _is_written(family, *((one, 1) if two is None or is_turns else (two, 2))):
        raise ValueError("it is not what the template writes")
    return family


def _heads(head: str, middle: str) -> tuple[str, str, str]:
    """Texts before the names of two calls, and the longest end that both have in common."""
    own = common_size(head[::-1], middle[::-1])
    if head[: len(head) - own][-1:].isdigit() and middle[: len(middle) - own][-1:].isdigit():
        head, middle = (
            re.sub(r"\d+$", COUNT, text[: len(text) - own]) + text[len(text) - own :] for text in (head, middle)
        )
        own = common_size(head[::-1], middle[::-1])
    return head, middle, head[_whole(head, len(head) - own) :]


def _counted(one: str, other: str) -> str:
    """A text that numbers the calls, with a placeholder for the number."""
    return one if one == other else re.sub(r"\d+", COUNT, one)


_TAGGED = re.compile(r"(<[^<>\s]+>)(\s*)([<{](?:.|\n)*)?")
_TAG = re.compile(r"<[^<>\s]+>")
_LAST_TAG = re.compile(r"(?:<[^<>\s]+>)*(<[^<>\s]+>)$")
_OPENING = re.compile(r"((?:.|\n)*?)(\s*\[?\s*)")


def _mark(opening: str, *, is_block: bool) -> tuple[str, str, str]:
    """Mark before a call, or before all of them; the text between it and the call; and the beginning of the call
    itself.
    """
    if is_block:
        found = _OPENING.fullmatch(opening)
        assert found is not None
        mark, lead = _LAST_TAG.sub(r"\1", found[1]), found[2]
        if mark.isidentifier():  # a word alone is no mark
            mark, lead = mark + lead.rstrip(), lead[len(lead.rstrip()) :]
        before = ""
    elif (found := _TAGGED.fullmatch(opening)) is not None:
        mark, lead, before = found[1], found[2], found[3] or ""
    else:
        at = object_.start() if (object_ := _JSON_BEFORE_NAME.search(opening)) else len(opening)
        mark, before = opening[:at].rstrip(), opening[at:]
        lead = opening[len(mark) : at]
    if len(mark) < 3:
        raise ValueError("calls have no mark")
    return mark, lead, before


def _form(call: _Shown, before: str, after: str, tail: str) -> tuple[Form, str]:
    """Form of a call, and the text behind its arguments that is not part of it."""
    if call.values:
        return _pairs(call, before, tail), ""
    if _JSON_BEFORE_NAME.search(before) and _JSON_AFTER_NAME.fullmatch(after):
        end = tail.find("}") + 1
        return ObjectForm(before, after, tail[:end]), tail[end:]
    return NamedForm(before, after, tail), ""


def _pairs(call: _Shown, before: str, tail: str) -> PairsForm:
    opening, key_close, behind_text, json_close, behind_json, *_ = call.values
    quote = key_close.removeprefix(json_close) if len(key_close) == len(json_close) + 1 else ""
    if quote:
        key_close, behind_text = json_close, behind_text.removeprefix(quote)
    closes, behinds = (
        {call.values[3], call.values[7]},
        {behind_text, call.values[4], call.values[6].removeprefix(quote)},
    )
    if len(closes) > 1 or len(behinds) > 1:
        raise ValueError("arguments are not written alike")
    common = common_size(opening[::-1], behind_json[::-1])
    key_open = behind_json[_whole(behind_json, len(behind_json) - common) :].lstrip()
    after, closing = opening[: len(opening) - len(key_open)], behind_json[: len(behind_json) - len(key_open)]
    if not key_open:
        return PairsForm(before, after, "", key_close, "", "", "", tail, between=closing, quote=quote)
    padding = key_close[len(key_close.rstrip()) :]
    padding = padding if closing.startswith(padding) else ""
    value_close = closing.strip()
    trail = closing.removeprefix(padding).removeprefix(value_close)
    if not value_close or not tail.startswith(padding + value_close):
        raise ValueError("a value has no end")
    end = tail.removeprefix(padding + value_close).removeprefix(trail)
    key_close, json_close = (text.removesuffix(padding) for text in (key_close, json_close))
    json_close = "" if json_close == key_close else json_close
    return PairsForm(before, after, key_open, key_close, value_close, padding, trail, end, json_close)


def _trail(text: str, bracket: str) -> tuple[str, str]:
    """Text between the last call and the closing mark, and that mark."""
    within, found, close = text.partition(bracket) if bracket else ("", "", text)
    space = "" if bracket else close[: len(close) - len(close.lstrip())]
    tag = _TAG.match(close.strip())
    return within + found + space, tag[0] if tag else close.strip()


def _is_written(family: Family, body: str, count: int) -> bool:
    """Whether calls in this family's form are the text, with nothing but tags around them."""
    text = written(family, list(zip(_NAMES, _ARGUMENTS, strict=True))[:count])
    tags = r"(\s*<[^<>]*>)*\s*"
    return re.fullmatch(tags + re.escape(text).replace(COUNT, r"\d+") + tags, body) is not None


def written(family: Family, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Text of calls, each a name and its arguments, as models of the family write them. Not for the forms of Gemma and
    MiniMax M3.
    """
    texts = [_written(family.form, name, arguments) for name, arguments in calls]
    between = family.separator
    if not (family.is_list or family.is_block):
        between = f"{family.trail}{family.close}{family.separator}{family.open}{family.lead}"
    return f"{family.open}{family.lead}{between.join(texts)}{family.trail}{family.close}"


def _written(form: Form, name: str, arguments: dict[str, Any]) -> str:
    if isinstance(form, PairsForm):
        pairs = [_pair(form, key, value) for key, value in arguments.items()]
        return f"{form.before}{name}{form.after}{form.between.join(pairs)}{form.end}"
    assert isinstance(form, ObjectForm | NamedForm)
    return f"{form.before}{name}{form.after}{json_text.dumps(arguments)}{form.end}"


def _pair(form: PairsForm, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    shown = f"{form.quote}{value}{form.quote}" if is_text else json_text.dumps(value)
    close = form.key_close if is_text else form.json_close or form.key_close
    return f"{form.key_open}{key}{close}{form.padding}{shown}{form.padding}{form.value_close}{form.trail}"
