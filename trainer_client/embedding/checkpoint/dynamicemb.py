"""DynamicEmb's dump directories: raw little-endian arrays a rank and table, without headers.

`NAME_opt_args.json` and, for each rank R of W, `NAME_emb_{keys,values,scores,opt_values}.rank_R.world_size_W` and
`NAME_counter_{keys,frequencies}.rank_R.world_size_W`. A counter is read as a table of its own, `NAME/counter`. A dump
has one array of optimizer state: what other formats have by name is joined there, and `NAME_opt_args.json` says how.
"""

import dataclasses
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_client.embedding.checkpoint.files import DUMP_FILE
from trainer_client.embedding.checkpoint.record import (
    KEYS,
    ArraySpec,
    CheckpointError,
    Rows,
    TableRecord,
    as_bytes,
    check_owner,
)
from trainer_client.embedding.routing import DIST_TYPES, Routing, as_routing

COUNTER = "/counter"
_DTYPES = {"values": "float32", "opt_values": "float32", "scores": "int64", "frequencies": "int64"}
_LAYOUT, _SCALARS = "evenkeel_opt_values", "evenkeel_scalars"
_FRESH, _OPTIMIZER = "evenkeel_fresh", "evenkeel_optimizer"


def _file_name(table: str, array: str, rank: int, world_size: int) -> str:
    kind = "counter" if table.endswith(COUNTER) else "emb"
    return f"{table.removesuffix(COUNTER)}_{kind}_{array}.rank_{rank}.world_size_{world_size}"


def table_of(match: Any) -> str:
    """The table of a file, by a match of `DUMP_FILE`."""
    return f"{match['table']}{COUNTER if match['kind'] == 'counter' else ''}"


