"""Saving the tables of a running collection, and loading them under any routing."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_client.embedding.checkpoint import dcp, files
from trainer_client.embedding.checkpoint.convert import Checkpoint, open_checkpoint
from trainer_client.embedding.checkpoint.optimizers import (
    Layout,
    Optimizers,
    check_state,
    fresh_rows,
    owner_of,
    prepare_state,
    read_state,
)
from trainer_client.embedding.checkpoint.record import (
    ArraySpec,
    CheckpointError,
    RoutingMismatchError,
    Rows,
    TableRecord,
    for_dcp,
    repeated_key,
    reshape,
)
from trainer_client.embedding.routing import owners
from trainer_client.embedding.tables import RoutedEmbeddingCollection, RoutedTable


def _record(
    table: RoutedTable, arrays: dict[str, Tensor], scalars: dict[str, float], world_size: int, optimizer: str
) -> TableRecord:
    return TableRecord(
        name=table.name,
        routing=table.resolved_routing,
        world_size=world_size,
        num_embeddings=table.num_embeddings,
        rows=(),
        arrays={
            name: ArraySpec(dtype=str(array.dtype).removeprefix("torch."), shape=tuple(array.shape[1:]))
            for name, array in arrays.items()
        },
        scalars=scalars,
        optimizer=optimizer,
    )


def _check_held(table: RoutedTable, owned: Any) -> None:
    if not hasattr(owned, "held_keys"):
        raise CheckpointError(
            f"table {table.name}: its storage {type(owned).__name__} keeps its rows to itself; use its own dump and "
            "load, and `evenkeel checkpoint convert` between routings"
        )


class _Held:
    """A rank's rows of one table, read in chunks."""

    def __init__(self, table: RoutedTable, owned: Any, optimizers: Optimizers, world_size: int) -> None:
        _check_held(table, owned)
        self.keys: Tensor = owned.held_keys()
        optimizer = owner_of(optimizers, owned.weight, table.name)
        state: dict[str, Tensor] = {}
        scalars: dict[str, float] = {}
        if optimizer is not None:
            layout = Layout.of(optimizer, owned.weight, table.name)
            state, scalars = read_state(layout, optimizer.state.get(owned.weight, {}))
        self.fresh = fresh_rows(state, self.keys.numel())
        self.arrays = {"values": owned.weight.detach(), **state}
        self.record = _record(table, self.arrays, scalars, world_size, type(optimizer).__name__ if optimizer else "")

    def rows(self, chunk: int) -> Rows:
        start = chunk * self.record.chunk_rows
        stop = min(start + self.record.chunk_rows, self.keys.numel())
        arrays = {name: array[start:stop].cpu() for name, array in self.arrays.items()}
        return Rows(keys=self.keys[start:stop].cpu(), arrays=arrays)

    def digests(self) -> tuple[int, ...]:
        return tuple(self.rows(c).digest() for c in range(-(-self.keys.numel() // self.record.chunk_rows)))


def _gather(value: Any, collection: RoutedEmbeddingCollection) -> list[Any]:
    if collection.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * collection.world_size
    dist.all_gather_object(gathered, value, group=collection.group)
    return gathered


def _raise_any(problem: Exception | None, collection: RoutedEmbeddingCollection) -> None:
    """Raises on all ranks what went wrong on any, so that none waits for another that has given up."""
    found = [other for other in _gather(problem, collection) if other is not None]
    if problem is not None:
        raise problem
    if found:
        raise found[0]


def save(
    collection: RoutedEmbeddingCollection,
    path: Path | str,
    *,
    optimizer: Optimizers = None,
    overwrite: bool = False,
) -> None:
    """Saves a collection's rows with `torch.distributed.checkpoint`; all of its ranks call it together.

    The directory takes its name when every rank has written its rows; until then an older checkpoint of that name
    stays.

    Args:
        collection: The tables.
        path: A directory that all ranks share.
        optimizer: Whose state of the tables is saved too; several if the tables are divided among them.
        overwrite: Whether an existing checkpoint may be replaced. Nothing else is: no file, no link, and no directory
            that holds anything that belongs to no checkpoint.

    Raises:
        CheckpointError: If the directory exists and may not be replaced, the optimizer does not hold a table, or it
            keeps something that belongs neither to a row nor to the whole table as one number; on all ranks.
    """
    path = Path(path)
    problem: Exception | None = None
    held: dict[str, _Held] = {}
    try:
        held = {
            t.name: _Held(t, collection.tables[t.name], optimizer, collection.world_size) for t in collection.configs
        }
    except ValueError as error:
        problem = error
    _raise_any(problem, collection)
    mine = {n: (h.keys.numel(), h.digests(), h.record.arrays, h.record.scalars, h.fresh) for n, h in held.items()}
    told = _gather(mine, collection)
    records = []
    for name, one in held.items():
        filled = [rank[name] for rank in told]
        first = max(filled, key=lambda entry: len(entry[2]))
        if any(entry[2] != first[2] for entry in filled):
            raise CheckpointError(f"table {name}: ranks hold different optimizer state; step it on all ranks")
        records.append(
            dataclasses.replace(
                one.record,
                rows=tuple(entry[0] for entry in filled),
                digests=tuple(entry[1] for entry in filled),
                scalars=first[3],
                fresh=next((entry[4] for entry in filled if entry[4]), {}),
            )
        )
    problem = None
    if collection.rank == 0:
        try:
            files.begin(path, overwrite=overwrite)
        except (CheckpointError, OSError) as error:
            problem = error
    _raise_any(problem, collection)
    dcp.write(
        files.staging_path(path),
        records,
        [collection.rank],
        lambda name, _, chunk: held[name].rows(chunk),
        alone=collection.world_size == 1,
        group=collection.group,
    )
    _gather(None, collection)
    problem = None
    if collection.rank == 0:
        try:
            files.publish(path)
        except CheckpointError as error:
            problem = error
        except OSError as error:
            problem = CheckpointError(f"{path}: the checkpoint could not be put in place ({error})")
    _raise_any(problem, collection)


def load_table(
    checkpoint: Checkpoint,
    table: RoutedTable,
    owned: Any,
    *,
    rank: int,
    world_size: int,
    optimizer: Optimizers = None,
    convert: bool = True,
) -> int:
    """Loads the rows that a rank owns into its part of a table, in place of those that it has.

    Args:
        checkpoint: An open checkpoint.
        table: The declaration.
        owned: The rank's part.
        rank: Which rank.
        world_size: Ranks that share the table now.
        optimizer: Gets the saved state of these rows.
        convert: Whether rows may come from a checkpoint of another routing.

    Returns:
        Rows loaded.

    Raises:
        CheckpointError: If the table is missing, of another shape, or has a key twice.
        RoutingMismatchError: If the routing differs and `convert` is off.
    """
    return _check_fit(
        checkpoint, table, owned, rank=rank, world_size=world_size, optimizer=optimizer, convert=convert
    ).load()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """A table of a checkpoint that fits a rank's part, before anything is changed."""

    checkpoint: Checkpoint
    saved: TableRecord
    now: TableRecord
    owned: Any
    rank: int
    optimizer: torch.optim.Optimizer | None
    layout: Layout | None

    def load(self) -> int:
        """Loads the rows; returns how many."""
        record, weight, name = self.now, self.owned.weight, self.now.name
        same = record.routes_like(self.saved)
        if hasattr(self.owned, "reset_parameters"):
            self.owned.reset_parameters()
        state: dict[str, Tensor] = {}
        if self.optimizer is not None and self.layout is not None:
            state = prepare_state(self.optimizer, self.layout, weight, record)
        filled = torch.zeros(weight.shape[0], dtype=torch.bool, device=weight.device)
        loaded = 0
        for source in [self.rank] if same else range(self.saved.world_size):
            for read in self.checkpoint.rows(name, source):
                rows = reshape(read, record)
                mine = owners(rows.keys, record.routing, world_size=record.world_size, block_size=record.block)
                part = rows if same else rows.take(mine == self.rank)
                if part.keys.numel() == 0:
                    continue
                at = self.owned.place(part.keys.to(weight.device))
                _check_new(at, filled, part, name)
                for array, target in {"values": weight.data, **state}.items():
                    target[at] = part.arrays[array].to(target.device, target.dtype)
                loaded += part.keys.numel()
        return loaded


def _check_fit(
    checkpoint: Checkpoint,
    table: RoutedTable,
    owned: Any,
    *,
    rank: int,
    world_size: int,
    optimizer: Optimizers,
    convert: bool,
) -> _Load:
    saved = checkpoint.records.get(table.name)
    if saved is None:
        raise CheckpointError(f"{checkpoint.path}: no table {table.name}; it holds {', '.join(checkpoint.records)}")
    if saved.arrays["values"].shape != (table.embedding_dim,):
        raise CheckpointError(
            f"{checkpoint.path}: table {table.name} has rows of shape {saved.arrays['values'].shape}, not "
            f"({table.embedding_dim},)"
        )
    now = dataclasses.replace(
        for_dcp(saved),
        routing=table.resolved_routing,
        world_size=world_size,
        num_embeddings=table.num_embeddings,
        rows=(),
    )
    if not now.routes_like(saved) and not convert:
        raise RoutingMismatchError(
            f"{checkpoint.path}: table {table.name} was saved under {saved.describe()} and is loaded under "
            f"{now.describe()}; allow conversion, or convert it first with `evenkeel checkpoint convert`"
        )
    _check_held(table, owned)
    if (
        not hasattr(owned, "reset_parameters")
        and table.resolved_routing.dist_type != "continuous"
        and owned.held_keys().numel()
    ):
        raise CheckpointError(
            f"table {table.name}: it holds keys already, and its storage {type(owned).__name__} has no "
            "reset_parameters() that would make it forget them; load into a newly made collection"
        )
    owner = owner_of(optimizer, owned.weight, table.name)
    layout = Layout.of(owner, owned.weight, table.name, now) if owner is not None else None
    if layout is not None:
        check_state(layout, now, checkpoint.path)
    return _Load(checkpoint=checkpoint, saved=saved, now=now, owned=owned, rank=rank, optimizer=owner, layout=layout)


def _check_new(at: Tensor, filled: Tensor, part: Rows, table: str) -> None:
    """Marks rows as loaded. One byte a row of the table finds every key that comes twice."""
    twice = filled[at]
    filled[at] = True
    order = torch.argsort(at, stable=True)
    twice[order[1:]] |= at[order[1:]] == at[order[:-1]]
    if bool(twice.any()):
        raise repeated_key(part.where, table, int(part.keys[twice.cpu()][0]))


def load(
    collection: RoutedEmbeddingCollection,
    path: Path | str,
    *,
    optimizer: Optimizers = None,
    convert: bool = True,
) -> dict[str, int]:
    """Loads a collection's rows in place of those that it has; all of its ranks call it together.

    Under the routing that they were saved with each rank reads its own files. Under another each rank reads all rows in
    chunks and keeps those that it owns now, so a rank's memory is its tables, a byte a row and a few chunks.

    Keys that come later find what they would have found without an interruption. A state of the optimizer that is
    restored as a whole is restored before this, not after it: its rows are in the order of the run that saved it.

    Args:
        collection: The tables, new or used.
        path: A checkpoint of either format.
        optimizer: Gets the saved state of the tables in place of what it has; several if they are divided among them.
        convert: Whether tables may have been saved under another routing; if not, they are refused.

    Returns:
        Rows of each table over all ranks.

    Raises:
        CheckpointError: If the checkpoint does not fit any of them or lacks the optimizer's state, before anything is
            changed, or if it turns out to be damaged; the collection must not be used then. On all ranks.
        RoutingMismatchError: If the routing differs and `convert` is off.
    """
    problem: Exception | None = None
    fitting: list[_Load] = []
    loaded: dict[str, int] = {}
    try:
        checkpoint = open_checkpoint(os.fspath(path))
        fitting = [
            _check_fit(
                checkpoint,
                table,
                collection.tables[table.name],
                rank=collection.rank,
                world_size=collection.world_size,
                optimizer=optimizer,
                convert=convert,
            )
            for table in collection.configs
        ]
    except (ValueError, OSError) as error:
        problem = _of_checkpoint(path, error)
    _raise_any(problem, collection)
    try:
        loaded = {one.now.name: one.load() for one in fitting}
    except (ValueError, OSError) as error:
        problem = _of_checkpoint(path, error)
    _raise_any(problem, collection)
    totals = {name: sum(rank[name] for rank in _gather(loaded, collection)) for name in loaded}
    for name, total in totals.items():
        if total != sum(checkpoint.records[name].rows):
            raise CheckpointError(
                f"{path}: table {name} has {sum(checkpoint.records[name].rows)} rows, but {total} found an owner"
            )
    return totals


def _of_checkpoint(path: Path | str, error: Exception) -> Exception:
    """The error, as one of the checkpoint: a table that cannot hold its keys only says which."""
    if isinstance(error, CheckpointError | OSError):
        return error
    return CheckpointError(f"{path}: {error}")
