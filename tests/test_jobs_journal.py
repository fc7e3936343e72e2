"""A job's results on disk: whatever tears them, no whole result is lost and none is there twice."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from stalled_disk import stalling

from uma.jobs import JobChanged, Results
from uma.jobs.journal import WINDOW, CannotWrite, EndedRow

HEADER: dict[str, Any] = {"model": {"name": "tiny"}, "sampling": {"stop": ("a", "b")}}
LINES = [b'{"row": %d, "text": "%s"}\n' % (number, b"x" * (7 * number)) for number in range(6)]


@contextmanager
def opened(path: Path, header: dict[str, Any] = HEADER, **how: Any) -> Iterator[Results]:
    """The job, closed with the block."""
    results = Results.open(path, header, **how)
    try:
        yield results
    finally:
        results.close()


@contextmanager
def no_file_over(n_bytes: int) -> Iterator[None]:
    """A disk that is full, as far as writing files is concerned."""
    before, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def ended(number: int, line: bytes = b"", *, is_failed: bool = False) -> EndedRow:
    return EndedRow(number, 100 + number, line or LINES[number], is_failed)


def done_in(results: Results, rows: int = len(LINES)) -> list[int]:
    """The rows that have a result."""
    return [number for number in range(rows) if results.finished.find(number) is not None]


def journal(path: Path) -> Path:
    return path.with_name(path.name + ".journal")


def test_a_crash_at_any_byte_costs_the_torn_row_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out) as results:
        for number in range(len(LINES)):
            results.append([ended(number)])
    whole, entries = out.read_bytes(), journal(out).read_bytes()
    first = entries.index(b"\n") + 1
    for cut in range(first, len(entries) + 1):
        # The line is written before its entry, so OUT has at least what the journal tells of, and perhaps more.
        journal(out).write_bytes(entries[:cut])
        kept = entries[first:cut].count(b"\n")
        out.write_bytes(whole[: len(b"".join(LINES[:kept])) + cut % 40])
        with opened(out) as results:
            assert done_in(results) == list(range(kept))
            results.append([ended(number) for number in range(kept, len(LINES))])
        assert out.read_bytes() == whole


def test_of_results_that_come_together_a_full_disk_takes_as_many_as_there_is_space_for(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    lines = [b'{"row": %d, "text": "%s"}\n' % (number, b"x" * 400) for number in range(5)]
    with opened(out) as results, no_file_over(1_000), pytest.raises(CannotWrite, match="what is in it is kept"):
        results.append([ended(number, line) for number, line in enumerate(lines)])
    with opened(out) as results:
        assert done_in(results) == [0, 1]
        assert out.read_bytes() == b"".join(lines[:2])


def test_a_power_cut_that_lost_results_but_not_their_entries_loses_those_rows_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out) as results:
        results.append([ended(number) for number in range(len(LINES))])
    whole = out.read_bytes()
    for cut in range(len(whole)):
        entries = journal(out).read_bytes()
        out.write_bytes(whole[:cut] + bytes(len(whole) - cut))  # a file system gives zeros for what was never written
        with opened(out) as results:
            kept = whole[:cut].count(b"\n")
            assert done_in(results) == list(range(kept))
            results.append([ended(number) for number in range(kept, len(LINES))])
        assert out.read_bytes() == whole
        assert journal(out).read_bytes() == entries


def test_what_an_editor_changed_is_an_error_and_not_cut_off(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out) as results:
        results.append([ended(number) for number in range(4)])
        results.sync()
        results.append([ended(4)])
    changed = out.read_bytes().replace(b'"row": 2', b'"row": 7')
    out.write_bytes(changed)
    with pytest.raises(JobChanged, match=r"was changed after byte \d+ \(2 results\)"), opened(out):
        pass
    assert out.read_bytes() == changed
    with opened(out, restart=True) as results:
        assert done_in(results) == []
    assert out.read_bytes() == b""


@pytest.mark.parametrize("now", [{**HEADER, "model": {"name": "other"}}, {"model": HEADER["model"]}])
def test_another_model_and_other_settings_are_named(tmp_path: Path, now: dict[str, Any]) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out) as results:
        results.append([ended(0)])
    (name,) = (each for each in HEADER if HEADER[each] != now.get(each))
    name = {"model": r"started with other settings: model\.name"}.get(name, name)
    with pytest.raises(JobChanged, match=rf"{name} was .* now.*--only-failed.*--restart"), opened(out, now):
        pass
    assert out.read_bytes() == LINES[0]


def test_settings_can_change_as_long_as_there_is_no_result(tmp_path: Path) -> None:
    out, other = tmp_path / "out.jsonl", {**HEADER, "sampling": {}}
    with opened(out):
        pass
    with opened(out, other) as results:
        results.append([ended(0)])
    with opened(out, other) as results:
        assert done_in(results) == [0]


@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to"])
def test_a_file_has_one_job_at_a_time_whatever_link_leads_to_it(tmp_path: Path, kind: str) -> None:
    out, link = tmp_path / "out.jsonl", tmp_path / "folder" / "link.jsonl"
    link.parent.mkdir()
    with opened(out) as results:
        getattr(link, kind)(out)
        with pytest.raises(JobChanged, match="another process writes results there"), opened(link):
            pass
        results.append([ended(0)])
    assert out.read_bytes() == LINES[0]
    if kind == "symlink_to":
        with opened(link) as results:
            assert done_in(results) == [0]


def test_a_file_that_is_no_job_s_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(b"my thesis\n")
    with pytest.raises(JobChanged, match="no journal"), opened(out):
        pass
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_bytes() == b"my thesis\n"


def test_what_cannot_be_written_is_named_with_what_results_need(tmp_path: Path) -> None:
    nowhere = tmp_path / "nothing" / "out.jsonl"
    with pytest.raises(CannotWrite, match=rf"{nowhere}.journal: No such file.*a folder that exists"), opened(nowhere):
        pass
    with pytest.raises(JobChanged, match=r"is no file.*name one"), opened(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_full_disk_at_the_start_is_told_with_its_place(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with no_file_over(10), pytest.raises(CannotWrite, match=r"out.jsonl: File too large.*has space"), opened(out):
        pass
    with opened(out) as results:
        results.append([ended(0)])
    assert out.read_bytes() == LINES[0]


def test_two_processes_cannot_write_to_one_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out), pytest.raises(JobChanged, match="another process"), opened(out):
        pass


def test_only_failed_keeps_good_results_even_where_it_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out) as results:
        results.append([ended(number, is_failed=number in (1, 4)) for number in range(6)])
    with opened(out, only_failed=True) as results:
        (before,) = results.reusable
        found = [before.find(number) for number in range(6)]
        assert [each.is_failed for each in found if each] == [False, True, False, False, True, False]
        results.append([ended(0, before.line(found[0]))])  # type: ignore[arg-type]
    with opened(out) as results:  # killed there, and begun again with or without the option
        assert results.reusable
        assert done_in(results) == [0]
        results.append([ended(number) for number in range(1, 6)])
        results.finish()
    assert out.read_bytes() == b"".join(LINES)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.journal"]


def test_a_row_is_found_wherever_in_the_window_it_ended(tmp_path: Path) -> None:
    out, rows = tmp_path / "out.jsonl", 3 * WINDOW
    order = [number ^ (WINDOW // 2 - 1) for number in range(rows) if number % 7]
    with opened(out) as results:
        results.append([ended(number, b"%d\n" % number) for number in order])
    with opened(out) as results:
        assert done_in(results, rows) == sorted(order)
        assert not results.finished.left()


def test_results_that_are_closed_while_the_disk_stalls_are_free_and_whole_once_it_has_taken_them(
    tmp_path: Path,
) -> None:
    path, line = tmp_path / "out.jsonl", b'{"id": 1}\n'
    with stalling() as disk, opened(path) as results:
        writer = Thread(target=results.append, args=([EndedRow(0, 0, line, is_failed=False)],))
        writer.start()
        disk.is_asked.wait()
        results.close()
        with pytest.raises(JobChanged, match="another process"):
            Results.open(path, HEADER)
        disk.goes_on.set()
        writer.join()
        with opened(path) as again:
            assert again.rows == 1
    assert path.read_bytes() == line


def test_results_that_cannot_be_opened_to_the_end_are_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(CannotWrite, match="Input/output error"):
            Results.open(tmp_path / "out.jsonl", HEADER)
    with opened(tmp_path / "out.jsonl") as results:
        assert results.rows == 0
