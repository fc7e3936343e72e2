"""The rows of a job: lines of JSON, or of CSV with columns, and the request that each is.

A row is OpenAI's batch line (`custom_id`, `url`, `body`), or a plain one: `{"prompt": …}`, `{"messages": …}`, or
whatever columns a template names. Reading takes memory for one row at a time, however long the input is.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain, count, islice, zip_longest
from typing import IO, Any

import attrs
import orjson
import xxhash

from uma import json_bytes
from uma.constraints import is_utf8
from uma.errors import ConfigError

MAX_ROW_BYTES = 16_777_216
"""Maximum length of a row. A longer one is bad: twice the longest body that a server takes by default."""
TOO_LONG = f"the row is over {MAX_ROW_BYTES:,} bytes; make several rows of it"
NOT_UTF8 = "the row is not UTF-8; write the file in that encoding"
UTF16 = "\udcff\udcfe"
"""How a text in UTF-16 begins, read as UTF-8."""
_CHAT, _COMPLETIONS, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_GENERATING = (_CHAT, _COMPLETIONS, _RESPONSES, "/v1/messages", "/v1/audio/transcriptions")
PATHS = frozenset((*_GENERATING, "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/decisions", "/v1/systemone"))
"""Endpoints that a row's `url` can name."""
_ALIASES = {"/rerank": "/v1/rerank", "/v2/rerank": "/v1/rerank", "/score": "/v1/score"}
"""Other names of endpoints, which vLLM's `run-batch` takes."""
_OF_ALL = ("model", "priority")
"""Defaults that rows have which generate nothing, too."""
GZIP = b"\x1f\x8b"
"""How a file compressed by gzip begins."""
NO_GZIP = "gzip is not supported over HTTP; send the rows uncompressed, or give the file to `uma batch`"
MAX_TOLD = 10
"""Maximum reasons why such rows are wrong that are told, and rows that are named for each."""
MISSPELT = 0.9
"""Similarity, as `difflib` has it, from which on a name that is not known is a known one misspelt: of `temprature`, not
of another API's `speed` or `top_a`."""
MAX_NAMES = 256
"""Maximum names for which it is kept whether they are misspelt."""
MAX_IDS = 250_000
"""Maximum rows whose name no later row can have again: some 25 MB, five times what OpenAI takes in a file."""
NAMES = ("custom_id", "id")
"""Fields that name a row's result, the first one that it has; OpenAI's batch lines have the first alone."""
_HOLE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


class BadInput(ConfigError):
    """The input cannot be read to its end: damaged compression, or no CSV."""

    code = "E_JOB_INPUT"


class BadRow(ValueError):
    """A row that can be no request. The message says why."""

    custom_id: str | None = None
    """The row's own, where that much of it can be read and no earlier row has it."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code
        """What is wrong, as OpenAI's batches have it."""


@attrs.frozen
class JobRow:
    """A row as the input has it."""

    number: int
    """Number of the row from 0, blank lines not counted."""
    data: bytes | Mapping[str, Any]
    """A line, or a row of CSV by column."""
    digest: int
    """Digest of its bytes."""
    line: int
    """The line of the input, from 1 on, where it begins."""
    fault: str = ""
    """Why it can be no request, where that is seen as it is read."""


@attrs.frozen
class RowRequest:
    """The request that a row is."""

    path: str
    body: Mapping[str, Any]
    custom_id: str
    empty: frozenset[str] = frozenset()
    """Columns of the template that the row leaves empty."""
    ignored: tuple[str, ...] = ()
    """Options, and fields of the row, that have no effect."""

    @property
    def prompt(self) -> bytes:
        """What the model reads first, for finding rows that begin alike."""
        parts = (self.body.get(name) for name in ("instructions", "system", "messages", "prompt", "input", "state"))
        return b"".join(orjson.dumps(part, default=str) for part in parts if part is not None)


