"""Incremental readers of tool calls: characters in, the name and JSON arguments out.

Each form in `uma/chat/forms.py` has a reader, written as a generator that takes one character at each `yield`, so that
it can stop anywhere. White space between the parts of a call does not count.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Protocol

from uma import json_text
from uma.chat.forms import COUNT, ID, KINDS, BracesForm, ElementsForm, Form, NamedForm, ObjectForm, PairsForm
from uma.chat.partial_json import JsonString
from uma.chat.parts import CallArguments, CallBegun, Part
from uma.chat.schema import Schema, UnservableError, container_of, kinds_of, properties_of, value_in_text

MAX_NESTING = 128
"""Maximum nesting of brackets: each level takes a Python frame, and Python has a thousand."""
Reading = Generator[None, str, str]
"""A generator that is sent characters, and returns the text that they form."""
_SPACE = " \t\r\n"
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""JSON's words for Python's, in forms with arguments as in a Python call."""
_PLACE = re.compile(f"[{ID}{COUNT}]")
_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = {*_NAME_KEYS, *_ARGUMENT_KEYS, "id", "type", "tool_call_id"}
"""Keys of a call that is a JSON object."""


class CallReader(Protocol):
    """Interface of a call that is being read."""

    @property
    def name(self) -> str | None:
        """Name of the tool, once it is known."""

    @property
    def arguments(self) -> str:
        """JSON of the arguments; complete when `is_whole`."""

    @property
    def is_whole(self) -> bool:
        """Whether the call is complete, so that the next character is not part of it."""

    @property
    def problem(self) -> str:
        """Why the text is not a call of these tools; empty while it can become one."""

    def push(self, char: str) -> str:
        """Take the next character. Returns the part of the arguments that it completes."""


def reader_of(form: Form, tools: Mapping[str, Schema]) -> CallReader:
    """A reader for one call to one of `tools`, which maps names to schemas of arguments."""
    if isinstance(form, NamedForm):
        return _NamedCall(form, tools)
    if isinstance(form, PairsForm):
        return _PairsCall(form, tools)
    if isinstance(form, BracesForm):
        return _BracesCall(form, tools)
    if isinstance(form, ElementsForm):
        return _ElementsCall(form, tools)
    assert isinstance(form, ObjectForm)
    return ObjectCall(tools)


def read_call(call: CallReader, text: str, parts: list[Part]) -> int:
    """Push `text` until the call is whole or has a problem, or to its end. Adds the parts that are then certain to
    `parts`. Returns the number of characters taken.
    """
    for taken, char in enumerate(text, 1):
        was_named = call.name is not None
        arguments = call.push(char)
        if call.name is not None and not was_named:
            parts.append(CallBegun(call.name))
        if call.problem:
            return taken
        if arguments:
            parts.append(CallArguments(arguments))
        if call.is_whole:
            return taken
    return len(text)


class NoCallError(Exception):
    """The text is not a call; the message says why."""


