"""Directories that appear under their name when they are complete."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer_client.embedding.checkpoint.record import CheckpointError

DUMP_FILE = re.compile(
    r"(?P<table>.+)_(?P<kind>emb|counter)_(?P<array>keys|values|scores|opt_values|frequencies)"
    r"\.rank_(?P<rank>\d+)\.world_size_(?P<ranks>\d+)"
)


def _beside(target: Path, what: str) -> Path:
    whole = Path(os.path.abspath(target))  # `.` has no name of its own
    return whole.with_name(f".{whole.name}.{what}")


@contextmanager
def staging(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A directory `.NAME.writing` beside a target, locked, which takes the target's name when the context ends.

    If an error ends it, the directory is removed. What a killed process left is removed by the next one.
    """
    recover(target)
    if not overwrite and (target.exists() or target.is_symlink()):
        raise CheckpointError(f"{target} exists; choose another name or allow it to be replaced")
    _check_replaceable(target)
    path = _beside(target, "writing")
    path.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDONLY)
    try:
        _lock(lock, path)
        for entry in path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        try:
            yield path
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        _publish(path, target)
    finally:
        os.close(lock)


def _lock(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        current = path.exists() and os.path.samestat(os.fstat(lock), path.stat())
    except BlockingIOError:
        current = False
    except OSError:  # a file system without locks
        current = True
    if not current:
        raise CheckpointError(f"{path}: another process writes this checkpoint; wait for its end, or stop it")


def _publish(path: Path, target: Path) -> None:
    """Gives the directory its name; an older checkpoint of the name is removed afterwards."""
    _check_replaceable(target)
    for written in [*path.rglob("*"), path]:
        _sync(written)
    replaced = _beside(target, "replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    path.rename(target)
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(target: Path) -> None:
    """Puts the old checkpoint back if a process died between the two renamings of `_publish`."""
    replaced = _beside(target, "replaced")
    if replaced.exists() and not target.exists():
        replaced.rename(target)


def _check_replaceable(target: Path) -> None:
    """Checks that nothing is lost with a target but a checkpoint."""
    remedy = "and is not replaced; choose another name"
    if target.is_symlink():
        raise CheckpointError(f"{target} is a symbolic link, {remedy}, or that of what it points to")
    if target.is_file():
        raise CheckpointError(f"{target} is a file and no checkpoint, {remedy}")
    entries = sorted(target.iterdir()) if target.exists() else []
    others = [repr(entry.name) for entry in entries if not (entry.is_file() and _is_of_checkpoint(entry.name))]
    if others:
        named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise CheckpointError(
            f"{target} holds {named}, which belong to no checkpoint of tables and would be gone; "
            "give the checkpoint a directory of its own"
        )


def _is_of_checkpoint(name: str) -> bool:
    named = name == ".metadata" or name.endswith((".distcp", "_opt_args.json"))
    return named or DUMP_FILE.fullmatch(name) is not None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
