"""DynamicEmb's dump directories: raw little-endian arrays a rank and table, without headers.

`NAME_opt_args.json` and, for each rank R of W, `NAME_emb_{keys,values,scores,opt_values}.rank_R.world_size_W` and
`NAME_counter_{keys,frequencies}.rank_R.world_size_W`. A counter is read as a table of its own, `NAME/counter`.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_client.embedding.checkpoint.record import (
    ArraySpec,
    CheckpointError,
    Rows,
    TableRecord,
    check_owner,
    torch_dtype,
)
from trainer_client.embedding.routing import DIST_TYPES, Routing, as_routing

_FILE = re.compile(
    r"(?P<table>.+)_(?P<kind>emb|counter)_(?P<array>keys|values|scores|opt_values|frequencies)"
    r"\.rank_(?P<rank>\d+)\.world_size_(?P<ranks>\d+)"
)
_DTYPES = {"values": "float32", "opt_values": "float32", "scores": "int64", "frequencies": "int64"}
COUNTER = "/counter"


def file_name(table: str, array: str, rank: int, world_size: int) -> str:
    """Name of the file of one array of one rank."""
    kind = "counter" if table.endswith(COUNTER) else "emb"
    return f"{table.removesuffix(COUNTER)}_{kind}_{array}.rank_{rank}.world_size_{world_size}"


def is_file_of_dump(name: str) -> bool:
    """Whether a file of this name holds arrays of a dump."""
    return _FILE.fullmatch(name) is not None


def table_and_rank(file: Path) -> tuple[str, int]:
    """Table and rank of a dump's file; a counter is a table of its own.

    Raises:
        CheckpointError: If the file has no such name.
    """
    match = _FILE.fullmatch(file.name)
    if match is None:
        raise CheckpointError(f"{file}: has no name of a DynamicEmb dump's file")
    return match["table"] + (COUNTER if match["kind"] == "counter" else ""), int(match["rank"])


def is_dump(path: Path) -> bool:
    """Whether a directory holds such a dump."""
    return any(_FILE.fullmatch(file.name) for file in path.iterdir())


class DynamicEmbDump:
    """Reads a dump, chunk by chunk, checking sizes and owners.

    Args:
        path: The directory.
        routing: Mode of tables whose `opt_args` do not name it; without it they count as roundrobin, with a warning.
        num_embeddings: Sizes of continuous tables, by name, where `opt_args` do not give them.
        chunk_rows: Rows read at a time.

    Raises:
        CheckpointError: If a rank's file is missing or does not hold whole rows.
    """

    format = "dynamicemb"

    def __init__(
        self,
        path: Path,
        *,
        routing: Routing | None = None,
        num_embeddings: Mapping[str, int] | None = None,
        chunk_rows: int = 65_536,
    ) -> None:
        self.path, self._chunk_rows = path, chunk_rows
        found: dict[str, dict[str, set[tuple[int, int]]]] = {}
        for file in sorted(path.iterdir()):
            match = _FILE.fullmatch(file.name)
            if match:
                table = match["table"] + (COUNTER if match["kind"] == "counter" else "")
                ranks = found.setdefault(table, {}).setdefault(match["array"], set())
                ranks.add((int(match["rank"]), int(match["ranks"])))
        self.records = {}
        for table, arrays in found.items():
            world_size = self._check_complete(table, arrays)
            self.records[table] = self._record(table, sorted(arrays), world_size, routing, num_embeddings or {})

    def _check_complete(self, table: str, arrays: dict[str, set[tuple[int, int]]]) -> int:
        sizes = {ranks for pairs in arrays.values() for _, ranks in pairs}
        if len(sizes) > 1:
            raise CheckpointError(f"{self.path}: table {table} has files of world sizes {sorted(sizes)}; keep one dump")
        world_size = sizes.pop()
        for array in {"keys", *arrays}:
            for rank in range(world_size):
                if (rank, world_size) not in arrays.get(array, set()):
                    name = file_name(table, array, rank, world_size)
                    raise CheckpointError(f"{self.path / name}: is missing; restore it from a copy")
        return world_size

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
        named = as_routing(dist_type) if dist_type is not None else routing or as_routing("roundrobin")
        rows = []
        for rank in range(world_size):
            file = self.path / file_name(table, "keys", rank, world_size)
            size = file.stat().st_size
            if size % 8:
                raise CheckpointError(f"{file}: has {size} bytes, no whole number of 8-byte keys; it is truncated")
            rows.append(size // 8)
        specs = {}
        for array in arrays:
            if array != "keys":
                specs[array] = ArraySpec(dtype=_DTYPES[array], shape=(self._width(table, array, rows, world_size),))
        return TableRecord(
            name=table,
            routing=named,
            world_size=world_size,
            num_embeddings=int(sizes.get(name, options.get("num_embeddings", 0))),
            rows=tuple(rows),
            arrays=specs,
            chunk_rows=self._chunk_rows,
            extra=options,
        )

    def _width(self, table: str, array: str, rows: list[int], world_size: int) -> int:
        """Columns of an array, the same for all ranks."""
        item = torch_dtype(_DTYPES[array]).itemsize
        files = [self.path / file_name(table, array, rank, world_size) for rank in range(world_size)]
        widths = [file.stat().st_size // (item * n) for file, n in zip(files, rows, strict=True) if n]
        width = max(set(widths), key=widths.count) if widths else 1
        for file, count in zip(files, rows, strict=True):
            if file.stat().st_size != count * width * item:
                raise CheckpointError(
                    f"{file}: has {file.stat().st_size} bytes, but {count} keys of {width} columns take "
                    f"{count * width * item}; it is truncated or belongs to other keys"
                )
        return width

    def where(self, table: str, rank: int) -> str:
        """The file of a rank's keys."""
        return str(self.path / file_name(table, "keys", rank, self.records[table].world_size))

    def rows(self, table: str, rank: int, *, first: int = 0) -> Iterator[Rows]:
        """Chunks of a table's rows on a rank, from chunk `first` on.

        Raises:
            CheckpointError: If a key is on a rank that does not own it.
        """
        record = self.records[table]
        keys_file = self.where(table, rank)
        for start in range(first * self._chunk_rows, record.rows[rank], self._chunk_rows):
            count = min(self._chunk_rows, record.rows[rank] - start)
            keys = torch.from_numpy(np.fromfile(keys_file, dtype="<i8", count=count, offset=8 * start))
            arrays = {}
            for name, spec in record.arrays.items():
                kind, width = np.dtype(spec.dtype).newbyteorder("<"), spec.shape[0]
                file = self.path / file_name(table, name, rank, record.world_size)
                flat = np.fromfile(file, dtype=kind, count=count * width, offset=kind.itemsize * width * start)
                arrays[name] = torch.from_numpy(flat).view(count, width)
            rows = Rows(keys=keys, arrays=arrays, where=keys_file)
            check_owner(rows, record, rank)
            yield rows


def check_seed(record: TableRecord) -> None:
    """Checks that a dump can express a routing.

    Raises:
        CheckpointError: If the routing has a seed, which DynamicEmb does not know.
    """
    if record.routing.seed:
        raise CheckpointError(f"table {record.name}: DynamicEmb has no routing seed; use hash_roundrobin with seed 0")


def write_options(path: Path, record: TableRecord) -> None:
    """Writes a table's `opt_args`."""
    if not record.name.endswith(COUNTER):
        options = record.extra | {"dist_type": record.routing.dist_type}
        if record.num_embeddings:
            options["num_embeddings"] = record.num_embeddings
        (path / f"{record.name}_opt_args.json").write_text(json.dumps(options, indent=1) + "\n")
