"""DynamicEmb's dump directories: raw little-endian arrays a rank and table, without headers.

`NAME_opt_args.json` and, for each rank R of W, `NAME_emb_{keys,values,scores,opt_values}.rank_R.world_size_W` and
`NAME_counter_{keys,frequencies}.rank_R.world_size_W`. A counter is read as a table of its own, `NAME/counter`.
"""

import dataclasses
import importlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from trainer_client.embedding.routing import DIST_TYPES, Routing, as_routing, owners

_DTYPES = {"values": "float32", "opt_values": "float32", "scores": "int64", "frequencies": "int64"}
COUNTER = "/counter"


def _file_name(table: str, array: str, rank: int, world_size: int) -> str:
    kind = "counter" if table.endswith(COUNTER) else "emb"
    return f"{table.removesuffix(COUNTER)}_{kind}_{array}.rank_{rank}.world_size_{world_size}"


def _read(path: Path, spec: ArraySpec, first: int, count: int) -> Tensor:
    rows = spec.empty(count)
    if rows.numel():
        with path.open("rb") as file:
            file.seek(first * (rows.nbytes // count))
            if file.readinto(as_bytes(rows)) != rows.nbytes:
                raise CheckpointError(f"{path}: is truncated; restore it from a copy")
    return rows


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
        tables: dict[str, dict[str, set[tuple[int, int]]]] = {}
        for file in sorted(path.iterdir()):
            match = DUMP_FILE.fullmatch(file.name)
            if match:
                table = match["table"] + (COUNTER if match["kind"] == "counter" else "")
                ranks = tables.setdefault(table, {}).setdefault(match["array"], set())
                ranks.add((int(match["rank"]), int(match["ranks"])))
        self.records = {}
        for table, arrays in tables.items():
            world_size = self._check_complete(table, arrays)
            self.records[table] = self._record(table, sorted(arrays), world_size, routing, num_embeddings or {})

    def _file(self, table: str, array: str, rank: int, world_size: int) -> Path:
        return self.path / _file_name(table, array, rank, world_size)

    def _check_complete(self, table: str, arrays: dict[str, set[tuple[int, int]]]) -> int:
        sizes = {ranks for pairs in arrays.values() for _, ranks in pairs}
        if len(sizes) > 1:
            raise CheckpointError(f"{self.path}: table {table} has files of world sizes {sorted(sizes)}; keep one dump")
        world_size = sizes.pop()
        for array in {"keys", *arrays}:
            for rank in range(world_size):
                if (rank, world_size) not in arrays.get(array, set()):
                    name = self._file(table, array, rank, world_size)
                    raise CheckpointError(f"{name}: is missing; restore it from a copy")
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
        rows = []
        for rank in range(world_size):
            file = self._file(table, "keys", rank, world_size)
            size = file.stat().st_size
            if size % 8:
                raise CheckpointError(f"{file}: has {size} bytes, no whole number of 8-byte keys; it is truncated")
            rows.append(size // 8)
        return TableRecord(
            name=table,
            routing=as_routing(dist_type) if dist_type is not None else routing or as_routing("roundrobin"),
            world_size=world_size,
            num_embeddings=int(sizes.get(name, options.get("num_embeddings", 0))),
            rows=tuple(rows),
            arrays={array: self._spec(table, array, rows) for array in arrays if array != "keys"},
            extra=options,
        )

    def _spec(self, table: str, array: str, rows: list[int]) -> ArraySpec:
        """Type and columns of an array, the same for all ranks."""
        item = getattr(torch, _DTYPES[array]).itemsize
        files = [self._file(table, array, rank, len(rows)) for rank in range(len(rows))]
        widths = [file.stat().st_size // (item * n) for file, n in zip(files, rows, strict=True) if n]
        width = max(set(widths), key=widths.count) if widths else 1
        for file, count in zip(files, rows, strict=True):
            if file.stat().st_size != count * width * item:
                raise CheckpointError(
                    f"{file}: has {file.stat().st_size} bytes, but {count} keys of {width} columns take "
                    f"{count * width * item}; it is truncated or belongs to other keys"
                )
        return ArraySpec(dtype=_DTYPES[array], shape=(width,))

    def where(self, table: str, rank: int) -> str:
        """The file of a rank's keys."""
        return str(self._file(table, "keys", rank, self.records[table].world_size))

    def rows(self, table: str, rank: int) -> Iterator[Rows]:
        """Chunks of a table's rows on a rank."""
        record = self.records[table]
        for first, count in record.chunks(rank):
            keys, *arrays = (
                _read(self._file(table, array, rank, record.world_size), spec, first, count)
                for array, spec in (("keys", KEYS), *record.arrays.items())
            )
            named = dict(zip(record.arrays, arrays, strict=True))
            rows = Rows(keys=keys, arrays=named, where=self.where(table, rank))
            check_owner(rows, record, rank)
            yield rows


class RawRows:
    """Rows of a table under its new routing, appended to the files of a dump.

    Attributes:
        counts: Rows of each rank so far.
    """

    def __init__(self, path: Path, record: TableRecord, *, dump: bool) -> None:
        self.path, self.record, self.counts = path, record, [0] * record.world_size
        self._name = record.name if dump else record.name.replace("/", "@")
        self._specs = {"keys": KEYS, **record.arrays}
        for array in self._specs:
            for rank in range(record.world_size):
                self._file(array, rank).touch()  # a rank without rows has empty files

    def _file(self, array: str, rank: int) -> Path:
        return self.path / _file_name(self._name, array, rank, self.record.world_size)

    def append(self, rank: int, rows: Rows) -> None:
        """Adds rows to a rank's files."""
        self.counts[rank] += rows.keys.numel()
        for array, tensor in (("keys", rows.keys), *rows.arrays.items()):
            with self._file(array, rank).open("ab") as file:
                file.write(as_bytes(tensor))

    def read(self, rank: int, array: str, first: int, count: int) -> Tensor:
        """Some rows of an array."""
        return _read(self._file(array, rank), self._specs[array], first, count)

    def counted(self) -> TableRecord:
        """The table's record with the rows of each rank."""
        return dataclasses.replace(self.record, rows=tuple(self.counts))

    def digests(self, rank: int) -> tuple[int, ...]:
        """Checksums of a rank's chunks."""
        found = []
        for first, count in self.counted().chunks(rank):
            arrays = {array: self.read(rank, array, first, count) for array in self._specs}
            found.append(Rows(keys=arrays.pop("keys"), arrays=arrays).digest())
        return tuple(found)


def write_options(path: Path, record: TableRecord) -> None:
    """Writes a table's `opt_args`."""
    if not record.name.endswith(COUNTER):
        options = record.extra | {"dist_type": record.routing.dist_type}
        if record.num_embeddings:
            options["num_embeddings"] = record.num_embeddings
        (path / f"{record.name}_opt_args.json").write_text(json.dumps(options, indent=1) + "\n")


_READER, _COUNTERS = "_iter_batches_from_files", "LinearBucketTable"
Batch = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys, embeddings, scores and optimizer state, as DynamicEmb's loading wants them."""


@contextmanager
def dynamicemb_loads_by_owner(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Inside, `DynamicEmbLoad` and `load` of DynamicEmb's tables put every row on the rank that owns it.

    DynamicEmb's release keeps, in each rank, the keys of a file with `key % ranks == rank`, whatever the routing. Here
    scores, optimizer state and counters come along with all rows, from a dump of any number of ranks, under
    `roundrobin` and `hash_roundrobin`. The table's routing has to be that of the dump; `evenkeel checkpoint convert`
    changes a dump's.

    Args:
        group: The ranks that share the tables; all by default.

    Raises:
        ModuleNotFoundError: If DynamicEmb is not installed.
        CheckpointError: If this release of DynamicEmb reads dumps in another way. Inside: if a dump is damaged, or a
            key is on a rank that does not own it.
    """
    values = importlib.import_module("dynamicemb.key_value_table")
    index = importlib.import_module("dynamicemb.scored_hashtable")
    for module, name in ((values, _READER), (index, _COUNTERS)):
        if not hasattr(module, name):
            raise CheckpointError(
                f"this release of DynamicEmb has no {module.__name__}.{name}, by which dumps were read; "
                "load without Evenkeel, and compare the number of rows with the dump's"
            )
    shared = dist.is_initialized()
    reader = _Reader(dist.get_rank(group) if shared else 0, dist.get_world_size(group) if shared else 1)
    table: Any = getattr(index, _COUNTERS)
    theirs = getattr(values, _READER), table.load

    def load_counter(self: Any, key_file: str, score_files: Mapping[str, str], table_id: int | None = None) -> None:
        """In place of `LinearBucketTable.load`, with its arguments."""
        number = 0 if table_id is None else table_id
        (score,) = score_files
        for rows in reader.rows(key_file):
            keys = rows.keys.to(_device())
            frequencies = rows.arrays["frequencies"].flatten().to(keys.device)
            argument = index.ScoreArg(name=score, value=frequencies, policy=index.ScorePolicy.ASSIGN)
            self.insert(keys, torch.full_like(keys, number), argument)

    setattr(values, _READER, reader.batches)
    table.load = load_counter
    try:
        yield
    finally:
        setattr(values, _READER, theirs[0])
        table.load = theirs[1]


class _Reader:
    """Rows of a dump's files that a rank owns."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._dumps: dict[Path, DynamicEmbDump] = {}

    def rows(self, key_file: str) -> Iterator[Rows]:
        """The rows of one file, in chunks; none without rows."""
        path = Path(key_file)
        match = DUMP_FILE.fullmatch(path.name)
        if match is None:
            raise CheckpointError(f"{path}: has no name of a DynamicEmb dump's file")
        if path.parent not in self._dumps:
            self._dumps[path.parent] = DynamicEmbDump(path.parent)
        name = match["table"] + (COUNTER if match["kind"] == "counter" else "")
        dump = self._dumps[path.parent]
        record = dump.records[name]
        if record.routing.dist_type == "continuous":
            raise CheckpointError(
                f"{path}: table {match['table']} was dumped under continuous routing, whose keys are row numbers of "
                "one rank; route its table by roundrobin or hash_roundrobin"
            )
        for rows in dump.rows(name, int(match["rank"])):
            owner = owners(rows.keys, record.routing, world_size=self._world_size, block_size=0)
            mine = rows.take(owner == self._rank)
            if mine.keys.numel():
                yield mine

    def batches(
        self,
        emb_key_path: str,
        embedding_file_path: str,  # noqa: ARG002  # the dump knows its files by the keys' name
        score_file_path: str | None,
        opt_file_path: str | None,
        dim: int,
        optstate_dim: int,
        device: torch.device,
        batch_size: int = 65_536,  # noqa: ARG002  # as many as our reader's chunks have
        num_scores: int = 1,
    ) -> Iterator[Batch]:
        """In place of DynamicEmb's function, with its arguments."""
        for rows in self.rows(emb_key_path):
            count, arrays = rows.keys.numel(), rows.arrays
            scores = arrays["scores"] if score_file_path is not None and "scores" in arrays else None
            state = arrays["opt_values"].view(count, optstate_dim) if opt_file_path is not None else None
            if scores is not None:
                scores = (scores.view(count, num_scores) if num_scores > 1 else scores.flatten()).to(device)
            yield (
                rows.keys.to(device),
                arrays["values"].view(count, dim).to(device),
                scores,
                state.to(device) if state is not None else None,
            )


def _device() -> torch.device:
    """Where DynamicEmb puts what it reads."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
