"""Grammar rules of one tool call, for each form in `uma/chat/forms.py`. The readers in `calls.py` accept all that they
allow.

Arguments in JSON are left to llguidance. Where strings or keys are not quoted, the rules here follow the schema. What
these rules cannot express raises `UnservableError` before anything is computed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from uma import json_text
from uma.chat.forms import COUNT, ID, KINDS, BracesForm, ElementsForm, NamedForm, ObjectForm, PairsForm
from uma.chat.lark import LarkRules, string
from uma.chat.schema import (
    ANY,
    NOT_OF_OBJECTS,
    Schema,
    UnservableError,
    check_object,
    check_shape,
    follows,
    kinds_of,
    literal,
    properties_of,
    required_of,
    resolved,
    schema_of,
    text_of,
    text_or_scalar,
)
from uma.json_schema import COMPACT, SPACED, for_llguidance
from uma.types import Tool

MAX_CHARS = 524_288
"""Maximum length of the rules of all tools of a request: building and compiling that many takes about a second."""
_ID = "[a-zA-Z0-9]{1,16}"
_PLACES = re.compile(f"([{ID}{COUNT}])")
_SHARED = ("$defs", "definitions")


def json_rule(rules: LarkRules, name: str, schema: Schema, place: str = "") -> str:
    """A rule for the JSON that the schema at `place` allows."""
    if place:
        schema = {**schema, "x-guidance": {}}  # llguidance reads these options of a whole schema only
    rules.add(name, f"%json {json_text.dumps(for_llguidance(schema, SPACED), ensure_ascii=True)}")
    check_room(rules, place)
    return name


def check_room(rules: LarkRules, place: str) -> None:
    """Raise `UnservableError`, naming `place`, where the rules made so far are too long."""
    if rules.chars > MAX_CHARS:
        raise UnservableError(
            place,
            f"up to here the rules of the tools have more than {MAX_CHARS:,} characters; offer fewer tools, or such "
            "with fewer properties, references and alternatives",
        )


def answer_rule(rules: LarkRules, schema: Schema) -> str:
    """A rule for an answer in JSON of a schema, as compact as with a grammar and no tools."""
    return rules.add("answer", f"%json {json_text.dumps(for_llguidance(schema, COMPACT), ensure_ascii=True)}")


def object_call(rules: LarkRules, form: ObjectForm | NamedForm, tool: Tool, at: int) -> str:
    """Rule of a call with JSON arguments, spaced as the model was trained to write them."""
    arguments = json_rule(rules, f"args_{at}", schema_of(tool))
    name = json.dumps(tool.name, ensure_ascii=False)[1:-1] if isinstance(form, ObjectForm) else tool.name
    return f"{_with_ids(rules, form.before + name + form.after)} {arguments} {_with_ids(rules, form.end)}"


def _with_ids(rules: LarkRules, text: str) -> str:
    """A text, with rules in the places of its identifiers and numbers."""
    ways = {ID: lambda: rules.add("CALL_ID", f"/{_ID}/"), COUNT: lambda: rules.add("CALL_COUNT", "/[0-9]{1,2}/")}
    return " ".join(ways[part]() if part in ways else rules.spelled(part) for part in _PLACES.split(text) if part)


def pairs_call(rules: LarkRules, form: PairsForm, tool: Tool, at: int) -> str:
    """Rule of a call with marks around each argument, in the order of the schema."""
    root = schema_of(tool)
    check_shape(root)
    check_object(root, root, "")
    needed = required_of(root, root)
    pairs = []
    for index, (key, schema) in enumerate(properties_of(root, root).items()):
        place = f".properties.{key}"
        if not key.strip() or key != key.strip() or any(char in key for char in '<>\n="'):
            raise UnservableError(place, "this model's calls cannot hold an argument of that name")
        ways = " | ".join(_pair_ways(rules, form, key, schema, root, f"{at}_{index}", place))
        pairs.append((rules.add(f"pair_{at}_{index}", ways), key in needed))
        check_room(rules, place)
    if form.between:
        inner = separated(rules, pairs, string(form.between), f"pairs_{at}")
    else:
        inner = " ".join(pair if is_needed else f"{pair}?" for pair, is_needed in pairs)
    return f"{_with_ids(rules, form.before + tool.name + form.after)} {inner} {rules.spelled(form.end)}"


def _pair_ways(
    rules: LarkRules, form: PairsForm, key: str, schema: Schema, root: Schema, name: str, place: str
) -> Iterator[str]:
    """Alternatives of one argument: its name, its value, and the marks around it."""
    kinds = kinds_of(schema, root, place)
    if not kinds:
        raise UnservableError(place, "no value is valid")
    for at, (close, behind) in enumerate(form.closes.items()):
        begin = rules.spelled(form.key_open + key + close + form.padding)
        yield from _value_ways(rules, form, begin, kinds & behind, schema, root, f"{name}_{at}", place)


def _value_ways(
    rules: LarkRules,
    form: PairsForm,
    begin: str,
    kinds: frozenset[str],
    schema: Schema,
    root: Schema,
    name: str,
    place: str,
) -> Iterator[str]:
    """Alternatives of a value of these kinds, after the text that begins the argument."""
    end = rules.spelled(form.padding + form.value_close + form.trail)
    is_apart = len(form.closes) > 1 or bool(form.quote)
    others = kinds - {"string"} if is_apart else kinds & {"array", "object"} if "string" in kinds else kinds
    if "string" in kinds:
        is_text = is_apart or kinds == {"string"}
        text = text_of(schema, root, place) if is_text else text_or_scalar(schema, root, place)
        yield f"{begin} {_closed(rules, form, text, f'TEXT_{name}')} {rules.spelled(form.trail)}"
    if form.quote and others & {"boolean", "null"}:
        words = [repr(word) for word in (True, False, None) if follows(word, _with_root(schema, root))]
        yield from (f"{begin} {string(word)}" for word in words)
        others -= {"boolean", "null"}
    if others:
        narrow = schema if others == kinds_of(schema, root, place) else {"allOf": [schema, {"type": sorted(others)}]}
        yield f"{begin} {json_rule(rules, f'json_{name}', _with_root(narrow, root), place)} {end}"


def _closed(rules: LarkRules, form: PairsForm, text: str, name: str) -> str:
    """A terminal for a text up to the first mark behind it, with the mark."""
    if form.quote:
        terminal = rules.add(name, f"({text}) & ~/{ANY}*{literal(form.quote)}{ANY}*/")
        return f"{string(form.quote)} {terminal} {string(form.quote)}"
    mark = literal(form.value_close)
    if special := rules.first_mark(form.value_close):
        begin, _, _ = form.value_close.partition(special)
        body = f"({text}) {string(form.padding + begin)}"
        terminal = rules.add(name, f"({body}) & ~/{ANY}*{mark}{ANY}*/")
        return f"{terminal} {rules.spelled(form.value_close.removeprefix(begin))}"
    whole = rules.add(f"{name}_VALUE", text)
    body = f"{whole} {string(form.padding + form.value_close)}"
    return rules.add(name, f"({body}) & ~/{ANY}*{mark}{ANY}+/")


def separated(rules: LarkRules, members: list[tuple[str, bool]], comma: str, name: str) -> str:
    """A list of optional and needed members, with commas between those that are present, in rules of linear size: one
    for what follows the first member, one for each rest. `name` is the prefix of these rules' names; a member's flag
    says that it is needed.
    """
    rest = ""
    first: list[str] = []
    for at, (member, is_needed) in enumerate(reversed(members)):
        tail = f" {rest}" if rest else ""
        first = [f"{member}{tail}"] + ([] if is_needed else first)
        follows = f"{comma} {member}{tail}" if is_needed else f"({comma} {member})?{tail}"
        rest = rules.add(f"{name}_{at}", follows)
    is_optional = not any(is_needed for _, is_needed in members)
    return f"({' | '.join(first)}){'?' if is_optional else ''}" if first else ""


def braces_call(rules: LarkRules, form: BracesForm, tool: Tool, at: int) -> str:
    """Rule of a call `call:name{…}`. The members of each object are in the order of their names, as templates write
    them.
    """
    root = schema_of(tool)
    check_shape(root)
    return f"{rules.spelled(form.before + tool.name)} {_Braces(rules, form.quote, root, f'{at}').members(root, '', 0)}"


def elements_call(rules: LarkRules, form: ElementsForm, tool: Tool, at: int) -> str:
    """Rule of a call with an element for each argument, in the order of the schema."""
    root = schema_of(tool)
    check_shape(root)
    inner = _Elements(rules, form.mark, root, f"{at}").members(root, "", 0)
    return f"{rules.spelled(form.before + tool.name + form.after)} {inner} {rules.spelled(form.end)}"


class _Braces:
    """Rules of one tool's arguments, where the model writes `{key:value,…}` instead of JSON."""

    not_in_keys = ":{}[],\n"

    def __init__(self, rules: LarkRules, quote: str, root: Schema, prefix: str) -> None:
        self._rules = rules
        self._quote = quote
        self._root = root
        self._prefix = prefix
        self._count = 0
        self._by_reference: dict[str, str] = {}

    def members(self, schema: Schema, place: str, depth: int) -> str:
        """Rule of an object."""
        check_object(schema, self._root, place)
        needed = required_of(schema, self._root)
        members = []
        for key, inner in properties_of(schema, self._root).items():
            if not key.strip() or key != key.strip() or set(key) & set(self.not_in_keys) or self._quote in key:
                raise UnservableError(f"{place}.properties.{key}", "this model's calls cannot hold a key of that name")
            value = self._value(inner, f"{place}.properties.{key}", depth + 1)
            members.append((key, self._name("member", self._member(key, value)), key in needed))
            check_room(self._rules, place)
        return self._joined(members)

    def _member(self, key: str, value: str) -> str:
        return f"{string(f'{key}:')} {value}"

    def _joined(self, members: list[tuple[str, str, bool]]) -> str:
        """Rule of an object of these members, each given as its key, its rule, and whether it is needed."""
        self._count += 1
        rest = f"rest_{self._prefix}_{self._count}"
        ordered = [(rule, is_needed) for _, rule, is_needed in sorted(members)]
        return f'"{{" {separated(self._rules, ordered, string(","), rest)} "}}"'

    def _kinds(self, schema: Any, place: str) -> frozenset[str]:
        return kinds_of(schema, self._root, place)

    def _value(self, schema: Any, place: str, depth: int) -> str:
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            return self._reference(schema, place, depth)
        if schema is True or schema == {}:
            return self._anything()
        kinds = self._kinds(schema, place)
        if not kinds or depth > 16:
            raise UnservableError(place, "no value is valid, or it is nested too deeply")
        for word in ("enum", "const"):
            if word in schema and kinds & {"array", "object"}:
                raise UnservableError(f"{place}.{word}", "lists and objects cannot be among these values here")
        for word in ("anyOf", "oneOf", "allOf"):
            if word in schema and kinds & {"array", "object"}:
                return self._combined(schema, word, place, depth)
        ways = []
        if "string" in kinds:
            ways.append(self._string(text_of(schema, self._root, place)))
        if scalars := kinds & {"null", "boolean", "integer", "number"}:
            narrow = {"allOf": [schema, {"type": sorted(scalars)}]}
            self._count += 1
            name = f"scalar_{self._prefix}_{self._count}"
            ways.append(self._scalar(json_rule(self._rules, name, _with_root(narrow, self._root), place)))
        if "array" in kinds:
            ways.append(self._array(schema, place, depth))
        if "object" in kinds:
            ways.append(self._object(schema, place, depth))
        check_room(self._rules, place)
        return f"({' | '.join(ways)})"

    def _scalar(self, value: str) -> str:
        return value

    def _reference(self, schema: Schema, place: str, depth: int) -> str:
        pointer = schema["$ref"]
        if pointer not in self._by_reference:
            self._count += 1
            name = self._by_reference[pointer] = f"shared_{self._prefix}_{self._count}"
            self._rules.begin(name)
            target = resolved(schema, self._root, place)
            self._rules.complete(name, self._value(target, place, depth + 1))
        return self._by_reference[pointer]

    def _combined(self, schema: Schema, word: str, place: str, depth: int) -> str:
        if word == "allOf" or set(schema) - {word, "title", "description", "default", "$defs", "definitions"}:
            raise UnservableError(f"{place}.{word}", "not available here, where lists or objects are allowed")
        branches = [option for option in schema[word] if self._kinds(option, place)]
        if word == "oneOf":
            self._check_apart(branches, place)
        ways = (self._value(one, f"{place}.{word}[{at}]", depth + 1) for at, one in enumerate(branches))
        return f"({' | '.join(ways)})"

    def _check_apart(self, branches: Iterable[Any], place: str) -> None:
        seen: set[str] = set()
        for kinds in (kinds_of(branch, self._root, place) for branch in branches):
            if kinds & seen:
                raise UnservableError(f"{place}.oneOf", "two of its alternatives can be of the same type")
            seen |= kinds

    def _string(self, text: str) -> str:
        """A string between the model's quotes."""
        return f"{self._rules.spelled(self._quote)} {self._closed(text)}"

    def _closed(self, text: str) -> str:
        """A terminal for a text up to the closing quote, with the quote."""
        quote = self._quote
        self._count += 1
        name = f"TEXT_{self._prefix}_{self._count}"
        if quote in self._rules.specials.marks:
            terminal = self._rules.add(name, f"({text}) & ~/{ANY}*{literal(quote)}{ANY}*/")
            return f"{terminal} {self._rules.spelled(quote)}"
        whole = self._rules.add(f"{name}_VALUE", text)
        return self._rules.add(name, f"({whole} {string(quote)}) & ~/{ANY}*{literal(quote)}{ANY}+/")

    def _array(self, schema: Schema, place: str, depth: int) -> str:
        for word in ("prefixItems", "uniqueItems", "contains"):
            if schema.get(word):
                raise UnservableError(f"{place}.{word}", "not available in this model's calls")
        item = self._name("item", self._value(schema.get("items", True), f"{place}.items", depth + 1))
        return self._items(item, schema.get("minItems", 0), schema.get("maxItems"))

    def _items(self, item: str, least: int, most: int | None) -> str:
        if most == 0:
            return '"[" "]"'
        again = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f'"[" ({item} {again}){"?" if least == 0 else ""} "]"'

    def _object(self, schema: Schema, place: str, depth: int) -> str:
        narrow = {word: member for word, member in schema.items() if word not in NOT_OF_OBJECTS}
        extra = schema.get("additionalProperties", True)
        if schema.get("properties") or schema.get("required") or extra is False:
            return self.members(narrow, place, depth)
        check_object(narrow, self._root, place)
        return self._dictionary(self._value(extra, f"{place}.additionalProperties", depth + 1))

    def _dictionary(self, value: str) -> str:
        """An object whose keys the model chooses."""
        key = self._rules.add("KEY", r"/[a-zA-Z_][a-zA-Z0-9_\-]*/")
        member = self._name("member", f'{key} ":" {value}')
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _anything(self) -> str:
        if "anything" not in self._rules:
            self._rules.begin("anything")
            scalar = json_rule(self._rules, "scalar", {"type": sorted(KINDS - {"string", "array", "object"})})
            text = self._string(f"/{ANY}*/")
            array = '"[" (anything ("," anything)*)? "]"'
            self._rules.complete("anything", f"{scalar} | {text} | {array} | {self._dictionary('anything')}")
        return "anything"

    def _name(self, kind: str, body: str) -> str:
        self._count += 1
        return self._rules.add(f"{kind}_{self._prefix}_{self._count}", body)