@attrs.frozen(kw_only=True)
class RowForm:
    """How plain rows become requests."""

    template: str | None = None
    """The prompt, with `{column}` where a column's value goes."""
    system: str | None = None
    """Instructions, ahead of the prompt."""
    schema: Mapping[str, Any] | None = None
    """JSON Schema that every answer fits."""
    is_raw: bool = False
    """Prompts are continued as they stand, without a chat template."""
    endpoint: str | None = None
    """The one that every row must name; None: any of `PATHS`."""
    defaults: Mapping[str, Any] = attrs.field(factory=dict)
    """Fields of a body that generates, where the row has none of that name; every body has the model and the lane."""
    fields: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    """Names of each endpoint's fields, of which none can be misspelt; others than these are the endpoint's to judge."""

    def asked(self, row: JobRow) -> RowRequest:
        """The request that `row` is. Raises `BadRow`."""
        fields = _object(row.data) if row.data else {}
        try:
            request = self._of(fields, row)
        except BadRow as error:
            given = None if row.fault.startswith(NAMES) else fields.get("custom_id", fields.get("id"))
            error.custom_id = None if given is None else str(given)
            raise
        if not request.body.get("stream"):
            return request
        whole = {name: value for name, value in request.body.items() if name != "stream"}
        return attrs.evolve(request, body=whole, ignored=(*request.ignored, "stream"))

    def _of(self, fields: Mapping[str, Any], row: JobRow) -> RowRequest:
        if row.fault:
            raise BadRow(row.fault, "duplicate_custom_id" if row.fault.startswith(NAMES) else "invalid_json_line")
        is_ready = self.endpoint is not None or "body" in fields or "url" in fields
        if self.template is None and is_ready:
            return self._ready(fields, row)
        custom_id = fields.get("custom_id", fields.get("id"))
        path, body = self._filled(fields) if self.template is not None else self._plain(fields)
        _check_names(body, self.fields.get(path, ()), f"no field of {path}")
        holes = (found[1] for found in _HOLE.finditer(self.template or ""))
        empty = frozenset(name for name in holes if fields.get(name) == "")
        return RowRequest(path, self._with_defaults(path, body), _id(custom_id, row), empty)

    def _ready(self, fields: Mapping[str, Any], row: JobRow) -> RowRequest:
        """OpenAI's batch line."""
        given, body = fields.get("url"), fields.get("body")
        path = _ALIASES.get(str(given), str(given))
        if path not in (allowed := PATHS if self.endpoint is None else {self.endpoint}):
            words = ("one of " if self.endpoint is None else "") + ", ".join(sorted(allowed))
            hint = "" if "body" in fields or self.endpoint else " (--template makes a prompt of columns)"
            raise BadRow(f"url: expected {words}, not {_shown(given)}{hint}", "invalid_url")
        if not isinstance(body, dict):
            raise BadRow(f"body: expected a JSON object, not {_shown(body)}", "missing_required_parameter")
        if fields.get("method", "POST") != "POST":
            raise BadRow(f"method: expected POST, not {_shown(fields['method'])}", "invalid_method")
        if self.endpoint is not None and not fields.get("custom_id"):
            raise BadRow("custom_id: expected a name of the row", "missing_required_parameter")
        _check_names(body, self.fields.get(path, ()), f"no field of {path}", "body.")
        options = {"--system": self.system is not None, "--schema": self.schema is not None, "--raw": self.is_raw}
        ignored = tuple(name for name, is_given in options.items() if is_given)
        return RowRequest(path, self._with_defaults(path, body), _id(fields.get("custom_id"), row), ignored=ignored)

    def _filled(self, fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        return self._prompted(filled(self.template or "", fields), {})

    def _plain(self, fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        rest = {name: value for name, value in fields.items() if name not in ("custom_id", "id", "prompt", "messages")}
        if "messages" in fields and "prompt" not in fields:
            if self.is_raw:
                raise BadRow("messages: a conversation needs the chat template that --raw leaves out")
            messages = fields["messages"]
            if self.system is not None and isinstance(messages, list):
                messages = [{"role": "system", "content": self.system}, *messages]
            return _CHAT, {"messages": messages, **self._schema(), **rest}
        if "prompt" in fields and not isinstance(fields["prompt"], str):
            raise BadRow(f"prompt: expected a text, not {_shown(fields['prompt'])}")
        if "prompt" not in fields:
            why = "expected a prompt, messages, or url and body"
            _check_names(fields, ("prompt", "messages"), why)
            has = ", ".join(sorted(map(str, fields)))[:200] or "nothing"
            raise BadRow(f"{why}; the row has {has} (--template makes a prompt of columns)")
        return self._prompted(fields["prompt"], rest)

    def _prompted(self, prompt: str, rest: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        if self.is_raw:
            return _COMPLETIONS, {"prompt": prompt, **self._schema(), **rest}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return _CHAT, {"messages": [*system, {"role": "user", "content": prompt}], **self._schema(), **rest}

    def _schema(self) -> dict[str, Any]:
        if self.schema is None:
            return {}
        named = {"name": "answer", "strict": True, "schema": self.schema}
        return {"response_format": {"type": "json_schema", "json_schema": named}}

    def _with_defaults(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if path not in _GENERATING:
            return {**{name: self.defaults[name] for name in _OF_ALL if name in self.defaults}, **body}
        defaults = dict(self.defaults)
        bound = defaults.pop("max_tokens", None)
        if bound is not None and path == _RESPONSES:
            defaults["max_output_tokens"] = bound
        elif bound is not None and "max_completion_tokens" not in body:
            defaults["max_tokens"] = bound
        return {**defaults, **body}


def filled(template: str, fields: Mapping[str, Any]) -> str:
    """`template` with the values of its columns; `{{`, `}}` are braces. Raises `BadRow` for one there is not."""

    def value(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0][0]
        if found[1] not in fields:
            columns = ", ".join(map(str, fields))[:200]
            raise BadRow(f"--template: there is no column {found[1]!r} in the row; it has {columns or 'none'}")
        given = fields[found[1]]
        return given if isinstance(given, str) else json_bytes.dumps(given).decode()

    return _HOLE.sub(value, template)


def has_columns(template: str) -> bool:
    """Whether `template` takes anything of a row."""
    return any(found[1] is not None for found in _HOLE.finditer(template))


def judge_rows(form: RowForm, rows: Iterable[JobRow]) -> int | None:
    """How many rows there are; None where they cannot be read to the end, which is told behind the results of those
    before. Raises `ConfigError` where some of them can be no requests; it names their lines, each with its reason.
    """
    lines, total, wrong = dict[str, list[str]](), 0, 0
    try:
        for row in rows:
            total += 1
            try:
                form.asked(row)
            except BadRow as error:
                wrong += 1
                if str(error) in lines or len(lines) < MAX_TOLD:
                    lines.setdefault(str(error), []).append(f"{row.line:,}")
        is_whole = True
    except BadInput:
        is_whole = False
    if wrong:
        told = [_wrong(numbers, why) for why, numbers in lines.items()]
        head = f"{wrong:,} of {total:,} rows are wrong:\n" if wrong > 1 else ""
        rest = wrong - sum(map(len, lines.values()))
        raise ConfigError(head + "\n".join(told) + (f"\nand {rest:,} more, for other reasons" if rest else ""))
    return total if is_whole else None


def _wrong(lines: Sequence[str], why: str) -> str:
    """Lines of some rows, and what is wrong with all of them."""
    shown = ", ".join(lines[:MAX_TOLD]) + " …" * (len(lines) > MAX_TOLD)
    return f"line{'s' * (len(lines) > 1)} {shown}: {why}"


def _check_names(given: Mapping[str, Any], known: tuple[str, ...], why: str, place: str = "") -> None:
    """Raise `BadRow` for a name that is nearly a known one, which is not there beside it."""
    for name in islice((name for name in given if name not in known), len(known)):
        if (near := _near(name, known)) not in given:
            raise BadRow(f"{place}{name}: {why}; did you mean {near}?")


@lru_cache(MAX_NAMES)
def _near(name: str, known: tuple[str, ...]) -> str:
    """The name that this one is, misspelt, or itself. Rows have the same names over and over, and it takes long."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=MISSPELT)), name)


def read_rows(file: IO[bytes], *, is_csv: bool = False, takes_gzip: bool = True) -> Generator[JobRow, None, None]:
    """The rows of `file`, which can be compressed where it `takes_gzip`. Blocks where the file does. Raises `BadInput`
    and `OSError`.
    """
    is_compressed = False
    if isinstance(file, io.BufferedReader):
        if not (head := file.peek(2)):
            return  # a terminal would be read again behind its first Ctrl-D
        is_compressed = head[:2] == GZIP
    if is_compressed and not takes_gzip:
        raise BadInput(NO_GZIP)
    inner = gzip.GzipFile(fileobj=file) if is_compressed else file
    try:
        known: dict[str, int] = {}
        for row in _csv_rows(inner) if is_csv else _lines(inner):
            yield attrs.evolve(row, fault=row.fault or _shared_id(row, known))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(f"the input's compression is damaged: {error}") from None


def _shared_id(row: JobRow, known: dict[str, int]) -> str:
    """Why results of a row could not be told from an earlier one's; `known` has lines by name, and gets this."""
    with suppress(BadRow):
        is_named = not isinstance(row.data, bytes) or b'id"' in row.data
        fields = _object(row.data) if is_named and row.data else {}
        name = next((name for name in NAMES if name in fields), "")
        given = None if name == "id" and "body" in fields else fields.get(name)
        if given and (first := known.get(str(given))) is not None:
            both = f"line {first:,} and of line {row.line:,}"
            return f"{name}: {_shown(given)} is that of {both}; ids must be unique: change one"
        if given and len(known) < MAX_IDS:
            known[str(given)] = row.line
    return ""


def _lines(file: Any) -> Iterator[JobRow]:
    number = 0
    for at in count(1):
        if not (line := file.readline(MAX_ROW_BYTES)):
            return
        if at == 1:
            line = line.removeprefix(codecs.BOM_UTF8)  # as programs of Windows begin a text
        digest, is_too_long = xxhash.xxh3_64(line), False
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(MAX_ROW_BYTES)):
            digest.update(rest)
            line, is_too_long = b"", True
        if not is_too_long and not line.strip():
            continue
        if not is_too_long:
            digest = xxhash.xxh3_64(line.rstrip(b"\r\n"))  # the last line can get its newline later
        yield JobRow(number, line, digest.intdigest(), at, TOO_LONG if is_too_long else "")
        number += 1


def _csv_rows(file: Any) -> Iterator[JobRow]:
    csv.field_size_limit(MAX_ROW_BYTES)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    first = next(text, "")
    if first.startswith(UTF16):
        raise BadInput("the input is UTF-16; write it as UTF-8, as with iconv -f UTF-16 -t UTF-8")
    lines = _Lines(chain([first], text))
    delimiter = next((mark for mark in ";\t" if mark in first and "," not in first), ",")
    table = csv.reader(lines, delimiter=delimiter)
    names: list[str] | None = None
    number, line = 0, 1
    try:
        for values in table:
            if lines.is_over:  # each other row is there before the reader asks for a line behind it
                raise BadInput(f"the input is not CSV: a quote in the row of line {line:,} is never closed; close it")
            if values and names is None:
                names = values
            elif values and names is not None:
                yield _csv_row(number, names, values, line)
                number += 1
            line = table.line_num + 1
    except csv.Error as error:
        raise BadInput(f"the input is not CSV: {error} (line {table.line_num:,})") from None
    finally:
        with suppress(ValueError):  # where the file is closed already
            text.detach()


def _csv_row(number: int, names: Sequence[str], values: Sequence[str], line: int) -> JobRow:
    """A row with a value for each name: where some are missing they are empty, and where there are more it is bad."""
    fields = {name: value for name, value in zip_longest(names, values[: len(names)], fillvalue="") if name}
    more, fault = values[len(names) :], ""
    written = "\x1f".join(f"{name}\x1e{value}" for name, value in fields.items())
    if any(more):
        written = "\x1f".join([written, *more])
        fault = (
            f"the row has {len(values):,} values, and the first line {len(names):,} names: a comma within a value "
            'needs quotes around it ("a, b")'
        )
    digest = xxhash.xxh3_64_intdigest(written.encode("utf-8", "surrogateescape"))
    return JobRow(number, fields, digest, line, fault)


@attrs.define
class _Lines:
    """Lines, and whether there is no other."""

    _lines: Iterable[str]
    is_over: bool = False

    def __iter__(self) -> Iterator[str]:
        yield from self._lines
        self.is_over = True


def _object(data: bytes | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(data, bytes):
        if any(not isinstance(cell, str) or not is_utf8(cell) for cell in data.values()):
            raise BadRow(NOT_UTF8, "invalid_json_line")
        return data
    try:
        value = json_bytes.loads(data)
    except ValueError as error:
        if not _is_utf8(data):
            raise BadRow(NOT_UTF8, "invalid_json_line") from None
        fault = re.sub(r": line 1 (column \d+) .*", r" at \1", json_bytes.fault(error))  # line 1 is the file's to many
        hint = "; each line must be a JSON object of its own" if fault.startswith("is not JSON") else ""
        raise BadRow(f"the row {fault}{hint}", "invalid_json_line") from None
    if not isinstance(value, dict):
        raise BadRow(f"the row must be a JSON object, not {_shown(value)}", "invalid_json_line")
    return value


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _id(given: Any, row: JobRow) -> str:
    return f"row-{row.number + 1}" if given is None else str(given)


def _shown(value: Any) -> str:
    text = json_bytes.dumps(value).decode()
    return text if len(text) <= 80 else text[:80] + "…"
