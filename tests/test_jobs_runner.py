"""How a job asks its rows."""

from __future__ import annotations

import io
import json
import math
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from stalled_disk import stalling
from trio.testing import wait_all_tasks_blocked

from uma.jobs import JobChanged, Progress, Results, RowAnswer, RowForm, Runner, in_flight, read_rows
from uma.types import Source

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

    def loading(self) -> str:
        return ""


async def test_rows_are_asked_in_their_order_so_that_the_first_result_comes_first(tmp_path: Path) -> None:
    rows = b"".join(b'{"prompt": "%d"}\n' % number for number in range(ROWS))
    for attempt in range(5):
        ask = InOrder()
        with closing(Results.open(tmp_path / f"{attempt}.jsonl", {"version": 1})) as results:
            assert await Runner(ask, read_rows(io.BytesIO(rows)), RowForm(), results, AT_ONCE).run()
        assert ask.asked == sorted(ask.asked)
        assert len(ask.asked) == ROWS


class OneHangs(InOrder):
    """Answers all rows but the first, and tells when all have been asked."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.has_all = rows, trio.Event()

    async def __call__(self, path: str, body: bytes, id: str) -> RowAnswer:
        answer = await super().__call__(path, body, id)
        if len(self.asked) == self.rows:
            self.has_all.set()
        if id.endswith("row-1"):
            await trio.sleep_forever()
        return answer


class Held(InOrder):
    """Answers rows once it is told to, and tells when all have been asked."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.has_all, self.goes_on = rows, trio.Event(), trio.Event()

    async def __call__(self, path: str, body: bytes, id: str) -> RowAnswer:
        answer = await super().__call__(path, body, id)
        if len(self.asked) == self.rows:
            self.has_all.set()
        await self.goes_on.wait()
        return answer


@pytest.mark.parametrize(("at_once", "is_done"), [(8, True), (7, False)])
async def test_a_job_that_is_stopped_while_its_last_rows_run_is_done(
    tmp_path: Path, at_once: int, is_done: bool
) -> None:
    rows, done = b"".join(b'{"prompt": "%d"}\n' % number for number in range(8)), []
    with closing(Results.open(tmp_path / "out.jsonl", {"version": 1})) as results:
        ask = Held(at_once)
        runner = Runner(ask, read_rows(io.BytesIO(rows)), RowForm(), results, at_once)

        async def run() -> None:
            done.append(await runner.run())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await ask.has_all.wait()
            await wait_all_tasks_blocked(0.05)  # the end of the input is looked for in a thread
            runner.stop()
            ask.goes_on.set()
    assert (done, runner.tally.rows) == ([is_done], at_once)


async def test_what_has_ended_is_kept_until_its_turn_where_an_earlier_row_has_not(tmp_path: Path) -> None:
    out, rows = tmp_path / "out.jsonl", b"".join(b'{"prompt": "%d"}\n' % number for number in range(8))

    async def run(ask: InOrder, header: dict[str, int]) -> int:
        with closing(Results.open(out, header)) as results:
            runner = Runner(ask, read_rows(io.BytesIO(rows)), RowForm(), results, AT_ONCE)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runner.run)
                if isinstance(ask, OneHangs):
                    await ask.has_all.wait()
                    await wait_all_tasks_blocked()
                    nursery.cancel_scope.cancel()
        assert runner.tally.ended_rows == 8 - isinstance(ask, OneHangs)
        assert runner.tally.blocking_row == isinstance(ask, OneHangs)
        return runner.tally.kept

    assert await run(OneHangs(8), {"version": 1}) == 7
    assert out.read_bytes() == b""
    with pytest.raises(JobChanged, match="started with other settings"):
        await run(InOrder(), {"version": 2})
    assert await run(rest := InOrder(), {"version": 1}) == 0
    assert rest.asked == [1]
    assert [json.loads(line)["custom_id"] for line in out.read_text().splitlines()] == [f"row-{n}" for n in range(1, 9)]
    assert not await trio.Path(f"{out}.kept").exists()


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


def test_on_cpus_no_more_rows_run_at_once_than_are_computed_faster_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("uma.jobs.runner.cpu_quota", lambda: math.inf)

    def most(gpu_bytes: int, max_sequences: int = 64) -> int:
        limits = SimpleNamespace(max_sequences=max_sequences, max_queue=1_000)
        info = SimpleNamespace(limits=limits, model=SimpleNamespace(gpu_bytes=gpu_bytes))
        return in_flight(cast("Source", SimpleNamespace(info=info)))

    assert (most(0), most(0, 4), most(1)) == (16, 4, 64)
