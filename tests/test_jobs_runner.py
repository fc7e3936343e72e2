"""How a job asks its rows."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import trio

from uma.jobs import Progress, Results, RowAnswer, RowForm, Runner, read_rows

ROWS, AT_ONCE = 200, 32


class InOrder:
    """Answers rows, and keeps in which order they were asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def __call__(self, path: str, body: bytes, id: str) -> RowAnswer:
        self.asked.append(int(id.rpartition("-")[2]))
        await trio.lowlevel.checkpoint()
        return RowAnswer(200, b"{}")

    async def progress(self) -> dict[str, Progress]:
        return {}


async def test_rows_are_asked_in_their_order_so_that_the_first_result_comes_first(tmp_path: Path) -> None:
    rows = b"".join(b'{"prompt": "%d"}\n' % number for number in range(ROWS))
    for attempt in range(5):
        ask = InOrder()
        with closing(Results.open(tmp_path / f"{attempt}.jsonl", {"version": 1})) as results:
            assert await Runner(ask, read_rows(io.BytesIO(rows)), RowForm(), results, AT_ONCE).run()
        assert ask.asked == sorted(ask.asked)
        assert len(ask.asked) == ROWS
