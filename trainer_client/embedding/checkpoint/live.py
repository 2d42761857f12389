"""Saving the tables of a running collection, and loading them under any routing."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_client.embedding.checkpoint import dcp
from trainer_client.embedding.checkpoint.convert import open_checkpoint
from trainer_client.embedding.checkpoint.files import staging
from trainer_client.embedding.checkpoint.optimizers import Layout, Optimizers, optimizer_of
from trainer_client.embedding.checkpoint.record import (
    ArraySpec,
    Checkpoint,
    CheckpointError,
    RoutingMismatchError,
    Rows,
    TableRecord,
    repeated_key,
)
from trainer_client.embedding.tables import RoutedEmbeddingCollection, RoutedTable


def _storage(collection: RoutedEmbeddingCollection, table: RoutedTable) -> Any:
    """This rank's part of a table."""
    part = collection.tables[table.name]
    if not hasattr(part, "held_keys"):
        raise CheckpointError(
            f"table {table.name}: its storage {type(part).__name__} keeps its rows to itself; use its own dump and "
            "load, and `evenkeel checkpoint convert` between routings"
        )
    return part


def _gather(value: Any, collection: RoutedEmbeddingCollection) -> list[Any]:
    if collection.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * collection.world_size
    dist.all_gather_object(gathered, value, group=collection.group)
    return gathered