def _read(path: Path, spec: ArraySpec, first: int, count: int) -> Tensor:
    rows = spec.empty(count)
    if rows.numel():
        with path.open("rb") as file:
            file.seek(first * (rows.nbytes // count))
            if file.readinto(as_bytes(rows)) != rows.nbytes:
                raise CheckpointError(f"{path}: is truncated; restore it from a copy")
    return rows


def joined(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arrays of a dump: optimizer state as one, in the order of its names."""
    state = [arrays[name] for name in sorted(arrays) if name not in _DTYPES]
    stored = {name: array for name, array in arrays.items() if name in _DTYPES}
    if state:
        columns = [array.view(len(array), math.prod(array.shape[1:])) for array in state]
        stored["opt_values"] = torch.cat(columns, dim=1)
    return stored


def _apart(joined: Tensor, layout: Mapping[str, ArraySpec]) -> dict[str, Tensor]:
    parts = joined.split([math.prod(spec.shape) for spec in layout.values()], dim=1)  # type: ignore[no-untyped-call]
    return {name: part.reshape(-1, *layout[name].shape) for name, part in zip(layout, parts, strict=True)}


def is_dump(path: Path) -> bool:
    """Whether a directory holds such a dump."""
    return any(DUMP_FILE.fullmatch(file.name) for file in path.iterdir())


class DynamicEmbDump:
    """Reads a dump, chunk by chunk, checking sizes and owners."""

    format = "dynamicemb"

    def __init__(
        self, path: Path, *, routing: Routing | None = None, num_embeddings: Mapping[str, int] | None = None
    ) -> None:
        self.path = path
        self.records: dict[str, TableRecord] = {}
        self._world_sizes: dict[str, int] = {}
        self._stored: dict[str, dict[str, ArraySpec]] = {}  # arrays as they are in the files
        self._layouts: dict[str, dict[str, ArraySpec]] = {}  # of joined optimizer state
        arrays: dict[str, set[str]] = {}
        ranks: dict[str, set[int]] = {}
        for file in sorted(path.iterdir()):
            if match := DUMP_FILE.fullmatch(file.name):
                arrays.setdefault(table_of(match), set()).add(match["array"])
                ranks.setdefault(table_of(match), set()).add(int(match["ranks"]))
        for table, names in arrays.items():
            if len(ranks[table]) > 1:
                raise CheckpointError(
                    f"{path}: table {table} has files of world sizes {sorted(ranks[table])}; keep one"
                )
            self._world_sizes[table] = ranks[table].pop()
            self.records[table] = self._record(table, sorted(names - {"keys"}), routing, num_embeddings or {})

    def _files(self, table: str, array: str) -> list[Path]:
        world_size = self._world_sizes[table]
        return [self.path / _file_name(table, array, rank, world_size) for rank in range(world_size)]

    def _record(self, table: str, arrays: list[str], routing: Routing | None, sizes: Mapping[str, int]) -> TableRecord:
        name = table.removesuffix(COUNTER)
        options_file = self.path / f"{name}_opt_args.json"
        try:
            options: dict[str, Any] = json.loads(options_file.read_text()) if options_file.exists() else {}
        except ValueError as error:
            raise CheckpointError(f"{options_file}: is no JSON ({error})") from error
        dist_type = options.get("dist_type")
        if dist_type is None and routing is None:
            warnings.warn(
                f"{options_file} names no dist_type: table {name} counts as roundrobin, as dumps without one are",
                stacklevel=4,
            )
        if dist_type is not None and dist_type not in DIST_TYPES:
            raise CheckpointError(f"{options_file}: dist_type is {dist_type!r}; known are {', '.join(DIST_TYPES)}")
        rows = []
        for file, size in zip(self._files(table, "keys"), self._sizes(table, "keys"), strict=True):
            if size % 8:
                raise CheckpointError(f"{file}: has {size} bytes, no whole number of 8-byte keys; it is truncated")
            rows.append(size // 8)
        specs = {array: self._spec(table, array, rows) for array in arrays}
        self._stored[table] = {"keys": KEYS, **specs}
        layout, scalars = options.pop(_LAYOUT, None), options.pop(_SCALARS, {})
        fresh, optimizer = options.pop(_FRESH, {}), options.pop(_OPTIMIZER, "")
        if layout is not None and specs.pop("opt_values", None) is not None:
            self._layouts[table] = {key: ArraySpec(dtype="float32", shape=tuple(s)) for key, s in layout.items()}
            specs |= self._layouts[table]
        return TableRecord(
            name=table,
            routing=as_routing(dist_type) if dist_type is not None else routing or as_routing("roundrobin"),
            world_size=len(rows),
            num_embeddings=int(sizes.get(name, options.get("num_embeddings", 0))),
            rows=tuple(rows),
            arrays=specs,
            scalars=scalars,
            fresh=fresh,
            optimizer=optimizer,
            extra=options,
        )

    def _sizes(self, table: str, array: str) -> list[int]:
        files = self._files(table, array)
        for file in files:
            if not file.exists():
                raise CheckpointError(f"{file}: is missing; restore it from a copy")
        return [file.stat().st_size for file in files]

    def _spec(self, table: str, array: str, rows: list[int]) -> ArraySpec:
        """Type and columns of an array, the same for all ranks."""
        item, sizes = getattr(torch, _DTYPES[array]).itemsize, self._sizes(table, array)
        widths = [size // (item * count) for size, count in zip(sizes, rows, strict=True) if count]
        width = max(set(widths), key=widths.count) if widths else 1
        for file, size, count in zip(self._files(table, array), sizes, rows, strict=True):
            if size != count * width * item:
                raise CheckpointError(
                    f"{file}: has {size} bytes, but {count} keys of {width} columns take {count * width * item}; "
                    "it is truncated or belongs to other keys"
                )
        return ArraySpec(dtype=_DTYPES[array], shape=(width,))

    def where(self, table: str, rank: int) -> str:
        """The file of a rank's keys."""
        return str(self._files(table, "keys")[rank])

    def rows(self, table: str, rank: int) -> Iterator[Rows]:
        """Chunks of a table's rows on a rank."""
        record = self.records[table]
        for first, count in record.chunks(rank):
            arrays = {
                array: _read(self._files(table, array)[rank], spec, first, count)
                for array, spec in self._stored[table].items()
            }
            keys = arrays.pop("keys")
            if table in self._layouts:
                arrays |= _apart(arrays.pop("opt_values"), self._layouts[table])
            rows = Rows(keys=keys, arrays=arrays, where=self.where(table, rank))
            check_owner(rows, record, rank)
            yield rows


class RawRows:
    """Rows of a table under its new routing, appended to raw files, which are those of a dump if `dump` is set.

    Attributes:
        counts: Rows of each rank so far.
    """

    def __init__(self, path: Path, record: TableRecord, *, dump: bool) -> None:
        self.path, self.record, self.counts = path, record, [0] * record.world_size
        self._dump = dump
        self._name = record.name if dump else record.name.replace("/", "@")
        self._specs = {"keys": KEYS, **record.arrays}
        empty = {name: spec.empty(0) for name, spec in record.arrays.items()}
        for rank in range(record.world_size):
            self.append(rank, Rows(keys=KEYS.empty(0), arrays=empty))  # a rank without rows has empty files

    def _file(self, array: str, rank: int) -> Path:
        return self.path / _file_name(self._name, array, rank, self.record.world_size)

    def append(self, rank: int, rows: Rows) -> None:
        """Adds rows to a rank's files."""
        self.counts[rank] += rows.keys.numel()
        arrays = joined(rows.arrays) if self._dump else rows.arrays
        for array, tensor in {"keys": rows.keys, **arrays}.items():
            with self._file(array, rank).open("ab") as file:
                file.write(as_bytes(tensor))

    def read(self, rank: int, array: str, first: int, count: int) -> Tensor:
        """Some rows of an array as it is stored."""
        return _read(self._file(array, rank), self._specs[array], first, count)

    def counted(self) -> TableRecord:
        """The table's record with the rows of each rank, and for other formats than a dump their checksums."""
        record = dataclasses.replace(self.record, rows=tuple(self.counts))
        ranks = range(0 if self._dump else record.world_size)
        return dataclasses.replace(record, digests=tuple(self._digests(record, rank) for rank in ranks))

    def _digests(self, record: TableRecord, rank: int) -> tuple[int, ...]:
        digests = []
        for first, count in record.chunks(rank):
            arrays = {array: self.read(rank, array, first, count) for array in self._specs}
            digests.append(Rows(keys=arrays.pop("keys"), arrays=arrays).digest())
        return tuple(digests)


def check_fits_dump(record: TableRecord) -> None:
    """Refuses a table that a dump cannot hold."""
    if any(spec.dtype != _DTYPES.get(name, "float32") for name, spec in record.arrays.items()):
        raise CheckpointError(f"table {record.name}: a DynamicEmb dump holds float32 values and optimizer state only")
    if record.routing.seed:
        raise CheckpointError(f"table {record.name}: DynamicEmb has no routing seed; use hash_roundrobin with seed 0")


def write_options(path: Path, record: TableRecord) -> None:
    """Writes a table's `opt_args`."""
    if record.name.endswith(COUNTER):
        return
    options = record.extra | {"dist_type": record.routing.dist_type}
    if record.num_embeddings:
        options["num_embeddings"] = record.num_embeddings
    layout = {name: record.arrays[name].shape for name in sorted(record.arrays) if name not in _DTYPES}
    if layout:
        state = {_LAYOUT: layout, _SCALARS: record.scalars, _FRESH: record.fresh, _OPTIMIZER: record.optimizer}
        options |= state
    (path / f"{record.name}_opt_args.json").write_text(json.dumps(options, indent=1) + "\n")
