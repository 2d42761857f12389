"""What a checkpoint records of each table, rows on their way, and what is checked of every checkpoint that is read."""

import dataclasses
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from trainer_client.embedding.routing import Routing, block_size, owners
from trainer_client.embedding.routing.ownership import HASH_IDENTITY


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, or does not fit; the message names the file and the remedy."""


class RoutingMismatchError(CheckpointError):
    """A checkpoint was saved under another routing, and conversion is switched off."""


FORMAT_VERSION = 2
READS = (1, 2)  # version 1 has no `optimizer` and no `fresh`

ReadArray = Callable[[str, int, str, int, int], Tensor]
"""Rows of an array, by table, rank, array, first row and number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One array with a row for each key.

    Attributes:
        dtype: Name of the torch dtype, such as `float32`.
        shape: Shape of one row: `(dim,)`, or `()` for one number a row.
    """

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: Tensor) -> Self:
        """That of an array's rows."""
        return cls(dtype=str(array.dtype).removeprefix("torch."), shape=tuple(array.shape[1:]))

    def empty(self, rows: int, device: str = "cpu") -> Tensor:
        """Memory for some rows."""
        return torch.empty(rows, *self.shape, dtype=getattr(torch, self.dtype), device=device)


KEYS = ArraySpec(dtype="int64", shape=())


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRecord:
    """One table of a checkpoint.

    Attributes:
        name: The table's name.
        routing: Mode and seed that decided where the rows lie.
        world_size: Ranks that the rows lie on.
        num_embeddings: Size of the table, which gives the block size under `continuous`; 0 if not known.
        rows: Rows on each rank.
        arrays: Values and optimizer state, by name; `values` is always there.
        scalars: State that is one number for the whole table, such as the optimizer's step.
        optimizer: Class of the optimizer whose state is there; empty if it was saved without.
        fresh: By array of optimizer state, the numbers of a row that no key had taken yet; empty if there was none.
        digests: By rank, CRC-32 of each chunk's keys and arrays; empty for formats that have none.
        chunk_rows: Rows of a chunk.
        hash_identity: Which hash `hash_roundrobin` means.
        format_version: Of this record.
        extra: What the format carries besides; a conversion copies it.
    """

    name: str
    routing: Routing
    world_size: int
    num_embeddings: int
    rows: tuple[int, ...]
    arrays: dict[str, ArraySpec]
    scalars: dict[str, float] = field(default_factory=dict)
    optimizer: str = ""
    fresh: dict[str, list[float]] = field(default_factory=dict)
    digests: tuple[tuple[int, ...], ...] = ()
    chunk_rows: int = 65_536
    hash_identity: str = HASH_IDENTITY
    format_version: int = FORMAT_VERSION
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def block(self) -> int:
        """Rows a rank under `continuous`, for which the table's size must be known."""
        if self.routing.dist_type != "continuous":
            return 0
        if self.num_embeddings < 1:
            raise CheckpointError(f"table {self.name} is continuous, but its size is not recorded; give num_embeddings")
        return block_size(self.num_embeddings, self.world_size)

    @property
    def stored(self) -> dict[str, ArraySpec]:
        """The keys and all arrays."""
        return {"keys": KEYS, **self.arrays}

    def describe(self) -> str:
        """The routing in words."""
        return f"{self.routing} over {self.world_size} rank{'s' if self.world_size != 1 else ''}"

    def rerouted(self, routing: Routing, world_size: int) -> Self:
        """The same table under another routing, before its rows are counted."""
        return dataclasses.replace(self, routing=routing, world_size=world_size, rows=(), digests=())

    def routes_like(self, other: "TableRecord") -> bool:
        """Whether every key has the same owner under both."""
        return (self.routing, self.world_size, self.block) == (other.routing, other.world_size, other.block)

    def chunks(self, rank: int) -> list[tuple[int, int]]:
        """First row and number of rows of each chunk of a rank's rows."""
        firsts = range(0, self.rows[rank], self.chunk_rows)
        return [(first, min(self.chunk_rows, self.rows[rank] - first)) for first in firsts]

    def owners(self, keys: Tensor) -> Tensor:
        """(n) ranks that own keys (n)."""
        return owners(keys, self.routing, world_size=self.world_size, block_size=self.block)

    def with_rows(self, counts: Sequence[int], read: ReadArray | None) -> Self:
        """The record of a table with so many rows on each rank, and their checksums if they can be read."""
        counted = dataclasses.replace(self, rows=tuple(counts))
        if read is None:
            return counted
        digests = [
            tuple(
                Rows({array: read(self.name, rank, array, *chunk) for array in self.stored}).digest()
                for chunk in counted.chunks(rank)
            )
            for rank in range(len(counts))
        ]
        return dataclasses.replace(counted, digests=tuple(digests))