@contextmanager
def _raised_by_all(collection: RoutedEmbeddingCollection, path: Path | str) -> Iterator[None]:
    """Raises on all ranks what goes wrong on any, so that none waits for another that has given up."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
        if isinstance(error, ValueError) and not isinstance(error, CheckpointError):
            problem = CheckpointError(f"{path}: {error}")  # a table that cannot hold its keys says only which
            problem.__cause__ = error
    failed = [other for other in _gather(problem, collection) if other is not None]
    if problem is not None or failed:
        raise problem or failed[0]


def _snapshot(
    collection: RoutedEmbeddingCollection, table: RoutedTable, optimizers: Optimizers
) -> tuple[TableRecord, dict[str, Tensor]]:
    """What this rank has of a table: its record, as if of one rank, and the arrays."""
    part = _storage(collection, table)
    optimizer = optimizer_of(optimizers, part.weight, table.name)
    state: dict[str, Tensor] = {}
    scalars: dict[str, float] = {}
    if optimizer is not None:
        layout = Layout.of(optimizer, part.weight, table.name)
        state, scalars = layout.read(optimizer.state.get(part.weight, {}))
    keys = part.held_keys()
    tensors = {"keys": keys, "values": part.weight.detach(), **state}
    record = TableRecord(
        name=table.name,
        routing=table.resolved_routing,
        world_size=collection.world_size,
        num_embeddings=table.num_embeddings,
        rows=(),
        arrays={name: ArraySpec.of(array) for name, array in tensors.items() if name != "keys"},
        scalars=scalars,
        optimizer=type(optimizer).__name__ if optimizer else "",
        # What a row that no key has taken holds, if there is one.
        fresh={name: rows[-1].double().flatten().tolist() for name, rows in state.items() if len(rows) > len(keys)},
    )
    return record.with_rows([len(keys)], lambda _, __, *rows: _read(tensors, *rows)), tensors


def _read(tensors: dict[str, Tensor], array: str, first: int, count: int) -> Tensor:
    return tensors[array][first : first + count].cpu()


def _of_all_ranks(parts: list[TableRecord]) -> TableRecord:
    first = max(parts, key=lambda record: len(record.arrays))
    if any(record.arrays != first.arrays for record in parts):
        raise CheckpointError(f"table {first.name}: ranks hold different optimizer state; step it on all ranks")
    return dataclasses.replace(
        first,
        rows=tuple(record.rows[0] for record in parts),
        digests=tuple(record.digests[0] for record in parts),
        fresh=next((record.fresh for record in parts if record.fresh), {}),
    )


def save(
    collection: RoutedEmbeddingCollection, path: Path | str, *, optimizer: Optimizers = None, overwrite: bool = False
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
    with _raised_by_all(collection, path):
        parts = {table.name: _snapshot(collection, table, optimizer) for table in collection.configs}
    gathered = _gather({name: record for name, (record, _) in parts.items()}, collection)
    records = [_of_all_ranks([rank[name] for rank in gathered]) for name in parts]
    with ExitStack() as written:
        folder: Path | None = None
        with _raised_by_all(collection, path):
            if collection.rank == 0:
                folder = written.enter_context(staging(Path(path), overwrite=overwrite))
        folder = next(filter(None, _gather(folder, collection)))
        dcp.write(
            folder, records, [collection.rank], lambda name, _, *rows: _read(parts[name][1], *rows),
            alone=collection.world_size == 1, group=collection.group,
        )  # fmt: skip
        _gather(None, collection)
        with _raised_by_all(collection, path):
            try:
                written.close()
            except OSError as error:
                raise CheckpointError(f"{path}: the checkpoint could not be put in place ({error})") from error


def _fitting(
    checkpoint: Checkpoint,
    collection: RoutedEmbeddingCollection,
    table: RoutedTable,
    optimizers: Optimizers,
    *,
    convert: bool,
) -> Callable[[], int]:
    """Checks that a table of a checkpoint fits this rank's part; what it gives loads the rows and tells how many."""
    saved, where = checkpoint.records.get(table.name), checkpoint.path
    if saved is None:
        raise CheckpointError(f"{where}: no table {table.name}; it holds {', '.join(checkpoint.records)}")
    shape = saved.arrays["values"].shape
    if shape != (table.embedding_dim,):
        raise CheckpointError(f"{where}: table {table.name} has rows of shape {shape}, not ({table.embedding_dim},)")
    record = saved.rerouted(table.resolved_routing, collection.world_size)
    record = dataclasses.replace(record, num_embeddings=table.num_embeddings)
    same = record.routes_like(saved)
    if not same and not convert:
        raise RoutingMismatchError(
            f"{where}: table {table.name} was saved under {saved.describe()} and is loaded under "
            f"{record.describe()}; allow conversion, or convert it first with `evenkeel checkpoint convert`"
        )
    part = _storage(collection, table)
    resets = hasattr(part, "reset_parameters")
    if not resets and table.resolved_routing.dist_type != "continuous" and part.held_keys().numel():
        raise CheckpointError(
            f"table {table.name}: it holds keys already, and its storage {type(part).__name__} has no "
            "reset_parameters() that would make it forget them; load into a newly made collection"
        )
    fullest = saved.rows[collection.rank] if same else -(-sum(saved.rows) // collection.world_size)
    if table.resolved_routing.dist_type != "continuous" and fullest > (room := part.weight.shape[0]):
        raise CheckpointError(
            f"{where}: table {table.name} has {sum(saved.rows)} rows, of which a rank gets {fullest} or more, and it "
            f"has room for {room}; raise its capacity"
        )
    optimizer, layout = optimizer_of(optimizers, part.weight, table.name), None
    if optimizer is not None:
        layout = Layout.of(optimizer, part.weight, table.name, record)
        layout.check(record, where)

    def run() -> int:
        if resets:
            part.reset_parameters()
        targets: dict[str, Tensor] = {"values": part.weight.data}
        if optimizer is not None and layout is not None:
            targets |= layout.prepare(optimizer, part.weight, record)
        filled = torch.zeros(part.weight.shape[0], dtype=torch.bool, device=part.weight.device)
        for source in [collection.rank] if same else range(saved.world_size):
            for rows in checkpoint.rows(table.name, source):
                local = rows if same else rows.take(record.owners(rows.keys) == collection.rank)
                if local.keys.numel() == 0:
                    continue
                at = part.place(local.keys.to(filled.device))
                _check_new(at, filled, local, table.name)
                for array, target in targets.items():
                    target[at] = local.arrays[array].to(target.device, target.dtype)
        return int(filled.sum())

    return run


def _check_new(at: Tensor, filled: Tensor, rows: Rows, table: str) -> None:
    """Marks rows as loaded. One byte a row of the table finds every key that comes twice."""
    twice = filled[at]
    filled[at] = True
    order = torch.argsort(at, stable=True)
    twice[order[1:]] |= at[order[1:]] == at[order[:-1]]
    if bool(twice.any()):
        raise repeated_key(rows.where, table, int(rows.keys[twice.cpu()][0]))


def load(
    collection: RoutedEmbeddingCollection, path: Path | str, *, optimizer: Optimizers = None, convert: bool = True
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
            changed; or if it turns out to be damaged, or a rank to get more than its even share and than it has room
            for: the collection must not be used then. On all ranks.
        RoutingMismatchError: If the routing differs and `convert` is off.
    """
    with _raised_by_all(collection, path):
        checkpoint = open_checkpoint(os.fspath(path))
        fitting = {t.name: _fitting(checkpoint, collection, t, optimizer, convert=convert) for t in collection.configs}
    with _raised_by_all(collection, path):
        loaded = {name: run() for name, run in fitting.items()}
    if collection.hot is not None:
        collection.hot.restart()
    totals = {name: sum(each[name] for each in _gather(loaded, collection)) for name in loaded}
    for name, total in totals.items():
        saved = sum(checkpoint.records[name].rows)
        if total != saved:
            raise CheckpointError(f"{path}: table {name} has {saved} rows, but {total} reached an owner")
    return totals