class PushedCall(ABC):
    """A reader that is pushed characters, written as a generator that takes them (`_read`)."""

    def __init__(self, tools: Mapping[str, Schema]) -> None:
        self._tools = tools
        self._out = ""
        self._depth = 0
        self.name: str | None = None
        self.arguments = ""
        self.is_whole = False
        self.problem = ""
        self._reading = self._read()
        next(self._reading)

    def push(self, char: str) -> str:
        """Take the next character. Returns the part of the arguments that it completes."""
        try:
            self._reading.send(char)
        except StopIteration:
            self._end()
        except NoCallError as error:
            self.problem = str(error)
        sent, self._out = self._out, ""
        return sent

    @abstractmethod
    def _read(self) -> Reading:
        """Read the whole call."""

    def _end(self) -> None:
        try:
            value = json_text.loads(self.arguments)
        except (ValueError, RecursionError):
            self.problem = "its arguments are not JSON"
            return
        self.is_whole = isinstance(value, dict)
        self.problem = "" if self.is_whole else "its arguments are no JSON object"

    @contextmanager
    def _nested(self) -> Iterator[None]:
        """A block that reads the members of a value. Raises `NoCallError` below `MAX_NESTING` others."""
        if self._depth == MAX_NESTING:
            raise NoCallError("its arguments are nested too deeply")
        self._depth += 1
        yield
        self._depth -= 1

    def _give(self, text: str) -> None:
        self.arguments += text
        self._out += text

    def _give_value(self, text: str, kinds: frozenset[str]) -> None:
        try:
            self._give(value_in_text(text, kinds))
        except ValueError as error:
            raise NoCallError(str(error)) from None

    def _one_of(self, *texts: str, read: str = "") -> Reading:
        """Read one of these texts, white space aside. `read` is the part that has come before."""
        packed = {_packed(text): text for text in texts}
        while read not in packed:
            char = yield
            if char.isspace():
                continue
            read += char
            if not any(byte.startswith(read) for byte in packed):
                raise NoCallError("it is not of this model's form")
        return packed[read]

    def _name_before(
        self, names: Collection[str], *stops: str, read: str = ""
    ) -> Generator[None, str, tuple[str, str]]:
        """Read one of these names and one of the texts behind it, white space between them aside. `read` is the part
        that has come before.
        """
        ends = [(_packed(name + stop), name, stop) for name in names for stop in stops]
        while True:
            read += yield
            packed = _packed(read)
            ends = [end for end in ends if end[0].startswith(packed) and _is_name(read, end[1])]
            if not ends:
                raise NoCallError("no tool of that name was offered")
            for whole, name, stop in ends:
                if packed == whole:
                    return name, stop

    def _until(self, mark: str) -> Reading:
        """Read the text before a mark, and the mark."""
        read = ""
        while not read.endswith(mark):
            read += yield
        return read.removesuffix(mark)

    def _text(self, padding: str, mark: str) -> Reading:
        """Read a string up to a mark. Its characters are given out as they come, except for what can be the beginning
        of the mark.
        """
        self._give('"')
        held, is_first = "", True
        while not held.endswith(mark):
            held += yield
            if is_first and padding:
                if padding.startswith(held) and held != padding:
                    continue
                held, is_first = held.removeprefix(padding), False
            keep = max(overlap(held, padding + mark), overlap(held, mark))
            if not held.endswith(mark):
                self._give(_escaped(held[: len(held) - keep]))
                held = held[len(held) - keep :]
        self._give(_escaped(held.removesuffix(mark).removesuffix(padding)) + '"')
        return mark

    def _visible(self) -> Reading:
        """Read the next character that is not white space."""
        char = yield
        while char.isspace():
            char = yield
        return char

    def _json(self, char: str, stops: Collection[str], *, gives: bool = False) -> Generator[None, str, tuple[str, str]]:
        """Read JSON that begins with `char`, up to one of these characters behind it. Returns both. `gives`: give the
        JSON out as it comes.
        """
        read, depth, string = "", 0, JsonString()
        while depth or string.is_open or char not in stops:
            string.push(char)
            if not string.is_open:
                depth += (char in "{[") - (char in "}]")
                if depth < 0 or (char == ":" and not depth):
                    raise NoCallError("it is not JSON")
            read += char
            if gives and (depth or not char.isspace()):
                self._give(char)
            char = yield
        return read.strip(), char

    def _object(self, read: str) -> Reading:
        """Read a JSON object, and give it out as it comes. `read` is its bracket, or empty."""
        if read != "{":
            yield from self._one_of("{")
        self._give("{")
        depth, string = 1, JsonString()
        while depth:
            char = yield
            string.push(char)
            if not string.is_open:
                depth += (char in "{[") - (char in "}]")
            self._give(char)
        return self.arguments


class ObjectCall(PushedCall):
    """A call that is one JSON object, `{"name": …, "arguments": {…}}`, with its members in any order.

    An object that is not a call is recognised at its first foreign key, so that ordinary JSON is not held back.
    """

    _early = ""
    """Arguments that came before the name."""

    def _read(self) -> Reading:
        yield from self._one_of("{")
        return (yield from self._members())

    def _members(self) -> Reading:
        """Read the members, from behind the opening brace to the closing one."""
        char = ","
        while char == ",":
            char = yield from self._member()
        if self.name is None:
            raise NoCallError("it has no name")
        if not self.arguments:
            self._give("{}")
        return self.arguments

    def _member(self) -> Reading:
        """Read a member. Returns the comma or the brace behind it."""
        if (yield from self._visible()) != '"':
            raise NoCallError("it is not JSON")
        key = yield from self._until('"')  # without escapes, because grammars spell keys without them
        if (yield from self._visible()) != ":" or key not in _KEYS:
            raise NoCallError("it is not a call's object")
        begin = yield from self._visible()
        is_arguments = key in _ARGUMENT_KEYS
        if is_arguments and (self.arguments or self._early):
            raise NoCallError("it has arguments twice")
        gives = is_arguments and self.name is not None and begin == "{"
        text, char = yield from self._json(begin, ",}", gives=gives)
        value = _loaded(text)
        if key in _NAME_KEYS:
            self._take_name(value, text)
        elif is_arguments:
            if isinstance(value, str):  # some models write the object once more as a string
                text, value = value, _loaded(value)
            if not isinstance(value, dict):
                raise NoCallError("its arguments are no JSON object")
            if self.name is None:
                self._early = text
            elif not gives:
                self._give(text)
        return char

    def _take_name(self, value: object, text: str) -> None:
        if self.name is not None:
            raise NoCallError("it has a name twice")
        if not isinstance(value, str) or value not in self._tools or text != _quoted(value):
            raise NoCallError("no tool of that name was offered")
        self.name = value
        self._give(self._early)


