"""Files that are there whole or not at all, what an interrupted conversion had finished, and the files it appends to.

A journal holds lines with checksums, appended as the work goes on. Raw files, one a table, rank and array, are appended
to while a checkpoint is re-routed; whether a key is there twice is found among more keys than memory should hold.

"""

import dataclasses
import fcntl
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_client.embedding.checkpoint.dynamicemb import file_name, is_file_of_dump
from trainer_client.embedding.checkpoint.record import (
    ArraySpec,
    CheckpointError,
    Rows,
    TableRecord,
    as_bytes,
    torch_dtype,
)
from trainer_client.embedding.routing import hash_roundrobin, owners


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
        CheckpointError: If the target exists and may not be replaced, or is something else than a checkpoint.
    """
    recover(target)
    if not overwrite and (target.exists() or target.is_symlink()):
        raise CheckpointError(f"{target} exists; choose another name or allow it to be replaced")
    _check_replaceable(target)
    staging = staging_path(target)
    if not keep:
        shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True, exist_ok=True)
    return staging


def _check_replaceable(target: Path) -> None:
    """Checks that nothing is lost with a target but a checkpoint.

    Raises:
        CheckpointError: If it is no directory, or holds something that belongs to no checkpoint.
    """
    if target.is_symlink():
        raise CheckpointError(
            f"{target} is a symbolic link, which is not replaced; name what it points to, or remove it"
        )
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file and no checkpoint, and is not replaced; choose another name")
    others = sorted(entry.name for entry in target.iterdir() if not (entry.is_file() and _is_of_checkpoint(entry.name)))
    if others:
        named = ", ".join(map(repr, others[:3])) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise CheckpointError(
            f"{target} holds {named}, which belong to no checkpoint of tables and would be gone; "
            "give the checkpoint a directory of its own"
        )


def _is_of_checkpoint(name: str) -> bool:
    return name == ".metadata" or name.endswith((".distcp", "_opt_args.json")) or is_file_of_dump(name)


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

    Raises:
        CheckpointError: If something else than a checkpoint has come to the name.
    """
    _check_replaceable(target)
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


LIMIT = 1 << 22
"""Keys that are sorted at a time: 32 MiB."""
_MIXED = hash_roundrobin(0x5EED)  # another hash than that which put the keys into one file


def _repeated(keys: NDArray[np.int64]) -> int | None:
    keys.sort()
    twice = keys[1:][keys[1:] == keys[:-1]]
    return int(twice[0]) if twice.size else None


