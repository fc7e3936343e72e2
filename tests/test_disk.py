"""The disk tier: what it touches in the folder it is given, what it counts, and what it gives up first."""

from __future__ import annotations

import json
import logging
import os
import time
from array import array
from pathlib import Path

import pytest
import trio
import trio.testing

from uma.engine.kv.disk import FOLDER, PART_AGE_SEC, PART_SUFFIX, DiskTier
from uma.engine.kv.snapshots import Snapshot
from uma.errors import ConfigError

MINE: dict[str, str | int] = {"model": "mine"}
OTHERS: dict[str, str | int] = {"model": "another"}
KB = 1024
LEFT_OUT = object()
"""In the place of a field's value: the field is not there."""


def snapshot(number: int, size: int = 100 * KB) -> Snapshot:
    """A snapshot of 100 tokens of its own."""
    parts = (os.urandom(size // 2), os.urandom(size - size // 2))
    return Snapshot(array("i", range(1000 * number, 1000 * number + 100)), parts)


async def tier(folder: Path, capacity: int = 350 * KB, identity: dict[str, str | int] | None = None) -> DiskTier:
    disk = DiskTier(folder, identity or dict(MINE), capacity, 10**9)
    await disk.open()
    return disk


def files(folder: Path) -> list[Path]:
    return list((folder / FOLDER).iterdir())


def used(path: Path, seconds_ago: float) -> None:
    when = time.time() - seconds_ago
    os.utime(path, (when, when))


async def has(disk: DiskTier, number: int) -> bool:
    return await disk.fetch(array("i", [*snapshot(number).tokens, 1]), 0) is not None


async def test_what_else_is_in_the_users_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "thesis.tmp").write_text("years of work")
    (tmp_path / "x.tmp").mkdir()
    (tmp_path / "a.umakv").write_bytes(bytes(400 * KB))
    disk = await tier(tmp_path)
    await disk.write(snapshot(1))
    assert {each.name for each in await trio.Path(tmp_path).iterdir()} == {"thesis.tmp", "x.tmp", "a.umakv", FOLDER}
    assert await has(await tier(tmp_path), 1)


async def test_of_its_own_folder_only_plain_files_that_were_left_behind_go(tmp_path: Path) -> None:
    await tier(tmp_path)
    own = tmp_path / FOLDER
    for name, age in (("old", 2 * PART_AGE_SEC), ("young", 0.0)):
        (own / f"{name}{PART_SUFFIX}").write_bytes(b"x")
        used(own / f"{name}{PART_SUFFIX}", age)
    (own / f"folder{PART_SUFFIX}").mkdir()
    (own / "folder.umakv").mkdir()
    (own / "note.tmp").write_text("a note")
    await tier(tmp_path)
    left = {f"young{PART_SUFFIX}", f"folder{PART_SUFFIX}", "folder.umakv", "note.tmp"}
    assert {path.name for path in own.iterdir()} == left


@pytest.mark.parametrize("kind", ["another user's", "a link", "open to others"])
def test_a_folder_that_another_user_may_have_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    own = tmp_path / FOLDER
    if kind == "another user's":
        own.mkdir(mode=0o700)
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)  # this process becomes the other one
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        own.symlink_to(tmp_path / "elsewhere")
    else:
        own.mkdir()
        own.chmod(0o777)
    with pytest.raises(ConfigError, match=r"cache_dir: .* remove it, or name another folder with --cache-dir"):
        DiskTier(tmp_path, dict(MINE), 1, 1)


async def test_its_folder_is_the_users_alone(tmp_path: Path) -> None:
    await tier(tmp_path / "new")
    assert (tmp_path / "new" / FOLDER).stat().st_mode & 0o777 == 0o700


async def test_files_of_other_models_count_and_are_evicted_like_its_own_and_are_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "uma")
    other = await tier(tmp_path, identity=OTHERS)
    for number in (1, 2):
        await other.write(snapshot(number))
    for path in files(tmp_path):
        used(path, 1000)
    disk = await tier(tmp_path)
    assert not caplog.records
    assert disk.size_bytes == other.size_bytes
    for number in (3, 4):
        await disk.write(snapshot(number))
    assert len(files(tmp_path)) == 3
    assert disk.size_bytes == sum(path.stat().st_size for path in files(tmp_path)) <= 350 * KB
    assert [await has(disk, 3), await has(disk, 4)] == [True, True]


async def test_the_file_that_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    disk = await tier(tmp_path)
    for number in (1, 2, 3):
        await disk.write(snapshot(number))
    assert await has(disk, 1)  # the first that was written is now the last that was used
    await disk.write(snapshot(4))
    assert [await has(disk, number) for number in (1, 2, 3, 4)] == [True, False, True, True]


async def test_the_order_of_use_outlives_a_restart(tmp_path: Path) -> None:
    disk = await tier(tmp_path)
    for number in (1, 2, 3):
        await disk.write(snapshot(number))
    for path in files(tmp_path):
        used(path, 1000)
    assert await has(disk, 1)
    again = await tier(tmp_path, capacity=150 * KB)
    assert [await has(again, number) for number in (1, 2, 3)] == [True, False, False]


