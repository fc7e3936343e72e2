"""How a job asks its rows."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import trio
from stalled_disk import stalling
from trio.testing import wait_all_tasks_blocked

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


async def test_a_disk_that_stalls_holds_up_no_task_and_no_more_rows_are_asked_than_can_wait_for_it(
    tmp_path: Path,
) -> None:
    rows = b"".join(b'{"prompt": "%d"}\n' % number for number in range(ROWS))
    out, ask, done = tmp_path / "out.jsonl", InOrder(), []

    async def run(results: Results) -> None:
        done.append(await Runner(ask, read_rows(io.BytesIO(rows)), RowForm(), results, AT_ONCE).run())

    with stalling() as disk, closing(Results.open(out, {"version": 1})) as results:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, results)
            await disk.asked()
            await wait_all_tasks_blocked()
            assert len(ask.asked) <= 4 * AT_ONCE
            disk.goes_on.set()
        assert done == [True]
    assert out.read_bytes().count(b"\n") == ROWS


async def test_a_run_is_cancelled_while_the_disk_stalls(tmp_path: Path) -> None:
    out, rows = tmp_path / "out.jsonl", read_rows(io.BytesIO(b'{"prompt": "a"}\n{"prompt": "b"}\n'))
    with stalling() as disk, closing(Results.open(out, {"version": 1})) as results:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Runner(InOrder(), rows, RowForm(), results, 1).run)
            await disk.asked()
            nursery.cancel_scope.cancel()
