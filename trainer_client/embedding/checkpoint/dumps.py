"""DynamicEmb's dump directories: raw little-endian arrays a rank and table, without headers.

`NAME_opt_args.json` and, for each rank R of W, `NAME_emb_{keys,values,scores,opt_values}.rank_R.world_size_W` and
`NAME_counter_{keys,frequencies}.rank_R.world_size_W`. A counter is read as a table of its own, `NAME/counter`. A dump
has one array of optimizer state: what other formats have by name is joined there, and `NAME_opt_args.json` says how.
"""

import json
import math
import warnings
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_client.embedding.checkpoint.files import DUMP_FILE
from trainer_client.embedding.checkpoint.record import (
    KEYS,
    ArraySpec,
    Checkpoint,
    CheckpointError,
    TableRecord,
    as_bytes,
)
from trainer_client.embedding.routing import DIST_TYPES, Routing, as_routing

COUNTER = "/counter"
_DTYPES = {"keys": "int64", "values": "float32", "opt_values": "float32", "scores": "int64", "frequencies": "int64"}
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
    state = [arrays[name] for name in sorted(arrays.keys() - _DTYPES)]
    state = [array.view(len(array), math.prod(array.shape[1:])) for array in state]
    stored = {name: array for name, array in arrays.items() if name in _DTYPES}
    return stored | {"opt_values": torch.cat(state, dim=1)} if state else stored


def is_dump(path: Path) -> bool:
    """Whether a directory holds such a dump."""
    return any(DUMP_FILE.fullmatch(file.name) for file in path.iterdir())


class DynamicEmbDump(Checkpoint):
    """Reads a dump, whose sizes are checked when it is opened."""

    format = "dynamicemb"

    def __init__(
        self, path: Path, *, routing: Routing | None = None, num_embeddings: Mapping[str, int] | None = None
    ) -> None:
        self.path = path
        self.records = {}
        self._files: dict[str, dict[str, tuple[ArraySpec, list[Path]]]] = {}  # by table and array, of each rank
        arrays: dict[str, set[str]] = {}
        ranks: dict[str, set[int]] = {}
        for match in filter(None, (DUMP_FILE.fullmatch(file.name) for file in sorted(path.iterdir()))):
            arrays.setdefault(table_of(match), {"keys"}).add(match["array"])
            ranks.setdefault(table_of(match), set()).add(int(match["ranks"]))
        for table, names in arrays.items():
            if len(ranks[table]) > 1:
                raise CheckpointError(
                    f"{path}: table {table} has files of world sizes {sorted(ranks[table])}; keep one"
                )
            (world_size,) = ranks[table]
            self.records[table] = self._record(table, sorted(names), world_size, routing, num_embeddings or {})

    def _record(
        self, table: str, arrays: list[str], world_size: int, routing: Routing | None, sizes: Mapping[str, int]
    ) -> TableRecord:
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
        files = {
            array: [self.path / _file_name(table, array, rank, world_size) for rank in range(world_size)]
            for array in arrays
        }
        for file in chain(*files.values()):
            if not file.exists():
                raise CheckpointError(f"{file}: is missing; restore it from a copy")
        rows = [_num_keys(file) for file in files["keys"]]
        self._files[table] = {array: (_spec(array, of, rows), of) for array, of in files.items()}
        specs = {array: spec for array, (spec, _) in self._files[table].items() if array != "keys"}
        layout, scalars = options.pop(_LAYOUT, None), options.pop(_SCALARS, {})
        fresh, optimizer = options.pop(_FRESH, {}), options.pop(_OPTIMIZER, "")
        if layout is not None and specs.pop("opt_values", None) is not None:
            specs |= {array: ArraySpec(dtype="float32", shape=tuple(shape)) for array, shape in layout.items()}
        return TableRecord(
            name=table,
            routing=as_routing(dist_type) if dist_type is not None else routing or as_routing("roundrobin"),
            world_size=world_size,
            num_embeddings=int(sizes.get(name, options.get("num_embeddings", 0))),
            rows=tuple(rows),
            arrays=specs,
            scalars=scalars,
            fresh=fresh,
            optimizer=optimizer,
            extra=options,
        )

    def where(self, table: str, rank: int, chunk: int = 0) -> str:  # noqa: ARG002
        """The file of a rank's keys."""
        return str(self._files[table]["keys"][1][rank])

    def read(self, table: str, rank: int, chunk: int, first: int, count: int) -> dict[str, Tensor]:  # noqa: ARG002
        """The keys and arrays of a chunk."""
        arrays = {array: _read(files[rank], spec, first, count) for array, (spec, files) in self._files[table].items()}
        layout = {name: spec for name, spec in self.records[table].arrays.items() if name not in _DTYPES}
        if layout:
            columns = [math.prod(spec.shape) for spec in layout.values()]
            parts = arrays.pop("opt_values").split(columns, dim=1)  # type: ignore[no-untyped-call]
            for (name, spec), part in zip(layout.items(), parts, strict=True):
                arrays[name] = part.reshape(-1, *spec.shape)
        return arrays


def _num_keys(file: Path) -> int:
    size = file.stat().st_size
    if size % 8:
        raise CheckpointError(f"{file}: has {size} bytes, no whole number of 8-byte keys; it is truncated")
    return size // 8


def _spec(array: str, files: list[Path], rows: list[int]) -> ArraySpec:
    """Type and columns of an array, the same for all ranks."""
    if array == "keys":
        return KEYS
    item, sizes = getattr(torch, _DTYPES[array]).itemsize, [file.stat().st_size for file in files]
    widths = [size // (item * count) for size, count in zip(sizes, rows, strict=True) if count]
    width = max(set(widths), key=widths.count) if widths else 1
    for file, size, count in zip(files, sizes, rows, strict=True):
        if size != count * width * item:
            raise CheckpointError(
                f"{file}: has {size} bytes, but {count} keys of {width} columns take {count * width * item}; "
                "it is truncated or belongs to other keys"
            )
    return ArraySpec(dtype=_DTYPES[array], shape=(width,))


class RawRows:
    """Rows of a table under its new routing, appended to raw files, which are those of a dump if `dump` is set.

    Attributes:
        counts: Rows of each rank so far.
    """

    def __init__(self, path: Path, record: TableRecord, *, dump: bool) -> None:
        self.path, self.record, self.counts = path, record, [0] * record.world_size
        self._dump = dump
        self._name = record.name if dump else record.name.replace("/", "@")
        for rank in range(record.world_size):  # a rank without rows has empty files
            self.append(rank, {name: spec.empty(0) for name, spec in record.stored.items()})

    def _file(self, array: str, rank: int) -> Path:
        return self.path / _file_name(self._name, array, rank, self.record.world_size)

    def append(self, rank: int, arrays: Mapping[str, Tensor]) -> None:
        """Adds rows to a rank's files."""
        self.counts[rank] += arrays["keys"].numel()
        for array, tensor in (joined(arrays) if self._dump else arrays).items():
            with self._file(array, rank).open("ab") as file:
                file.write(as_bytes(tensor))

    def read(self, rank: int, array: str, first: int, count: int) -> Tensor:
        """Some rows of an array as it is stored."""
        return _read(self._file(array, rank), self.record.stored[array], first, count)


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
        options |= {_LAYOUT: layout, _SCALARS: record.scalars, _FRESH: record.fresh, _OPTIMIZER: record.optimizer}
    (path / f"{record.name}_opt_args.json").write_text(json.dumps(options, indent=1) + "\n")
