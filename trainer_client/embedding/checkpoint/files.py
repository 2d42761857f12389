"""Directories that appear under their name when they are complete."""

import fcntl
import os
import re
import shutil
from pathlib import Path
from types import TracebackType

from trainer_client.embedding.checkpoint.record import CheckpointError

DUMP_FILE = re.compile(
    r"(?P<table>.+)_(?P<kind>emb|counter)_(?P<array>keys|values|scores|opt_values|frequencies)"
    r"\.rank_(?P<rank>\d+)\.world_size_(?P<ranks>\d+)"
)


def _beside(target: Path, what: str) -> Path:
    whole = Path(os.path.abspath(target))  # `.` has no name of its own
    return whole.with_name(f".{whole.name}.{what}")


class Staging:
    """A directory `.NAME.writing` beside a target, locked, which takes the target's name when it is complete.

    As a context it is published at the end, and removed if an error ends it. What a killed process left is removed by
    the next one.

    Attributes:
        path: Where to write; what the context gives.
    """

    def __init__(self, target: Path, *, overwrite: bool) -> None:
        recover(target)
        if not overwrite and (target.exists() or target.is_symlink()):
            raise CheckpointError(f"{target} exists; choose another name or allow it to be replaced")
        _check_replaceable(target)
        self._target, self.path = target, _beside(target, "writing")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            current = self.path.exists() and os.path.samestat(os.fstat(self._lock), self.path.stat())
        except BlockingIOError:
            current = False
        except OSError:  # a file system without locks
            current = True
        if not current:
            os.close(self._lock)
            raise CheckpointError(f"{self.path}: another process writes this checkpoint; wait for its end, or stop it")
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self.publish() if kind is None else self.discard()

    def discard(self) -> None:
        """Removes what was written."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def publish(self) -> None:
        """Gives the directory its name; an older checkpoint of the name is removed afterwards."""
        target, replaced = self._target, _beside(self._target, "replaced")
        _check_replaceable(target)
        for path in [*self.path.rglob("*"), self.path]:
            _sync(path)
        shutil.rmtree(replaced, ignore_errors=True)
        if target.exists():
            target.rename(replaced)
        self.path.rename(target)
        _sync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        os.close(self._lock)


def recover(target: Path) -> None:
    """Puts the old checkpoint back if a process died between the two renamings of `Staging.publish`."""
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