class _Elements(_Braces):
    """Rules of one tool's arguments as nested elements. A value ends with the mark of the tag behind it."""

    not_in_keys = "<>\n"

    def _element(self, tag: str, value: str) -> str:
        return f"{self._rules.spelled(f'{self._quote}<{tag}>')} {value} {string(f'</{tag}>')}"

    def _member(self, key: str, value: str) -> str:
        return self._element(key, value)

    def _joined(self, members: list[tuple[str, str, bool]]) -> str:
        return " ".join(rule if is_needed else f"{rule}?" for _, rule, is_needed in members)

    def _kinds(self, schema: Any, place: str) -> frozenset[str]:
        return super()._kinds(schema, place) - {"null"}

    def _value(self, schema: Any, place: str, depth: int) -> str:
        if schema is True or schema == {}:
            raise UnservableError(place, "a value of any type cannot be told from a text in this model's calls")
        if isinstance(schema, dict) and "$ref" not in schema:
            kinds = self._kinds(schema, place)
            if len(kinds) > 1 and kinds & {"array", "object"}:
                raise UnservableError(place, "this model's calls tell no lists or objects from other values")
            if len(kinds) > 1 and "string" in kinds:
                return self._string(text_or_scalar(schema, self._root, place))
        return super()._value(schema, place, depth)

    def _scalar(self, value: str) -> str:
        return f"{value} {self._rules.spelled(self._quote)}"

    def _combined(self, schema: Schema, word: str, place: str, depth: int) -> str:
        if sum(bool(self._kinds(option, place)) for option in schema[word]) > 1:
            raise UnservableError(f"{place}.{word}", "this model's calls tell no lists or objects from others")
        return super()._combined(schema, word, place, depth)

    def _string(self, text: str) -> str:
        return self._closed(text)

    def _items(self, item: str, least: int, most: int | None) -> str:
        bounds = f"{{{least},{'' if most is None else most}}}"
        return f"({self._element('item', item)}){bounds} {self._rules.spelled(self._quote)}"

    def _object(self, schema: Schema, place: str, depth: int) -> str:
        if not (schema.get("properties") or schema.get("required") or schema.get("additionalProperties") is False):
            raise UnservableError(place, "this model's calls have objects with known members alone")
        return f"{super()._object(schema, place, depth)} {self._rules.spelled(self._quote)}"


def _with_root(schema: Schema, root: Schema) -> Schema:
    """A part of a schema, with the definitions that its references lead to."""
    return {**{word: root[word] for word in _SHARED if word in root}, **schema}
