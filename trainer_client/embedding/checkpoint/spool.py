"""Raw files, one a table, rank and array, that rows are appended to while a checkpoint is re-routed.

Whether a key is there twice is found among more keys than memory should hold.
"""

import dataclasses
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_client.embedding.checkpoint.dynamicemb import file_name
from trainer_client.embedding.checkpoint.files import Entry
from trainer_client.embedding.checkpoint.record import ArraySpec, TableRecord
from trainer_client.embedding.checkpoint.rows import Rows, as_bytes, torch_dtype
from trainer_client.embedding.routing import hash_roundrobin, owners

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
        pieces: int64 keys, some at a time.
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
            part = owners(piece, _MIXED, num_ranks=parts)
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
        self._counts = [0] * record.num_ranks
        self._sums = {array: [0] * record.num_ranks for array in self._arrays}

    def _file(self, array: str, rank: int) -> Path:
        return self.path / file_name(self._name, array, rank, self.record.num_ranks)

    def _row_bytes(self, array: str) -> int:
        spec = self.record.arrays.get(array, ArraySpec(dtype="int64", shape=()))
        return torch_dtype(spec.dtype).itemsize * math.prod(spec.shape)

    @property
    def num_files(self) -> int:
        """Files that it writes."""
        return len(self._arrays) * self.record.num_ranks

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
            for rank in range(self.record.num_ranks):
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