async def test_a_smaller_capacity_is_kept_to_from_the_start(tmp_path: Path) -> None:
    disk = await tier(tmp_path)
    for number in (1, 2, 3):
        await disk.write(snapshot(number))
    assert len(files(tmp_path)) == 3
    await tier(tmp_path, capacity=50 * KB)
    assert files(tmp_path) == []


async def test_servers_that_share_a_folder_keep_to_one_bound(tmp_path: Path) -> None:
    one, other = await tier(tmp_path), await tier(tmp_path, identity=OTHERS)
    for number in range(4):
        await one.write(snapshot(number))
        await other.write(snapshot(number))
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 350 * KB
    assert {await has(each, 3) for each in (one, other)} == {True}, "what was written last stays"


async def test_what_one_server_has_written_is_found_by_another_of_the_same_model(tmp_path: Path) -> None:
    one, other = await tier(tmp_path), await tier(tmp_path)
    await one.write(snapshot(1))
    await other.write(snapshot(2))
    assert await has(other, 1)


async def test_a_file_that_another_server_uses_stays(tmp_path: Path) -> None:
    one, other = await tier(tmp_path), await tier(tmp_path)
    await one.write(snapshot(1))
    used(files(tmp_path)[0], 60)
    await one.write(snapshot(2))
    await other.write(snapshot(3))
    assert await has(other, 1)
    await one.write(snapshot(4))
    assert await has(await tier(tmp_path), 1) and not await has(await tier(tmp_path), 2)


async def test_a_file_that_was_torn_when_the_machine_stopped_is_found_out_and_removed(tmp_path: Path) -> None:
    await (await tier(tmp_path)).write(snapshot(1))
    (path,) = files(tmp_path)
    with path.open("r+b") as file:
        file.seek(-10 * KB, os.SEEK_END)
        file.write(bytes(10 * KB))
    disk = await tier(tmp_path)
    assert not await has(disk, 1)
    assert not files(tmp_path) and disk.size_bytes == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("ends", [51]), ("ends", None), ("part_bytes", [51 * KB, 49 * KB]), ("part_bytes", [100 * KB]), ("note", 1)),
        ("checksum", LEFT_OUT),
    ],
)
async def test_a_file_whose_header_was_changed_is_found_out_and_removed(
    tmp_path: Path, field: str, value: object
) -> None:
    """With other ends or parts its states would be taken for those of other tokens."""
    whole = snapshot(1)
    await (await tier(tmp_path)).write(Snapshot(whole.tokens, whole.parts, ends={50: os.urandom(KB)}))
    assert await has(await tier(tmp_path), 1)
    (path,) = files(tmp_path)
    data = path.read_bytes()
    behind = 16 + int.from_bytes(data[8:16], "little")
    fields = {**json.loads(data[16:behind]), field: value}
    header = json.dumps({name: kept for name, kept in fields.items() if kept is not LEFT_OUT}).encode()
    path.write_bytes(data[:8] + len(header).to_bytes(8, "little") + header + data[behind:])
    disk = await tier(tmp_path)
    assert not await has(disk, 1)
    assert not disk.offers(array("i", [*whole.tokens, 1]))


async def test_of_the_same_tokens_there_is_one_file_and_it_is_found(tmp_path: Path) -> None:
    """Two servers compute the same prompt, with other last bits where they have other threads."""
    one, other = await tier(tmp_path), await tier(tmp_path)
    tokens = snapshot(1).tokens
    await one.write(Snapshot(tokens, (b"a" * 100 * KB,)))
    await other.write(Snapshot(tokens, (b"b" * 100 * KB,)))
    await other.write(snapshot(2))
    assert len(files(tmp_path)) == 2
    for disk in (other, await tier(tmp_path)):
        assert disk.size_bytes == sum(path.stat().st_size for path in files(tmp_path))
    assert await has(await tier(tmp_path), 1)


async def test_snapshots_that_wait_for_a_slow_disk_are_bounded_and_those_dropped_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, goes_on = await tier(tmp_path, capacity=2_000 * KB), trio.Event()
    write, written = disk.write, list[int]()

    async def write_slowly(each: Snapshot) -> None:
        await goes_on.wait()
        written.append(each.tokens[0] // 1000)
        await write(each)

    monkeypatch.setattr(disk, "write", write_slowly)
    disk.max_queued_bytes = 350 * KB
    async with trio.open_nursery() as nursery:
        nursery.start_soon(disk.run)
        disk.enqueue(snapshot(0))
        await trio.testing.wait_all_tasks_blocked()
        for number in range(1, 9):
            disk.enqueue(snapshot(number))
            assert disk.queued_bytes <= 350 * KB
        disk.enqueue(snapshot(9, size=3_000 * KB))  # larger than the tier
        goes_on.set()
        disk.close()
    assert written == [0, 6, 7, 8]
    assert disk.dropped == 6
    assert "was not written" in caplog.text