class _NamedCall(PushedCall):
    def __init__(self, form: NamedForm, tools: Mapping[str, Schema]) -> None:
        self._form = form
        super().__init__(tools)

    def _read(self) -> Reading:
        form = self._form
        yield from self._texts(_PLACE.split(form.before))
        after = _PLACE.split(form.after) if _packed(form.after) else ["{"]
        name, stop = yield from self._name_before(self._tools, after[0], after[-1])
        if stop != after[-1]:
            yield from self._until(after[-1])
        self.name = name
        yield from self._object(stop[-1:])
        return (yield from self._texts(_PLACE.split(form.end)))

    def _texts(self, texts: list[str]) -> Reading:
        """Read these texts; what stands between them is ignored."""
        yield from self._one_of(texts[0])
        for text in texts[1:]:
            yield from self._until(text)
        return texts[-1]


class _PairsCall(PushedCall):
    def __init__(self, form: PairsForm, tools: Mapping[str, Schema]) -> None:
        self._form = form
        self._seen: set[str] = set()
        super().__init__(tools)

    def _read(self) -> Reading:
        form = self._form
        yield from self._one_of(form.before)
        after, *counted = _PLACE.split(form.after)
        stops = [after] if _packed(after) else [form.key_open, form.end]
        name, stop = yield from self._name_before(self._tools, *stops)
        for text in counted:
            yield from self._until(text)
            stop = form.after
        schema = self._tools[name]
        properties = properties_of(schema, schema)
        self.name = name
        read = ""
        if stop == form.after and form.key_open:
            stop = yield from self._one_of(form.key_open, form.end)
        elif stop == form.after:  # keys have no opening mark
            read = yield from self._visible()
            stop = form.end if _packed(form.end).startswith(read) else form.key_open
            if stop == form.end:
                yield from self._one_of(form.end, read=read)
        self._give("{")
        while stop != form.end:
            stop = yield from self._pair(properties, schema, read)
            read = ""
        self._give("}")
        return self.arguments

    def _pair(self, properties: Mapping[str, Schema], root: Schema, read: str) -> Reading:
        """Read an argument, and the text behind it. `read` is the part of its name that has come before."""
        form, closes = self._form, self._form.closes
        key, close = yield from self._name_before(properties.keys() - self._seen, *closes, read=read)
        kinds = _kinds(properties[key], root) & closes[close]
        self._give(f"{', ' if self._seen else ''}{_quoted(key)}: ")
        self._seen.add(key)
        if form.quote:
            return (yield from self._open_value(kinds))
        if kinds == {"string"}:
            yield from self._text(form.padding, form.value_close)
        else:
            text = (yield from self._value(kinds)).removeprefix(form.padding).removesuffix(form.padding)
            self._give_value(text, kinds)
        return (yield from self._one_of(form.key_open, form.end))

    def _open_value(self, kinds: frozenset[str]) -> Reading:
        """Read a string in quotes, or JSON that ends with the comma or the end of the call behind it."""
        form = self._form
        stops = {_packed(text)[0]: text for text in (form.between, form.end)}
        char = yield from self._visible()
        if char == form.quote:
            self._give('"')
            while (char := (yield)) != form.quote:
                self._give(_escaped(char))
            self._give('"')
            char = yield from self._visible()
        else:
            read, char = yield from self._json(char, stops)
            self._give_value(_WORDS.get(read, read), kinds - {"string"})
        if char not in stops:
            raise NoCallError("a value has no end")
        yield from self._one_of(stops[char], read=char)
        return stops[char]

    def _value(self, kinds: frozenset[str]) -> Reading:
        """Read the text before the closing mark, and the mark. In JSON a string can contain the mark."""
        mark, read, string = self._form.value_close, "", JsonString()
        is_json = "string" not in kinds
        begins = ("[", "{") if kinds & {"array", "object"} else ()
        is_begun = False
        while not read.endswith(mark) or string.is_open:
            char = yield
            read += char
            if not is_begun and not char.isspace():
                is_begun, is_json = True, is_json or char in begins
            if is_json:
                string.push(char)
        return read.removesuffix(mark)


