"""What a checkpoint says about each table, beside its rows, and what can be wrong with it."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from trainer_client.embedding.routing import Routing, block_size
from trainer_client.embedding.routing.modes import HASH_IDENTITY


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, or does not fit; the message names the file and the remedy."""


class RoutingMismatchError(CheckpointError):
    """A checkpoint was saved under another routing, and conversion is switched off."""


FORMAT_VERSION = 2
READS = (1, 2)
"""Versions that this release reads; version 1 has no `optimizer` and no `fresh`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One array with a row for each key.

    Attributes:
        dtype: Name of the torch dtype, such as `float32`.
        shape: Shape of one row: `(dim,)`, or `()` for one number a row.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRecord:
    """One table of a checkpoint.

    Attributes:
        name: The table's name.
        routing: Mode and seed that decided where the rows lie.
        num_ranks: Ranks that the rows lie on.
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
        extra: What the format carries besides and that is handed on.
    """

    name: str
    routing: Routing
    num_ranks: int
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
        return block_size(self.num_embeddings, self.num_ranks)

    def describe(self) -> str:
        """The routing in words."""
        return f"{self.routing} over {self.num_ranks} rank{'s' if self.num_ranks != 1 else ''}"

    def rerouted(self, routing: Routing, num_ranks: int) -> Self:
        """The same table under another routing, before its rows are counted."""
        return dataclasses.replace(self, routing=routing, num_ranks=num_ranks, rows=(), digests=())

    def routes_like(self, other: "TableRecord") -> bool:
        """Whether every key has the same owner under both."""
        return (self.routing, self.num_ranks, self.block) == (other.routing, other.num_ranks, other.block)


def to_json(records: Sequence[TableRecord]) -> str:
    """Records as JSON text."""
    tables = []
    for record in records:
        plain = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
        plain["routing"] = {"dist_type": record.routing.dist_type, "seed": record.routing.seed}
        plain["arrays"] = {name: {"dtype": s.dtype, "shape": list(s.shape)} for name, s in record.arrays.items()}
        tables.append(plain)
    return json.dumps({"format_version": FORMAT_VERSION, "tables": tables})


def from_json(text: str, *, where: str) -> list[TableRecord]:
    """Records of JSON text.

    Args:
        text: What `to_json` gave.
        where: The file, for errors.

    Raises:
        CheckpointError: If the text is no record, or of a version or hash that this release does not know.
    """
    try:
        document = json.loads(text)
        version = document["format_version"]
        if version not in READS:
            raise CheckpointError(f"{where}: format version {version}; this release reads {READS[0]} to {READS[-1]}")
        records = []
        for plain in document["tables"]:
            plain["routing"] = Routing(**plain["routing"])
            plain["arrays"] = {
                name: ArraySpec(dtype=spec["dtype"], shape=tuple(spec["shape"]))
                for name, spec in plain["arrays"].items()
            }
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