def to_json(records: Sequence[TableRecord]) -> str:
    """Records as JSON text."""
    return json.dumps({"format_version": FORMAT_VERSION, "tables": [dataclasses.asdict(record) for record in records]})


def from_json(text: str | bytes, *, where: str) -> list[TableRecord]:
    """Records of JSON text."""
    try:
        document = json.loads(text)
        version = document["format_version"]
        if version not in READS:
            raise CheckpointError(f"{where}: format version {version}; this release reads {READS[0]} to {READS[-1]}")
        records = [_from_plain(**plain) for plain in document["tables"]]
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where}: the routing record cannot be read ({error!r})") from error
    for record in records:
        if record.hash_identity != HASH_IDENTITY:
            raise CheckpointError(
                f"{where}: table {record.name} was routed by hash {record.hash_identity!r}; "
                f"this release has {HASH_IDENTITY!r}"
            )
    return records


def _from_plain(*, routing: Any, rows: Any, arrays: Any, digests: Any, **others: Any) -> TableRecord:
    return TableRecord(
        routing=Routing(**routing),
        rows=tuple(rows),
        arrays={name: ArraySpec(dtype=spec["dtype"], shape=tuple(spec["shape"])) for name, spec in arrays.items()},
        digests=tuple(map(tuple, digests)),
        **others,
    )


class Rows(NamedTuple):
    """Some rows of a table: by name the int64 `keys` (n), values and state (n, ...); and their file, for errors."""

    arrays: Mapping[str, Tensor]
    where: str = ""

    @property
    def keys(self) -> Tensor:
        """(n) int64 keys."""
        return self.arrays["keys"]

    def take(self, index: Tensor) -> "Rows":
        """The rows that an index tensor or a mask picks."""
        return Rows({name: array[index] for name, array in self.arrays.items()}, self.where)

    def digest(self) -> int:
        """CRC-32 of the keys and then of the arrays in the order of their names."""
        crc = zlib.crc32(as_bytes(self.keys))
        for name in sorted(self.arrays.keys() - {"keys"}):
            crc = zlib.crc32(as_bytes(self.arrays[name]), crc)
        return crc

    def by_owner(self, record: TableRecord) -> Iterator[tuple[int, "Rows"]]:
        """The rows of each rank that has any, in their order."""
        owner = record.owners(self.keys)
        order = torch.argsort(owner, stable=True)
        at = 0
        for rank, count in enumerate(torch.bincount(owner, minlength=record.world_size).tolist()):
            if count:
                yield rank, self.take(order[at : at + count])
            at += count


def as_bytes(tensor: Tensor) -> memoryview:
    """A CPU tensor's memory."""
    flat = tensor.detach().contiguous().view(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array) if flat.numel() else memoryview(b"")


def repeated_key(where: str, table: str, key: int) -> CheckpointError:
    """The error for a key that a checkpoint has twice."""
    return CheckpointError(
        f"{where}: key {key} of table {table} is in the checkpoint twice; the file was doubled, or another copied into "
        "it; restore it from a copy"
    )


class Checkpoint(ABC):
    """A checkpoint that is read chunk by chunk, each of which is checked.

    Attributes:
        format: `dcp` or `dynamicemb`.
        path: Its directory.
        records: Its tables, by name.
    """

    format: str
    path: Path
    records: dict[str, TableRecord]

    @abstractmethod
    def where(self, table: str, rank: int, chunk: int = 0) -> str:
        """The file of some of a rank's keys."""

    @abstractmethod
    def read(self, table: str, rank: int, chunk: int, first: int, count: int) -> dict[str, Tensor]:
        """The keys and arrays of a chunk: so many rows from one on."""

    def rows(self, table: str, rank: int) -> Iterator[Rows]:
        """Chunks of a table's rows on a rank.

        Raises:
            CheckpointError: If a file is damaged, or a key is on a rank that does not own it.
        """
        record = self.records[table]
        for chunk, (first, count) in enumerate(record.chunks(rank)):
            rows = Rows(self.read(table, rank, chunk, first, count), self.where(table, rank, chunk))
            if record.digests and rows.digest() != record.digests[rank][chunk]:
                raise CheckpointError(
                    f"{rows.where}: rows of table {table}, rank {rank}, are not those that were saved (checksum "
                    "differs); restore the file from a copy"
                )
            owner = record.owners(rows.keys)
            wrong = owner != rank
            if bool(wrong.any()):
                key, right = int(rows.keys[wrong][0]), int(owner[wrong][0])
                raise CheckpointError(
                    f"{rows.where}: holds key {key} of table {table} for rank {rank}, but {record.describe()} gives "
                    f"it to rank {right}; the file is in the wrong place, or was saved under another routing than "
                    "recorded"
                )
            yield rows
