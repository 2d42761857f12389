"""What a checkpoint records of each table, and rows on their way between a table and a file."""

import dataclasses
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One array with a row for each key.

    Attributes:
        dtype: Name of the torch dtype, such as `float32`.
        shape: Shape of one row: `(dim,)`, or `()` for one number a row.
    """

    dtype: str
    shape: tuple[int, ...]

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
        """Rows a rank under `continuous`.

        Raises:
            CheckpointError: If the table's size is needed and not known.
        """
        if self.routing.dist_type != "continuous":
            return 0
        if self.num_embeddings < 1:
            raise CheckpointError(f"table {self.name} is continuous, but its size is not recorded; give num_embeddings")
        return block_size(self.num_embeddings, self.world_size)

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
        """First row and number of rows of each chunk of a rank."""
        count = self.rows[rank]
        return [(at, min(self.chunk_rows, count - at)) for at in range(0, count, self.chunk_rows)]

    def owners(self, keys: Tensor) -> Tensor:
        """(n) ranks that own keys (n)."""
        return owners(keys, self.routing, world_size=self.world_size, block_size=self.block)


def to_json(records: Sequence[TableRecord]) -> str:
    """Records as JSON text."""
    tables = [dataclasses.asdict(record) for record in records]
    return json.dumps({"format_version": FORMAT_VERSION, "tables": tables})


def from_json(text: str, *, where: str) -> list[TableRecord]:
    """Records of JSON text."""
    try:
        document = json.loads(text)
        version = document["format_version"]
        if version not in READS:
            raise CheckpointError(f"{where}: format version {version}; this release reads {READS[0]} to {READS[-1]}")
        records = []
        for plain in document["tables"]:
            plain["routing"] = Routing(**plain["routing"])
            specs = plain["arrays"].items()
            plain["arrays"] = {name: ArraySpec(dtype=s["dtype"], shape=tuple(s["shape"])) for name, s in specs}
            plain["rows"], plain["digests"] = tuple(plain["rows"]), tuple(tuple(d) for d in plain["digests"])
            records.append(TableRecord(**plain))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows of a table.

    Attributes:
        keys: (n): int64.
        arrays: By name, (n, ...) values or optimizer state.
        where: The file that they come from, for errors.
    """

    keys: Tensor
    arrays: dict[str, Tensor]
    where: str = ""

    def take(self, index: Tensor) -> "Rows":
        """The rows that an index tensor or a mask picks."""
        arrays = {name: array[index] for name, array in self.arrays.items()}
        return Rows(keys=self.keys[index], arrays=arrays, where=self.where)

    def digest(self) -> int:
        """CRC-32 of the keys and then of the arrays in the order of their names."""
        crc = zlib.crc32(as_bytes(self.keys))
        for name in sorted(self.arrays):
            crc = zlib.crc32(as_bytes(self.arrays[name]), crc)
        return crc


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


def check_owner(rows: Rows, record: TableRecord, rank: int) -> None:
    """Checks that a rank owns all of some rows."""
    owner = record.owners(rows.keys)
    wrong = owner != rank
    if bool(wrong.any()):
        key, right = int(rows.keys[wrong][0]), int(owner[wrong][0])
        raise CheckpointError(
            f"{rows.where}: holds key {key} of table {record.name} for rank {rank}, but {record.describe()} gives it "
            f"to rank {right}; the file is in the wrong place, or was saved under another routing than recorded"
        )


def split_by_owner(rows: Rows, record: TableRecord) -> Iterator[tuple[int, Rows]]:
    """The rows of each rank that has any, in their order."""
    owner = record.owners(rows.keys)
    order = torch.argsort(owner, stable=True)
    at = 0
    for rank, count in enumerate(torch.bincount(owner, minlength=record.world_size).tolist()):
        if count:
            yield rank, rows.take(order[at : at + count])
        at += count


# A DynamicEmb dump has one array of optimizer state. What was joined into it is in `opt_args` under these names.
_LAYOUT, _SCALARS = "evenkeel_opt_values", "evenkeel_scalars"
_FRESH, _OPTIMIZER = "evenkeel_fresh", "evenkeel_optimizer"
_IN_DUMPS = ("values", "scores", "opt_values", "frequencies")


def for_dump(record: TableRecord) -> TableRecord:
    """The record with all optimizer state in one array, which is all that a dump can hold."""
    state = [name for name in sorted(record.arrays) if name not in _IN_DUMPS]
    arrays = {name: spec for name, spec in record.arrays.items() if name not in state}
    if any(record.arrays[name].dtype != "float32" for name in (*state, *({"values"} & set(arrays)))):
        raise CheckpointError(f"table {record.name}: a DynamicEmb dump holds float32 values and optimizer state only")
    if record.routing.seed:
        raise CheckpointError(f"table {record.name}: DynamicEmb has no routing seed; use hash_roundrobin with seed 0")
    extra = dict(record.extra)
    if state:
        layout = {name: list(record.arrays[name].shape) for name in state}
        extra |= {_LAYOUT: layout, _SCALARS: record.scalars, _FRESH: record.fresh, _OPTIMIZER: record.optimizer}
        width = sum(math.prod(shape) for shape in layout.values())
        arrays["opt_values"] = ArraySpec(dtype="float32", shape=(width,))
    return dataclasses.replace(record, arrays=arrays, extra=extra)


def for_dcp(record: TableRecord) -> TableRecord:
    """The record with the optimizer state apart again, if a dump says how it was joined."""
    extra = dict(record.extra)
    layout, scalars = extra.pop(_LAYOUT, None), extra.pop(_SCALARS, None)
    fresh, optimizer = extra.pop(_FRESH, {}), extra.pop(_OPTIMIZER, "")
    if layout is None or "opt_values" not in record.arrays:
        return record
    arrays = {name: spec for name, spec in record.arrays.items() if name != "opt_values"}
    arrays |= {name: ArraySpec(dtype="float32", shape=tuple(shape)) for name, shape in layout.items()}
    return dataclasses.replace(
        record, arrays=arrays, extra=extra, scalars=scalars or record.scalars, fresh=fresh or record.fresh,
        optimizer=optimizer or record.optimizer,
    )  # fmt: skip


def reshape(rows: Rows, target: TableRecord) -> Rows:
    """Rows with the target's arrays: optimizer state joined or taken apart."""
    if rows.arrays.keys() == target.arrays.keys():
        return rows
    arrays = {name: array for name, array in rows.arrays.items() if name in target.arrays}
    count = rows.keys.numel()
    if "opt_values" in target.arrays:
        state = [rows.arrays[name].reshape(count, -1) for name in sorted(rows.arrays) if name not in target.arrays]
        arrays["opt_values"] = torch.cat(state, dim=1)
    else:
        shapes = {name: spec.shape for name, spec in target.arrays.items() if name not in arrays}
        parts = rows.arrays["opt_values"].split([math.prod(shape) for shape in shapes.values()], dim=1)  # type: ignore[no-untyped-call]
        arrays |= {name: part.reshape(count, *shapes[name]) for name, part in zip(shapes, parts, strict=True)}
    return Rows(keys=rows.keys, arrays=arrays, where=rows.where)
