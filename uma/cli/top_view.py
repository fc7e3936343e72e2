"""`uma top` on a screen of a given size: a state becomes something that rich can draw. Pure.

Names come from other programs, so each text goes through `sanitize_line`, and none is read as rich's markup.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from uma import figures
from uma.cli import words
from uma.cli.sanitize import sanitize_line
from uma.cli.top_state import SECONDS, SHORT, RequestRow, TopState, WatchedServer, pid_of, program_of
from uma.metrics.histogram import MS_BOUNDS
from uma.metrics.live import Percentiles

BLOCKS = "▁▂▃▄▅▆▇█"
MIN_COLUMNS = 60
"""Narrowest screen on which nothing that matters is cut."""
GAP = 2
"""Columns between two of the table's."""
MAX_PROGRAMS = 5
"""Maximum programs whose share is shown by itself."""
KEYS_COLUMNS = 14
"""Columns of the keys in the help."""
REQUESTS_PART = 3
"""The requests have one of so many parts of the screen at least, where there are enough of them."""
MIN_NAME = 12
"""Columns that the name of a server's model has at least, on a line of its own."""
MAX_SPARK = 30
"""Columns of a line of the last minute."""

HELP = (
    ("↑ ↓ or k j", "choose a request"),
    ("s, r", "order: start, speed, first token, worst gap, prompt, program; reversed"),
    ("/", "show requests whose program, id or model has this; Esc: all"),
    ("space or p", "hold what is shown; figures go on behind it"),
    ("x", "end the chosen request, after asking"),
    ("q or Ctrl-C", "leave"),
    ("read, starts", "how much of the prompt is read; when one that waits is expected to start"),
    ("first, gap", "the wait for the first token; the longest one between two"),
    ("cells", "tokens in the model's memory: of requests that run, and cached for prompts that begin alike"),
    ("in RAM", "such beginnings moved out of cells, which are not read again"),
    ("on its cores", "threads that compete with the model for processor cores, and slow it down"),
    (SHORT, "programs whose requests were too short to be seen one by one"),
)


@attrs.frozen
class Column:
    """A column of the requests: from which width of the screen on it is there, and what it shows."""

    title: str
    width: int
    from_columns: int
    show: Callable[[RequestRow], str]
    justify: Literal["left", "right"] = "right"


def _lane(row: RequestRow) -> str:
    return words.LANES.get(row.request.priority, str(row.request.priority))


def _ms(value: float | None) -> str:
    return "" if not value else words.duration(value)


PID_FROM_COLUMNS = 120
"""Narrowest screen with a column for processes."""
COLUMNS = (
    Column("lane", max(map(len, words.LANES.values())), 80, _lane, "left"),
    Column("state", 13, 60, lambda row: row.state, "left"),
    Column("read", 5, 60, lambda row: f"{math.floor(100 * row.read_share)} %"),
    Column("tok/s", 5, 60, lambda row: figures.figure(row.tokens_per_sec) if row.tokens_per_sec else ""),
    Column("first", 6, 60, lambda row: _ms(row.request.ttft_ms)),
    Column("gap", 6, 80, lambda row: _ms(row.request.worst_gap_ms)),
    Column("starts", 7, 80, lambda row: "" if row.starts_in_ms is None else f"~{words.duration(row.starts_in_ms)}"),
    Column("prompt", 8, 120, lambda row: f"{row.request.prompt_tokens:,}"),
    Column("cached", 8, 140, lambda row: f"{row.request.cached_tokens:,}"),
    Column("written", 8, 120, lambda row: f"{row.request.generated_tokens:,}"),
    Column("age", 7, 120, lambda row: words.duration(row.request.age_ms)),
    Column("pid", 8, PID_FROM_COLUMNS, lambda row: pid_of(row.request.origin)),
    Column("id", 30, 200, lambda row: row.request.id, "left"),
)
MODEL = Column("model", 20, 80, lambda row: row.model, "left")
"""A column where requests have several models; what is left of the screen is the others'."""


