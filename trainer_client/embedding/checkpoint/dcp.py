"""Checkpoints in the format of `torch.distributed.checkpoint`: each rank's rows in chunks, and the routing record.

Entries are `TABLE/RANK/ARRAY/CHUNK`, with `keys` as one more array, and `evenkeel.record`, the record's JSON text
as bytes. Chunks are read and written one at a time, each a file.
"""

import dataclasses
import io
import itertools
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer_client.embedding.checkpoint.files import Entry, Journal
from trainer_client.embedding.checkpoint.record import (
    CheckpointError,
    Rows,
    TableRecord,
    check_owner,
    from_json,
    to_json,
    torch_dtype,
)

RECORD = "evenkeel.record"
Chunk = tuple[str, int, int]
"""Table, rank and number of a chunk."""
ReadChunk = Callable[[str, int, int], Rows]
"""The rows of a chunk, on the CPU."""


def chunk_count(record: TableRecord, rank: int) -> int:
    """Chunks that a rank's rows make."""
    return -(-record.rows[rank] // record.chunk_rows)


def _entry(table: str, rank: int, array: str, chunk: int) -> str:
    return f"{table}/{rank}/{array}/{chunk}"


def _outline(record: TableRecord, rank: int) -> dict[str, tuple[Tensor, int, str]]:
    """Entries of a rank's rows, as tensors without memory, with the chunk and the array that each is."""
    outline = {}
    for chunk in range(chunk_count(record, rank)):
        rows = min(record.chunk_rows, record.rows[rank] - chunk * record.chunk_rows)
        keys = torch.empty(rows, dtype=torch.int64, device="meta")
        outline[_entry(record.name, rank, "keys", chunk)] = keys, chunk, "keys"
        for name, spec in record.arrays.items():
            array = torch.empty(rows, *spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
            outline[_entry(record.name, rank, name, chunk)] = array, chunk, name
    return outline


class _Contents:
    """What is written: the chunks, fetched when their turn comes, and last the record, with their checksums."""

    def __init__(self, records: Sequence[TableRecord], read: ReadChunk) -> None:
        self._records, self._read = records, read
        self._held: tuple[Chunk, Rows] | None = None
        self.arrays: dict[str, tuple[Chunk, str]] = {}
        self.digests: dict[Chunk, int] = {
            (record.name, rank, chunk): digest
            for record in records
            for rank, digests in enumerate(record.digests)
            for chunk, digest in enumerate(digests)
        }
        widest = [self._with_digests(record, lambda _: 0xFFFFFFFF) for record in records]
        self._record_bytes = len(to_json(widest).encode())

    @staticmethod
    def _with_digests(record: TableRecord, digest: Callable[[Chunk], int]) -> TableRecord:
        ranks = range(record.world_size)
        chunks = [[(record.name, rank, chunk) for chunk in range(chunk_count(record, rank))] for rank in ranks]
        return dataclasses.replace(record, digests=tuple(tuple(digest(chunk) for chunk in some) for some in chunks))

    def complete(self) -> list[TableRecord]:
        """The records with digests."""
        return [self._with_digests(record, self.digests.__getitem__) for record in self._records]

    def text(self) -> Tensor:
        """The record's text, padded to the size that it is announced with before all checksums are known."""
        text = to_json(self.complete()).encode().ljust(self._record_bytes)
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def outline(self, ranks: Sequence[int]) -> dict[str, Tensor]:
        """All entries of some ranks, as tensors without memory, and the record."""
        state = {}
        for record in self._records:
            for rank in ranks:
                for entry, (tensor, chunk, array) in _outline(record, rank).items():
                    state[entry] = tensor
                    self.arrays[entry] = (record.name, rank, chunk), array
        return state | {RECORD: torch.empty(self._record_bytes, dtype=torch.uint8, device="meta")}

    def chunk_of(self, item: WriteItem) -> Chunk | None:
        """The chunk that an entry belongs to; None for the record."""
        return self.arrays[item.index.fqn][0] if item.index.fqn in self.arrays else None

    def fetch(self, entry: str) -> Tensor:
        """The data of an entry."""
        if entry == RECORD:
            return self.text()
        chunk, array = self.arrays[entry]
        if self._held is None or self._held[0] != chunk:
            self._held = None  # two chunks need not be in memory
            self._held = chunk, self._read(*chunk)
            if chunk not in self.digests:
                self.digests[chunk] = self._held[1].digest()
        rows = self._held[1]
        return rows.keys if array == "keys" else rows.arrays[array]


class _ChunkPlanner(DefaultSavePlanner):
    """Plans with tensors without memory."""

    def __init__(self, contents: _Contents) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._contents = contents

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._contents.fetch(write_item.index.fqn)


class _SummedFile(io.BufferedWriter):
    """A new file, and the CRC-32 of what was written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.crc = 0

    def write(self, data: Any, /) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return super().write(data)


class _SummedFiles(filesystem.FileSystem):
    """Files of which the checksum of the latest is known."""

    crc = 0

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _SummedFile(Path(path)) as file:
            yield file
        self.crc = file.crc


class _ChunkWriter(filesystem.FileSystemWriter):
    """Writes each chunk into a file of its own, and leaves out those that a journal says are finished.

    The same rows give the same bytes.
    """

    def __init__(self, path: Path, contents: _Contents, journal: Journal | None) -> None:
        super().__init__(path, sync_files=False)
        self.fs = self._files = _SummedFiles()
        self._directory, self._contents, self._journal = path, contents, journal
        entries = journal.entries if journal is not None else []
        self._finished = {_as_chunk(entry["shard"]): entry for entry in entries if "shard" in entry}

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=f"{zlib.crc32(repr(sorted(self._contents.digests.items())).encode()):08x}")

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: list[WriteResult] = []
        for number, (chunk, items) in enumerate(itertools.groupby(plan.items, self._contents.chunk_of)):
            entry = self._finished.get(chunk) if chunk is not None else None
            part = list(items)
            if entry is not None and self._holds(entry):
                self._contents.digests[_as_chunk(entry["shard"])] = entry["digest"]
                written += _results(entry, part)
                continue
            prefix = dataclasses.replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            results = super().write_data(dataclasses.replace(plan, items=part, storage_data=prefix), planner).value()
            written += results
            if self._journal is not None and chunk is not None:
                places = {r.index.fqn: [r.storage_data.offset, r.storage_data.length] for r in results}
                file = results[0].storage_data.relative_path
                entry = {"shard": list(chunk), "file": file, "crc": self._files.crc, "places": places}
                self._journal.append(entry | {"digest": self._contents.digests[chunk]})
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    def _holds(self, entry: Entry) -> bool:
        """Whether a file that the journal speaks of is as it was written."""
        crc = 0
        try:
            with (self._directory / entry["file"]).open("rb") as file:
                while data := file.read(1 << 20):
                    crc = zlib.crc32(data, crc)
        except FileNotFoundError:
            return False
        return bool(crc == entry["crc"])


def _as_chunk(listed: list[Any]) -> Chunk:
    table, rank, chunk = listed
    return table, rank, chunk


def _results(entry: Entry, items: Sequence[WriteItem]) -> list[WriteResult]:
    results = []
    for item in items:
        at, length = entry["places"][item.index.fqn]
        place = filesystem._StorageInfo(entry["file"], at, length)
        results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))
    return results


def write(
    path: Path,
    records: Sequence[TableRecord],
    ranks: Sequence[int],
    read: ReadChunk,
    *,
    alone: bool,
    group: Any = None,
    journal: Journal | None = None,
) -> list[TableRecord]:
    """Writes the rows of some ranks; all processes of the group call it together.

    Args:
        path: An existing directory, shared by all processes.
        records: All tables with the rows of every rank; with their digests too, unless this process writes everything.
        ranks: Whose rows this process writes.
        read: Gives the rows of a chunk.
        alone: Whether this process writes everything.
        group: The process group otherwise.
        journal: Of an interrupted call with the same arguments, which goes on where that one stopped.

    Returns:
        The records with digests.
    """
    contents = _Contents(records, read)
    state = contents.outline(ranks)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state_dict_saver.save(
            cast(dict[str, Any], state),
            storage_writer=_ChunkWriter(path, contents, journal),
            planner=_ChunkPlanner(contents),
            process_group=group,
            no_dist=alone,
        )
    return contents.complete()


class DcpCheckpoint:
    """Reads a checkpoint, chunk by chunk, checking what it reads.

    Args:
        path: Its directory.

    Raises:
        CheckpointError: If it has no readable metadata or routing record.
    """

    format = "dcp"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = filesystem.FileSystemReader(path)
        try:
            self._metadata = self._reader.read_metadata()
        except Exception as error:
            raise CheckpointError(f"{path / '.metadata'}: cannot be read ({error!r})") from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        size = self._metadata.state_dict_metadata.get(RECORD)
        if not isinstance(size, TensorStorageMetadata):
            raise CheckpointError(f"{path / '.metadata'}: no routing record; this is no checkpoint of routed tables")
        text = torch.empty(size.size, dtype=torch.uint8, device="cpu")
        self._fill({RECORD: text})
        where = str(self.path / self._file(RECORD))
        self.records = {record.name: record for record in from_json(_decode(text, where), where=where)}

    def _file(self, entry: str) -> str:
        data: dict[Any, Any] = self._metadata.storage_data
        return next((info.relative_path for index, info in data.items() if index.fqn == entry), ".metadata")

    def _fill(self, state: dict[str, Tensor]) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(cast(dict[str, Any], state), self._metadata, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:
            names = sorted({self._file(entry) for entry in state})
            missing = [name for name in names if not (self.path / name).exists()]
            what = "is missing" if missing else f"is damaged ({error!r})"
            raise CheckpointError(f"{self.path / (missing or names)[0]}: {what}; restore it from a copy") from error

    def where(self, table: str, rank: int) -> str:
        """The file of a rank's first keys."""
        return str(self.path / self._file(_entry(table, rank, "keys", 0)))

    def rows(self, table: str, rank: int, *, first: int = 0) -> Iterator[Rows]:
        """Chunks of a table's rows on a rank, from chunk `first` on.

        Raises:
            CheckpointError: If a file is missing, damaged, or holds other rows than were saved.
        """
        record = self.records[table]
        for chunk, group in itertools.groupby(_outline(record, rank).items(), lambda item: item[1][1]):
            if chunk < first:
                continue
            entries = {entry: (tensor, array) for entry, (tensor, _, array) in group}
            state = {entry: torch.empty_like(tensor, device="cpu") for entry, (tensor, _) in entries.items()}
            self._fill(state)
            arrays = {array: state[entry] for entry, (_, array) in entries.items()}
            where = str(self.path / self._file(next(iter(state))))
            rows = Rows(keys=arrays.pop("keys"), arrays=arrays, where=where)
            if rows.digest() != record.digests[rank][chunk]:
                raise CheckpointError(
                    f"{where}: rows of table {table}, rank {rank}, are not those that were saved (checksum differs); "
                    "restore the file from a copy"
                )
            check_owner(rows, record, rank)
            yield rows


def _decode(text: Tensor, where: str) -> str:
    try:
        return bytes(text.numpy()).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: the routing record is damaged") from error
