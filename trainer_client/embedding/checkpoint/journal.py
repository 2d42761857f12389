"""What an interrupted conversion had finished: lines with checksums, appended as the work goes on."""

import fcntl
import json
import os
import zlib
from pathlib import Path
from typing import Any

from trainer_client.embedding.checkpoint.record import CheckpointError

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