def draw(state: TopState, columns: int, lines: int | None = None) -> RenderableType:
    """The whole screen; without `lines` as long as it needs to be, and without a word of keys."""
    head = _head(state, columns)
    foot = [] if lines is None else _foot(state, columns)
    if state.mode == "help":
        return Group(*_help(head, len(foot), columns, lines), *foot)
    rows = state.rows()
    if lines is not None:
        most = max(1, lines - len(foot) - 3 - min(max(1, len(rows)), lines // REQUESTS_PART))
        for level in (1, 2):
            head = head if len(head) <= most else _head(state, columns, level)
        head = head[:most]
    # Below the head are an empty line, the columns' titles, and how many rows are missing.
    left = None if lines is None else max(1, lines - len(head) - len(foot) - 3)
    return Group(*head, Text(), *_requests(state, rows, columns, left), *foot)


def _head(state: TopState, columns: int, level: int = 0) -> list[Text]:
    """What stands above the requests. Of several servers an idle one has a line; on level 1 idle ones have one together
    beside the first, and on level 2 each other one has a line, too.
    """
    head = [_title(state, columns)]
    if not state.shown:
        head.append(Text("waiting for the first figures …", style="dim"))
    lines: list[Text] = []
    folded = [where for where, server in state.shown.items() if where != state.first and _has_no_news(server)]
    folded = folded if level and len(folded) > 1 else []
    for where, server in state.shown.items():
        if where in folded:
            continue
        if len(state.shown) > 1 and (level > 1 or server.is_idle):
            lines.append(_server_line(where, server, columns))
        else:
            head += _server(where, server, columns)
    if folded:
        lines.append(_plain(f"{len(folded)} others idle", "dim"))
    return [*head, *([Text(), *lines] if lines else []), *_programs(state, columns)]


def _has_no_news(server: WatchedServer) -> bool:
    return server.is_idle and not server.lost and not (server.newest and server.newest.metrics.get("paused_sec"))


def _help(head: list[Text], foot: int, columns: int, lines: int | None) -> list[Text]:
    """The keys first, then what words mean, as far as there are lines; the last of them says how many are missing."""
    told = [line for entry in HELP for line in _help_lines(*entry, columns)]
    left = len(told) if lines is None else max(1, lines - 2 - foot)
    if len(told) > left:
        hidden = len(told) - left + 1
        told = [*told[: left - 1], Text(f"and {hidden} more lines in a taller window", style="dim")]
    return [*(head if lines is None else head[: max(1, left - len(told) + 1)]), Text(), *told]


def _help_lines(keys: str, what: str, columns: int) -> list[Text]:
    parts = textwrap.wrap(what, max(columns - KEYS_COLUMNS - 2, 20))
    return [
        Text.assemble((f"  {'' if at else keys:<{KEYS_COLUMNS}}", "bold"), part, no_wrap=True, overflow="ellipsis")
        for at, part in enumerate(parts)
    ]


def _plain(text: str, style: str = "") -> Text:
    return Text(sanitize_line(text), style=style, no_wrap=True, overflow="ellipsis")


def _title(state: TopState, columns: int) -> Text:
    figures = [server.newest.figures for server in state.shown.values() if server.newest]
    running, waiting = sum(now.running for now in figures), sum(now.waiting for now in figures)
    n = len(state.shown)
    title = Text("uma top", style="bold", no_wrap=True, overflow="ellipsis")
    title.append(f"  {n} server{'s' * (n != 1)} · {running:,} running · {waiting:,} waiting", "not bold")
    if state.paused is not None:
        title.append("  PAUSED", "bold yellow")
    if state.filter or state.mode == "filter":
        title.append(f"  /{sanitize_line(state.filter)}{'▏' * (state.mode == 'filter')}", "bold cyan")
    title.truncate(columns, overflow="ellipsis")
    return title


def _server_line(where: str, server: WatchedServer, columns: int) -> Text:
    frame = server.newest
    if frame is None:
        parts = [*([_plain(server.lost, "bold red")] if server.lost else []), _plain(where, "bold cyan")]
    else:
        doing = f"{frame.figures.running:,} running, {frame.figures.waiting:,} waiting"
        doing = "paused" if frame.metrics.get("paused_sec") else "idle" if server.is_idle else doing
        state = _plain(server.lost, "bold red") if server.lost else _plain(doing)
        called = _plain(frame.model, "bold cyan")
        left = columns - state.cell_len - len(sanitize_line(where)) - 2 * 3
        if called.cell_len > left and frame.in_short:
            called = _plain(frame.in_short, "bold cyan")
        called.truncate(max(MIN_NAME, left), overflow="ellipsis")
        parts = [state, called, _plain(where, "dim")]
    line = Text("   ", no_wrap=True, overflow="ellipsis").join(parts)
    line.truncate(columns, overflow="ellipsis")
    return line


def _server(where: str, server: WatchedServer, columns: int) -> list[Text]:
    frame = server.newest
    called = sanitize_line(where if frame is None else frame.model)
    *names, name = (_plain(line, "bold cyan") for line in textwrap.wrap(called, columns) or [""])
    parts = [name] if frame is None else [name, _plain(where, "dim")]
    if frame is not None and frame.pid is not None:
        parts.append(_plain(f"pid {frame.pid}", "dim"))
    if frame is not None and frame.rss_bytes:
        parts.append(_plain(figures.size(frame.rss_bytes)))
    shown = [Text(), *_flow(names, columns), *_flow(parts, columns)]
    if server.lost:
        shown.append(_plain(server.lost, "bold red"))
    if frame is None:
        return shown
    metrics, known = frame.metrics, frame.figures
    neighbours = max(of.get("neighbour_load", 0) for of in (metrics, *metrics.get("models", {}).values()))
    spark = max(10, min(MAX_SPARK, (columns - 2 * 26) // 2)) if columns >= 80 else 24
    lines = [
        _spark("writing", server, "written_per_sec", spark, "green"),
        _spark("reading", server, "read_per_sec", spark, "blue"),
    ]
    shown_figures = [
        *_times("first token", known.first_token_ms),
        *_times("between tokens", known.between_tokens_ms),
        *([_cells(metrics)] if metrics.get("kv_cells_total") else []),
        *([] if known.cached_share is None else [_plain(f"from cache {100 * known.cached_share:.0f} %")]),
        *(
            [_plain(f"prefixes in RAM {figures.size(metrics['cache_ram_bytes'])}")]
            if metrics.get("cache_ram_bytes")
            else []
        ),
        *([_plain("paused: `uma resume` continues", "bold yellow")] if metrics.get("paused_sec") else []),
        *([_plain(f"preempted {metrics['preemptions_total']:,}")] if metrics.get("preemptions_total") else []),
        *([_plain(f"other programs' threads on its cores {neighbours:.1f}")] if neighbours else []),
    ]
    return [*shown, *_flow(lines, columns), *_flow(shown_figures, columns)]


def _spark(name: str, server: WatchedServer, figure: str, width: int, style: str) -> Text:
    history = server.history(figure)
    line = Text(f"{name} ", no_wrap=True)
    line.append(sparkline(history, width), style)
    line.append(f" {figures.figure(history[-1]):>6} tok/s", "bold")
    return line


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as so many blocks, each the mean of its part, the highest of them full."""
    parts = [values[at * len(values) // width : max((at + 1) * len(values) // width, 1)] for at in range(width)]
    means = [sum(part) / max(1, len(part)) for part in parts]
    most = max([*means, 1e-9])
    return "".join(BLOCKS[min(len(BLOCKS) - 1, round(mean / most * (len(BLOCKS) - 1)))] for mean in means)


def _times(name: str, times: Percentiles | None) -> list[Text]:
    if times is None:
        return []
    if times.p50 is None or times.p95 is None:
        return [_plain(f"{name} {_about(times.last)} (the last of {times.count})")]
    return [_plain(f"{name} {_about(times.p50)} (95 %: {_about(times.p95)})")]


def _about(ms: float) -> str:
    return f"over {words.duration(ms)}" if ms >= MS_BOUNDS[-1] else words.duration(ms)


def _cells(metrics: Mapping[str, Any]) -> Text:
    total, used = metrics["kv_cells_total"], metrics.get("kv_cells_used", 0)
    cached = min(metrics.get("cache_evictable_size", 0), used)
    width = 10
    busy = math.ceil(width * (used - cached) / total)
    kept = min(width - busy, math.ceil(width * cached / total))
    line = Text("cells ", no_wrap=True)
    line.append("█" * busy, "green").append("▒" * kept, "cyan").append("░" * (width - busy - kept), "dim")
    line.append(f" {used - cached:,} used, {cached:,} cached of {total:,}")
    return line


def _programs(state: TopState, columns: int) -> list[Text]:
    work: Counter[str] = Counter()
    for server in state.shown.values():
        work += server.work()
    total = sum(work.values())
    if not total:
        return []
    shown = [share for share in work.most_common(MAX_PROGRAMS) if share[1] >= total / 200]
    parts = [_plain(f"{name} {100 * tokens / total:.0f} %") for name, tokens in shown]
    rest = total - sum(tokens for _, tokens in shown)
    if rest >= total / 200:
        parts.append(_plain(f"others {100 * rest / total:.0f} %"))
    return [Text(), *_flow([_plain(f"tokens of {SECONDS} s by program:", "bold"), *parts], columns)]


def _flow(parts: Iterable[Text], columns: int) -> list[Text]:
    """The parts side by side, on as many lines as they need."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + 3 + part.cell_len <= columns:
            lines[-1].append("   ").append_text(part)
        else:
            line = Text(no_wrap=True, overflow="ellipsis").append_text(part)
            line.truncate(columns, overflow="ellipsis")
            lines.append(line)
    return lines


def _requests(state: TopState, rows: Sequence[RequestRow], columns: int, left: int | None) -> list[RenderableType]:
    if not rows:
        said = "no request has this" if state.filter else "nothing runs"
        return [Text(said, style="dim")]
    has_models = columns >= MODEL.from_columns and any(_names_model(state, row) for row in rows)
    left_columns = max(MIN_COLUMNS, columns - MODEL.width - GAP) if has_models else columns
    shown = [MODEL] * has_models + [column for column in COLUMNS if left_columns >= column.from_columns]
    rest = columns - sum(column.width + GAP for column in shown)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), width=columns, header_style="bold")
    table.add_column("program", width=max(8, rest - GAP), no_wrap=True, overflow="ellipsis")
    for column in shown:
        table.add_column(column.title, width=column.width, no_wrap=True, overflow="ellipsis", justify=column.justify)
    first = _first_shown(state, rows, left)
    some = rows[first : len(rows) if left is None else first + left]
    for row in some:
        style = "reverse" if row.key == state.selected else "dim" if row.place is not None else ""
        cells = [_program(row, left_columns), *(column.show(row) for column in shown)]
        table.add_row(*(_plain(cell) for cell in cells), style=style)
    hidden = len(rows) - len(some)
    return [table] if not hidden else [table, Text(f"and {hidden:,} more", style="dim")]


def _names_model(state: TopState, row: RequestRow) -> bool:
    """Whether a request's model has to be told: there are others."""
    return len(state.shown) > 1 or bool(row.request.model)


def _program(row: RequestRow, columns: int) -> str:
    """The program and its key, with its process where that has no column of its own."""
    origin = row.request.origin
    pid = "" if columns >= PID_FROM_COLUMNS else pid_of(origin)
    key = next((part for part in origin.split(" · ")[1:] if part.startswith("key ")), "")
    return " ".join(filter(None, [" · ".join(filter(None, [program_of(origin), key])), pid]))


def _first_shown(state: TopState, rows: Sequence[RequestRow], left: int | None) -> int:
    """The first row on the screen: the selected one is always there."""
    at = next((index for index, row in enumerate(rows) if row.key == state.selected), 0)
    return 0 if left is None else max(0, at - left + 1)


def _foot(state: TopState, columns: int) -> list[Text]:
    if state.mode == "confirm" and (row := state.chosen()) is not None:
        end = f" ({row.request.id})? y: yes, any other key: no"
        program = sanitize_line(program_of(row.request.origin))
        program += f" to {sanitize_line(row.model)}" if _names_model(state, row) else ""
        asked = f"end the request of {program}{end}"
        if cell_len(asked) > columns:
            asked = f"end this request of {program}? y / n"
        return [_plain(asked, "bold yellow")]
    if state.note:
        return [_plain(state.note, "yellow")]
    order = f"{state.sort}{' reversed' * state.is_reversed}"
    keys = f"s order: {order}  / filter  space pause  x end  ? help  q leave"
    return [_plain(keys if len(keys) <= columns else f"s: {order}  space pause  x end  ? keys  q leave", "dim")]