class _BracesCall(PushedCall):
    def __init__(self, form: BracesForm, tools: Mapping[str, Schema]) -> None:
        self._form = form
        super().__init__(tools)

    def _read(self) -> Reading:
        yield from self._one_of(self._form.before)
        self.name, _ = yield from self._name_before(self._tools, "{")
        yield from self._braces()
        return self.arguments

    def _braces(self) -> Generator[None, str, None]:
        """Read the members of an object, from behind its opening brace to its closing one."""
        self._give("{")
        char, comma = (yield from self._visible()), ""
        while char != "}":
            key = char + (yield from self._until(":"))
            if not key.strip() or any(mark in key for mark in "{}[],") or self._form.quote in key:
                raise NoCallError("an argument has no name")
            self._give(f"{comma}{_quoted(key.strip())}: ")
            char, comma = (yield from self._value((yield from self._visible()), "}")), ", "
            if char == ",":
                char = yield from self._visible()
        self._give("}")

    def _brackets(self) -> Generator[None, str, None]:
        """Read the items of an array, from behind its opening bracket to its closing one."""
        self._give("[")
        char = yield from self._visible()
        while char != "]":
            if (yield from self._value(char, "]")) == "]":
                break
            self._give(", ")
            char = yield from self._visible()
        self._give("]")

    def _value(self, char: str, close: str) -> Reading:
        """Read a value that begins with `char`. Returns the comma or the closing character behind it."""
        if char in "{[":
            with self._nested():
                yield from self._braces() if char == "{" else self._brackets()
        elif char == self._form.quote[0]:
            yield from self._quoted()
        else:
            return (yield from self._word(char, close))
        char = yield from self._visible()
        if char not in (",", close):
            raise NoCallError("a value has no end")
        return char

    def _word(self, char: str, close: str) -> Reading:
        """Read a number, `true`, `false` or `null`."""
        word = ""
        while char not in (",", close):
            word += char
            char = yield
        try:
            value = json_text.loads(word)
        except ValueError:
            value = ""
        if isinstance(value, str | list | dict):
            raise NoCallError("a value is neither a number nor a word that JSON knows")
        self._give(word.strip())
        return char

    def _quoted(self) -> Generator[None, str, None]:
        quote = self._form.quote
        for expected in quote[1:]:
            if (yield) != expected:
                raise NoCallError("a value is not between this model's quotes")
        yield from self._text("", quote)


class _ElementsCall(PushedCall):
    def __init__(self, form: ElementsForm, tools: Mapping[str, Schema]) -> None:
        self._form = form
        super().__init__(tools)

    def _read(self) -> Reading:
        form = self._form
        yield from self._one_of(form.before)
        self.name, _ = yield from self._name_before(self._tools, form.after)
        yield from self._members(self._tools[self.name], form.end)
        return self.arguments

    @property
    def _root(self) -> Schema:
        assert self.name is not None
        return self._tools[self.name]

    def _members(self, schema: Schema, close: str) -> Generator[None, str, None]:
        """Read an object's members, and the text behind them."""
        left, comma = properties_of(schema, self._root), ""
        self._give("{")
        while left:
            tags = {f"{self._form.mark}<{key}>": key for key in left}
            if (tag := (yield from self._one_of(*tags, close))) == close:
                break
            self._give(f"{comma}{_quoted(tags[tag])}: ")
            yield from self._value(left.pop(tags[tag]), f"{self._form.mark}</{tags[tag]}>")
            comma = ", "
        else:
            yield from self._one_of(close)
        self._give("}")

    def _items(self, schema: Schema, close: str) -> Generator[None, str, None]:
        """Read a list's items, and the text behind them."""
        tag, comma = f"{self._form.mark}<item>", ""
        self._give("[")
        while (yield from self._one_of(tag, close)) == tag:
            self._give(comma)
            yield from self._value(schema.get("items", {}), f"{self._form.mark}</item>")
            comma = ", "
        self._give("]")

    def _value(self, schema: Schema, close: str) -> Generator[None, str, None]:
        kinds = _kinds(schema, self._root) - {"null"}
        if kinds <= {"array", "object"}:
            read = self._members if "object" in kinds else self._items
            with self._nested():
                yield from read(container_of(schema, self._root), close)
        elif kinds == {"string"}:
            yield from self._text("", close)
        else:
            text = yield from self._until(close)
            self._give_value(text, kinds)


def _loaded(text: str) -> object:
    try:
        return json_text.loads(text)
    except (ValueError, RecursionError):
        raise NoCallError("it is not JSON") from None


def _kinds(schema: Schema, root: Schema) -> frozenset[str]:
    with suppress(UnservableError):
        return kinds_of(schema, root)
    return KINDS


def _is_name(read: str, name: str) -> bool:
    """Whether `read` is a prefix of this name, or the name and more. White space within the name counts."""
    begun = read.lstrip()
    return name.startswith(begun) or begun.startswith(name)


def _packed(text: str) -> str:
    return "".join(text.split())


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`, and not all of it."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