def find_repeated(pieces: Iterable[torch.Tensor], total: int, scratch: Path, *, limit: int = LIMIT) -> int | None:
    """A key that comes twice, or None.

    Up to `limit` keys are sorted in memory. More are first cut by a hash into files of about half as many each.

    Args:
        pieces: Int64 keys, some at a time.
        total: Keys in all.
        scratch: A directory for the files, which are removed again.
        limit: Keys in memory at a time.
    """
    parts = min(4096, -(-2 * total // limit)) if total > limit else 1
    if parts == 1:
        collected = [piece.numpy() for piece in pieces]
        return _repeated(np.concatenate(collected)) if collected else None
    files = [scratch / f"keys{part}" for part in range(parts)]
    try:
        for path in files:
            path.write_bytes(b"")
        for piece in pieces:
            part = owners(piece, _MIXED, world_size=parts)
            order = torch.argsort(part, stable=True)
            counts = torch.bincount(part, minlength=parts).tolist()
            keys, at = piece[order], 0
            for path, count in zip(files, counts, strict=True):
                with path.open("ab") as file:
                    file.write(as_bytes(keys[at : at + count]))
                at += count
        found = (_repeated(np.fromfile(path, dtype=np.int64)) for path in files)
        return next((key for key in found if key is not None), None)
    finally:
        for path in files:
            path.unlink(missing_ok=True)


_PIECE = 1 << 20


class Spool:
    """Rows of a table under its new routing, in a dump directory's layout.

    Args:
        path: The directory.
        record: The table under its new routing.
        dump: Whether the files are to be a dump, under the dump's names.
    """

    def __init__(self, path: Path, record: TableRecord, *, dump: bool) -> None:
        self.path, self.record = path, record
        self._name = record.name if dump else record.name.replace("/", "@")
        self._arrays = ("keys", *record.arrays)
        self._counts = [0] * record.world_size
        self._sums = {array: [0] * record.world_size for array in self._arrays}

    def _file(self, array: str, rank: int) -> Path:
        return self.path / file_name(self._name, array, rank, self.record.world_size)

    def _row_bytes(self, array: str) -> int:
        spec = self.record.arrays.get(array, ArraySpec(dtype="int64", shape=()))
        return torch_dtype(spec.dtype).itemsize * math.prod(spec.shape)

    @property
    def num_files(self) -> int:
        """Files that it writes."""
        return len(self._arrays) * self.record.world_size

    def append(self, rank: int, rows: Rows) -> None:
        """Adds rows to a rank's files."""
        self._counts[rank] += rows.keys.numel()
        for array, tensor in (("keys", rows.keys), *rows.arrays.items()):
            data, sums = as_bytes(tensor), self._sums[array]
            sums[rank] = zlib.crc32(data, sums[rank])
            with self._file(array, rank).open("ab") as file:
                file.write(data)

    def state(self) -> Entry:
        """Rows of each rank, and the CRC-32 of each file, for `restore`."""
        return {"rows": list(self._counts), "sums": {array: list(sums) for array, sums in self._sums.items()}}

    def restore(self, states: Sequence[Entry]) -> int:
        """Goes back to the last of some states, oldest first, that all files still hold, and drops what follows it.

        Returns:
            Its place in `states`; -1 if none holds and the files are empty now.
        """
        held = len(states) - 1
        for array in self._arrays:
            for rank in range(self.record.world_size):
                held = min(held, self._holds(array, rank, states[: held + 1]))
        state = states[held] if held >= 0 else Spool(self.path, self.record, dump=True).state()
        self._counts = list(state["rows"])
        self._sums = {array: list(sums) for array, sums in state["sums"].items()}
        for array in self._arrays:
            for rank, count in enumerate(self._counts):
                with self._file(array, rank).open("ab") as file:
                    file.truncate(count * self._row_bytes(array))
        return held

    def _holds(self, array: str, rank: int, states: Sequence[Entry]) -> int:
        path, size = self._file(array, rank), self._row_bytes(array)
        crc = at = 0
        try:
            with path.open("rb") as file:
                for number, state in enumerate(states):
                    while at < state["rows"][rank] * size:
                        data = file.read(min(_PIECE, state["rows"][rank] * size - at))
                        if not data:
                            return number - 1
                        crc, at = zlib.crc32(data, crc), at + len(data)
                    if crc != state["sums"][array][rank]:
                        return number - 1
        except FileNotFoundError:
            return -1
        return len(states) - 1

    def _read_array(self, rank: int, start: int, count: int, name: str) -> Tensor:
        spec = self.record.arrays.get(name, ArraySpec(dtype="int64", shape=()))
        size = self._row_bytes(name)
        raw = np.fromfile(self._file(name, rank), dtype=np.uint8, count=count * size, offset=start * size)
        return torch.from_numpy(raw).view(torch_dtype(spec.dtype)).view(count, *spec.shape)

    def _spans(self, rank: int) -> Iterator[tuple[int, int]]:
        step = self.record.chunk_rows
        for start in range(0, self._counts[rank], step):
            yield start, min(step, self._counts[rank] - start)

    def read(self, rank: int, chunk: int) -> Rows:
        """A chunk of a rank's rows."""
        start = chunk * self.record.chunk_rows
        count = min(self.record.chunk_rows, self._counts[rank] - start)
        arrays = {name: self._read_array(rank, start, count, name) for name in self.record.arrays}
        return Rows(keys=self._read_array(rank, start, count, "keys"), arrays=arrays)

    def find_repeated(self, rank: int, scratch: Path) -> int | None:
        """A key that is among a rank's rows twice, or None."""
        pieces = (self._read_array(rank, start, count, "keys") for start, count in self._spans(rank))
        return find_repeated(pieces, self._counts[rank], scratch)

    def counted(self) -> TableRecord:
        """The table's record with the rows of each rank."""
        return dataclasses.replace(self.record, rows=tuple(self._counts))
