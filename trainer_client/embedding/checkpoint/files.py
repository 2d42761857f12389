"""Files that are there whole or not at all, and what an interrupted conversion had finished.

A journal holds lines with checksums, appended as the work goes on.
"""

import fcntl
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

from trainer_client.embedding.checkpoint.record import CheckpointError


def staging_path(target: Path) -> Path:
    """Where a checkpoint is written before it takes its name."""
    return _beside(target, "writing")


def _replaced_path(target: Path) -> Path:
    return _beside(target, "replaced")


def _beside(target: Path, what: str) -> Path:
    whole = Path(os.path.abspath(target))  # `.` has no name of its own
    return whole.with_name(f".{whole.name}.{what}")


def begin(target: Path, *, overwrite: bool, keep: bool = False) -> Path:
    """Makes the staging directory.

    Args:
        target: The checkpoint that is to be written.
        overwrite: Whether there may be an older one.
        keep: Whether what an interrupted attempt left in the staging directory stays there.

    Raises:
        CheckpointError: If the target exists and may not be replaced.
    """
    recover(target)
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists; choose another name or allow it to be replaced")
    staging = staging_path(target)
    if not keep:
        shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True, exist_ok=True)
    return staging


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(target: Path, result: Path | None = None) -> None:
    """Gives a finished directory its name; an older checkpoint of the name is removed afterwards.

    Args:
        target: The name.
        result: The directory, the staging directory or one in it; the staging directory is gone afterwards.
    """
    staging, replaced = staging_path(target), _replaced_path(target)
    result = result if result is not None else staging
    for path in [*result.rglob("*"), result]:
        _sync(path)
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    result.rename(target)
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    shutil.rmtree(staging, ignore_errors=True)


def recover(target: Path) -> None:
    """Puts the old checkpoint back if a process died between the two renamings of `publish`."""
    replaced = _replaced_path(target)
    if replaced.exists() and not target.exists():
        replaced.rename(target)


Entry = dict[str, Any]


def _line(entry: Entry) -> bytes:
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _entry(line: bytes) -> Entry | None:
    if not line.endswith(b"\n") or line[:9] != b"%08x " % zlib.crc32(line[9:-1]):
        return None
    entry: Entry = json.loads(line[9:-1])
    return entry


class Journal:
    """A file of entries, locked while it is open. A line that was cut off, and all behind it, do not count.

    Nothing is forced to the disk: entries carry checksums of the files they speak of, which a run
    that resumes compares with the files.

    Args:
        path: The file; its directory holds the work that the entries speak of.
        identity: What the work is. Entries of other work are dropped.

    Attributes:
        entries: What was found, oldest first; empty if the work begins anew.

    Raises:
        CheckpointError: If another process has the journal open.
    """

    def __init__(self, path: Path, identity: Entry) -> None:
        self._file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise CheckpointError(
                f"{path.parent}: another process writes this checkpoint; wait for its end, or stop it"
            ) from error
        except OSError:
            pass  # a file system without locks
        self._file.seek(0)
        lines, size = [], 0
        for line in self._file.readlines():
            entry = _entry(line)
            if entry is None:
                break
            lines.append(entry)
            size += len(line)
        if lines[:1] == [identity]:
            self._file.truncate(size)
            self.entries = lines[1:]
        else:
            self._file.truncate(0)
            self.append(identity)
            self.entries = []

    def append(self, entry: Entry) -> None:
        """Adds an entry."""
        line = _line(entry)
        written = self._file.write(line)
        if written != len(line):
            raise OSError(f"{self._file.name}: {written} of {len(line)} bytes written; is the disk full?")

    def close(self) -> None:
        """Lets others have the journal."""
        self._file.close()


def fingerprint(directory: Path) -> str:
    """Names, sizes and times of change of a directory's files: what must be equal for work to go on."""
    found = []
    for path in sorted(directory.iterdir()):
        status = os.stat(path)
        found.append([path.name, status.st_size, status.st_mtime_ns])
    return f"{zlib.crc32(json.dumps(found).encode()):08x} of {len(found)} files"
