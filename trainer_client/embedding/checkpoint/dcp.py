"""Checkpoints in the format of `torch.distributed.checkpoint`: each rank's rows in chunks, and the routing record.

Entries are `TABLE/RANK/ARRAY/CHUNK`, with `keys` as one more array, and `evenkeel.record`, the record's JSON text
as bytes. Each chunk is a file.
"""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer_client.embedding.checkpoint.record import (
    Checkpoint,
    CheckpointError,
    ReadArray,
    TableRecord,
    from_json,
    to_json,
)

RECORD = "evenkeel.record"


def _entry(table: str, rank: int, array: str, chunk: int) -> str:
    return f"{table}/{rank}/{array}/{chunk}"


class _Planner(DefaultSavePlanner):
    """Plans with tensors without memory, and reads each when it is written."""

    def __init__(self, sources: dict[str, Callable[[], Tensor]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._sources = sources

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._sources[write_item.index.fqn]()


class _Writer(filesystem.FileSystemWriter):
    """A file for each chunk: PyTorch's writer keeps all tensors of a file in memory until it is complete."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: list[WriteResult] = []
        files = itertools.groupby(plan.items, lambda item: item.index.fqn.rsplit("/", 2)[::2])  # without the array
        for number, (_, items) in enumerate(files):
            prefix = dataclasses.replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            part = dataclasses.replace(plan, items=list(items), storage_data=prefix)
            written += super().write_data(part, planner).value()
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future


def write(
    path: Path, records: Sequence[TableRecord], ranks: Sequence[int], read: ReadArray, *, alone: bool, group: Any = None
) -> None:
    """Writes the rows of some ranks; all processes of the group call it together."""
    text = torch.frombuffer(bytearray(to_json(records).encode()), dtype=torch.uint8)
    state: dict[str, Tensor] = {}
    sources: dict[str, Callable[[], Tensor]] = {}
    for record, rank in itertools.product(records, ranks):
        for chunk, (first, count) in enumerate(record.chunks(rank)):
            for array, spec in record.stored.items():
                entry = _entry(record.name, rank, array, chunk)
                state[entry] = spec.empty(count, device="meta")
                sources[entry] = partial(read, record.name, rank, array, first, count)
    state[RECORD], sources[RECORD] = text, lambda: text
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state_dict_saver.save(
            cast(dict[str, Any], state), storage_writer=_Writer(path, sync_files=False), planner=_Planner(sources),
            process_group=group, no_dist=alone,
        )  # fmt: skip


class DcpCheckpoint(Checkpoint):
    """Reads such a directory."""

    format = "dcp"

    def __init__(self, path: Path) -> None:
        self.path, metadata_file = path, path / ".metadata"
        self._reader = filesystem.FileSystemReader(path)
        try:
            self._metadata = self._reader.read_metadata()
        except Exception as error:
            raise CheckpointError(f"{metadata_file}: cannot be read ({error!r})") from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        size = self._metadata.state_dict_metadata.get(RECORD)
        if not isinstance(size, TensorStorageMetadata):
            raise CheckpointError(f"{metadata_file}: no routing record; this is no checkpoint of routed tables")
        stored: dict[Any, Any] = self._metadata.storage_data
        self._files = {index.fqn: path / info.relative_path for index, info in stored.items()}
        text = torch.empty(size.size, dtype=torch.uint8, device="cpu")
        self._fill({RECORD: text})
        where = str(self._files[RECORD])
        read = from_json(bytes(text.numpy()), where=where)
        for record in read:
            chunks = [len(record.chunks(rank)) for rank in range(len(record.rows))]
            if [len(digests) for digests in record.digests] != chunks:
                raise CheckpointError(f"{where}: checksums of table {record.name} are missing; restore it from a copy")
        self.records = {record.name: record for record in read}

    def _fill(self, state: dict[str, Tensor]) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(cast(dict[str, Any], state), self._metadata, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:
            names = sorted({self._files.get(entry, self.path / ".metadata") for entry in state})
            missing = [name for name in names if not name.exists()]
            what = "is missing" if missing else f"is damaged ({error!r})"
            raise CheckpointError(f"{(missing or names)[0]}: {what}; restore it from a copy") from error

    def where(self, table: str, rank: int, chunk: int = 0) -> str:
        """The file of some of a rank's keys."""
        return str(self._files.get(_entry(table, rank, "keys", chunk), self.path / ".metadata"))

    def read(self, table: str, rank: int, chunk: int, first: int, count: int) -> dict[str, Tensor]:  # noqa: ARG002
        """The keys and arrays of a chunk."""
        arrays = {array: spec.empty(count) for array, spec in self.records[table].stored.items()}
        self._fill({_entry(table, rank, array, chunk): tensor for array, tensor in arrays.items()})
        return arrays
