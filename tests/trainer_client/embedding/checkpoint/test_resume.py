"""Conversions that are killed at random points, over and over, and end in the bytes of an undisturbed one."""

import os
import random
import signal
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.harness import zygote
from tests.trainer_client.embedding.checkpoint.dumps import check_rows, opened, write_dump
from trainer_client.embedding.checkpoint import CheckpointError, convert, open_checkpoint
from trainer_client.embedding.checkpoint.convert import Format
from trainer_client.embedding.checkpoint.dynamicemb import DynamicEmbDump
from trainer_client.embedding.checkpoint.files import Journal, staging_path
from trainer_client.embedding.routing import hash_roundrobin, roundrobin

CHUNK = 8


def run(root: Path, target_format: Format) -> int:
    """Converts over an older checkpoint; returns the rows taken over from earlier attempts."""
    source = DynamicEmbDump(root / "source", chunk_rows=CHUNK)
    return convert(
        source, root / "target", world_size=3, routing="hash_roundrobin", target_format=target_format, overwrite=True
    ).resumed


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def attempt(root: Path, target_format: Format, kill_at: int) -> int | None:
    """One attempt in a process of its own, killed at its `kill_at`-th call from Python into C.

    Returns:
        The calls that a whole attempt takes, or None if it was killed.
    """
    result = root / "calls"
    child = os.fork()
    if child == 0:
        calls = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            if event == "c_call":
                calls += 1
                if calls == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        resumed = run(root, target_format)
        sys.setprofile(None)
        result.write_text(f"{calls} {resumed}")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return None
    assert status == 0
    return int(result.read_text().split()[0])


def prepare(root: Path) -> None:
    root.mkdir()
    write_dump(root / "source", roundrobin(), 4)
    convert(open_checkpoint(root / "source"), root / "target", world_size=2)


def damage(staging: Path, draw: random.Random) -> None:
    """What a machine that loses its power may do to files that were not yet on the disk."""
    files = [path for path in sorted(staging.rglob("*")) if path.is_file() and path.stat().st_size]
    for path in draw.sample(files, min(3, len(files))):
        data = bytearray(path.read_bytes())
        if draw.random() < 0.5:
            del data[draw.randrange(len(data)) :]
        else:
            at = draw.randrange(len(data))
            data[at : at + 9] = bytes(len(data[at : at + 9]))
        path.write_bytes(data)


def kill_and_resume(root: Path, target_format: Format, seed: int) -> None:
    """The body of the test below, in a process that has started no threads and can fork."""
    torch.set_num_threads(1)
    draw = random.Random(seed)
    prepare(root / "undisturbed")
    calls = attempt(root / "undisturbed", target_format, 0)
    assert calls is not None
    expected = contents(root / "undisturbed" / "target")
    kills = resumed = 0
    for case in range(3):
        here = root / f"case{case}"
        prepare(here)
        old = contents(here / "target")
        for kill_at in (draw.randrange(calls // 4, calls), draw.randrange(1, calls), 0):
            if attempt(here, target_format, kill_at) is not None:
                break  # there was less left to do
            kills += 1
            found = open_checkpoint(here / "target").path  # whichever it is, it is whole
            assert contents(found) in (old, expected)
            if case % 2 and staging_path(found).exists():
                damage(staging_path(found), draw)
        assert contents(here / "target") == expected
        assert sorted(path.name for path in here.iterdir()) == ["calls", "source", "target"]
        resumed += int((here / "calls").read_text().split()[1])
    assert kills >= 3
    assert resumed > 0


@pytest.mark.parametrize("target_format", ["dynamicemb", "dcp"])
def test_killed_at_random_points_it_goes_on_and_ends_in_the_same_bytes(target_format: str, tmp_path: Path) -> None:
    body = zygote.process(kill_and_resume, tmp_path, target_format, 5)
    body.join()
    assert body.exitcode == 0
    check_rows(opened(tmp_path / "case0" / "target"), hash_roundrobin(), 3)


def stop_after(rows: int) -> object:
    def progress(done: int, _total: int) -> None:
        if done >= rows:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("target_format", ["dynamicemb", "dcp"])
def test_only_the_same_work_goes_on(target_format: Format, tmp_path: Path) -> None:
    prepare(tmp_path / "a")
    source, target = tmp_path / "a" / "source", tmp_path / "a" / "new"

    def begin(world_size: int, rows: int) -> int:
        progress = stop_after(rows) if rows else None
        opened = DynamicEmbDump(source, chunk_rows=CHUNK)
        done = convert(opened, target, world_size=world_size, target_format=target_format, progress=progress)  # type: ignore[arg-type]
        return done.resumed

    with pytest.raises(KeyboardInterrupt):
        begin(3, 40)
    assert not target.exists()
    with pytest.raises(KeyboardInterrupt):
        begin(2, 40)  # another number of ranks: anew
    changed = source / "items_emb_values.rank_0.world_size_4"
    os.utime(changed, ns=(1, 1))
    with pytest.raises(KeyboardInterrupt):
        begin(2, 24)  # another file: anew
    assert begin(2, 0) >= 16
    check_rows(opened(target), roundrobin(), 2)


def test_two_processes_do_not_write_one_checkpoint(tmp_path: Path) -> None:
    prepare(tmp_path / "a")
    work = staging_path(tmp_path / "a" / "new")
    work.mkdir()
    held = Journal(work / "journal", {"other": 1})
    with pytest.raises(CheckpointError, match=r"\.new\.writing: another process writes this checkpoint"):
        convert(opened(tmp_path / "a" / "source"), tmp_path / "a" / "new", world_size=2)
    held.close()
    convert(opened(tmp_path / "a" / "source"), tmp_path / "a" / "new", world_size=2)


def test_a_line_that_was_cut_off_and_what_follows_it_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, {"work": 1})
    for number in range(3):
        journal.append({"number": number})
    journal.close()
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged, left in ((lines[2][:-1], 1), (lines[2].replace(b"1", b"7"), 1), (b"\n", 1), (lines[2], 3)):
        path.write_bytes(b"".join([*lines[:2], damaged, *lines[3:]]))
        journal = Journal(path, {"work": 1})
        assert journal.entries == [{"number": number} for number in range(left)]
        journal.close()
    journal = Journal(path, {"work": 2})
    assert journal.entries == []
    journal.close()
