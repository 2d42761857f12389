"""Re-routing a checkpoint on disk: any routing and number of ranks to any other."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from torch import Tensor

from trainer_client.embedding.checkpoint import dcp
from trainer_client.embedding.checkpoint.dumps import (
    COUNTER,
    DynamicEmbDump,
    RawRows,
    check_fits_dump,
    is_dump,
    write_options,
)
from trainer_client.embedding.checkpoint.files import recover, staging
from trainer_client.embedding.checkpoint.record import Checkpoint, CheckpointError, TableRecord, repeated_key
from trainer_client.embedding.routing import RoutingLike, as_routing
from trainer_client.embedding.routing.ownership import check_world_size

Format = Literal["dcp", "dynamicemb"]
Progress = Callable[[int, int], None]
"""Called with rows done and rows to do; for a `torch.distributed.checkpoint` target each row counts twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a conversion did.

    Attributes:
        tables: The tables as they are now.
        rows: Rows in all.
        moved: Rows that changed their rank's number.
    """

    tables: tuple[TableRecord, ...]
    rows: int
    moved: int


def open_checkpoint(
    path: Path | str, *, routing: RoutingLike | None = None, num_embeddings: Mapping[str, int] | None = None
) -> Checkpoint:
    """Opens a checkpoint of either format.

    Args:
        path: Its directory.
        routing: Of DynamicEmb dumps that do not name theirs, which count as roundrobin without it.
        num_embeddings: Sizes of continuous tables that the dump does not give.

    Raises:
        CheckpointError: If there is no checkpoint of a known format.
    """
    path = Path(path)
    recover(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory")
    if (path / ".metadata").exists():
        return dcp.DcpCheckpoint(path)
    if is_dump(path):
        named = as_routing(routing) if routing is not None else None
        return DynamicEmbDump(path, routing=named, num_embeddings=num_embeddings)
    raise CheckpointError(f"{path}: neither a torch.distributed.checkpoint directory (.metadata) nor a DynamicEmb dump")


def convert(
    source: Checkpoint,
    target: Path | str,
    *,
    world_size: int,
    routing: RoutingLike | Mapping[str, RoutingLike] | None = None,
    target_format: Format | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Writes a checkpoint whose rows lie on the ranks that own them under another routing.

    Rows stream through in chunks: memory holds a few of them, and the keys of one rank. The target appears under its
    name when it is complete; until then an older one stays. An interrupted conversion is begun again. While it is
    written, a dump takes the space of the result, a `torch.distributed.checkpoint` directory twice that.

    Args:
        source: An open checkpoint.
        target: The new directory.
        world_size: Ranks to lay the rows out for.
        routing: New routing of all tables or by table; it stays as it is where none is given.
        target_format: The source's by default.
        overwrite: Whether an existing checkpoint may be replaced, and nothing else.
        progress: Called after every chunk.

    Raises:
        CheckpointError: If the source is damaged, or cannot be expressed in the target's format.
    """
    check_world_size(world_size)
    to_dump = (target_format or source.format) == "dynamicemb"
    new: list[TableRecord] = []
    for name, record in source.records.items():
        chosen = routing.get(name.removesuffix(COUNTER)) if isinstance(routing, Mapping) else routing
        rerouted = record.rerouted(as_routing(chosen) if chosen is not None else record.routing, world_size)
        _ = rerouted.block  # refusals come before anything is written
        if to_dump:
            check_fits_dump(rerouted)
        new.append(rerouted)
    total = sum(sum(record.rows) for record in source.records.values())
    done = 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(done, total if to_dump else 2 * total)

    with (
        staging(Path(target), overwrite=overwrite) as path,
        nullcontext(path) if to_dump else TemporaryDirectory(dir=path) as scratch,
    ):
        files = {record.name: RawRows(Path(scratch), record, dump=to_dump) for record in new}
        moved = sum(_distribute(source, raw, advance) for raw in files.values())

        def read(name: str, rank: int, array: str, first: int, count: int) -> Tensor:
            return files[name].read(rank, array, first, count)

        def written(name: str, rank: int, array: str, first: int, count: int) -> Tensor:
            advance(count if array == "keys" else 0)
            return read(name, rank, array, first, count)

        finished = [record.with_rows(files[record.name].counts, None if to_dump else read) for record in new]
        if to_dump:
            for record in finished:
                write_options(path, record)
        else:
            dcp.write(path, finished, range(world_size), written, alone=True)
    return Conversion(tables=tuple(finished), rows=total, moved=moved)


def _distribute(source: Checkpoint, raw: RawRows, advance: Callable[[int], None]) -> int:
    """Brings a table's rows to the ranks that own them now; returns how many changed their rank."""
    after, moved = raw.record, 0
    before = source.records[after.name]
    for rank in range(before.world_size):
        for rows in source.rows(before.name, rank):
            for owner, part in rows.by_owner(after):
                raw.append(owner, part.arrays)
                moved += part.keys.numel() if owner != rank else 0
            advance(rows.keys.numel())
    for rank, count in enumerate(raw.counts):
        keys = raw.read(rank, "keys", 0, count).sort().values
        twice = keys[1:][keys[1:] == keys[:-1]]
        if twice.numel():
            file = source.where(before.name, int(before.owners(twice[:1])))
            raise repeated_key(file, before.name, int(twice[0]))
    return moved
