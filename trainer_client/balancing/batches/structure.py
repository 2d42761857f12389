"""What follows from a batch's fields and tensors alone, found once for all batches that have the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainer_client.balancing.batches.containers import Tree
from trainer_client.balancing.batches.kinds import PICKLES, Derived, Field, Leaf, Objects, Rows, Shared, reads_lengths
from trainer_client.balancing.batches.roles import roles_of, shown_role
from trainer_client.balancing.batches.schema import Schema
from trainer_client.balancing.batches.spec import BatchError, Declarations, MaxLength

if TYPE_CHECKING:
    from trainer_client.balancing.batches.reading import Reading

_COUNTS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What batches of one kind have in common."""

    tree: Tree | None  # the containers; None if the batch is a single field
    fields: tuple[Field, ...]  # the leaves of the tree
    leaves: tuple[Leaf, ...]  # the tensors
    columns: tuple[str, ...]  # path of each jagged column, ascending
    lengths: tuple[list[int] | range, ...]  # columns of each tensor of lengths: of the fields', and of `counts`
    schema: Schema  # what other ranks' batches must agree with
    roles: tuple[int, ...]  # of columns in parts, see `evenkeel.partitioning.splits`; none without a sequence
    order: dict[str, int]  # number of each column
    counts: dict[int, int]  # leaf and column of each tensor that holds lengths
    jagged: tuple[int, ...]  # leaves with as many rows as lengths say
    on_host: frozenset[int]  # leaves that are in the host's memory wherever the batch is
    reads_lengths: bool  # building a batch does, on the host
    derived: dict[int, Derived]  # fields that are computed from the others, by their number


def is_count(leaf: Leaf) -> bool:
    """Whether it is an integer for each sample, which may be a length."""
    return leaf.rows == 1 and not leaf.shape and leaf.dtype in _COUNTS


def structure_of(reading: Reading, tree: Tree | None, declared: Declarations) -> Structure:
    """The structure of a batch whose fields are in a tree of containers; refuses declarations that do not fit it."""
    fields = reading.fields
    by_path: list[Any] = [Leaf(*one) for one in reading.leaves]  # whose columns are paths yet
    jagged = [path for _, columns in reading.lengths for path in columns]
    columns = tuple(sorted({*jagged, *_counted(reading, by_path, jagged)}))
    order = {path: index for index, path in enumerate(columns)}
    leaves = tuple(leaf._replace(columns=tuple([order[path] for path in leaf.columns])) for leaf in by_path)
    roles = roles_of(leaves, columns, declared)
    absent = [one.path for one in fields if isinstance(one, Shared) and one.number < 0]
    all_paths = sorted({*reading.paths, *(leaf.path for leaf in leaves)})
    declared.check_used(_used(fields, leaves, columns, declared), absent, all_paths)
    for what, paths in ("jagged fields", jagged), ("fields", [path for leaf in leaves for path in leaf.field_paths]):
        if len(set(paths)) < len(paths):
            twice = next(path for index, path in enumerate(paths) if path in paths[:index])
            raise BatchError(f"two {what} have the path {twice!r}; rename one")
    counts = {index: order[leaf.path] for index, leaf in enumerate(leaves) if leaf.rows and leaf.path in order}
    numbers = [[order[path] for path in paths] for _, paths in reading.lengths]
    return Structure(
        tree=tree,
        fields=tuple(fields),
        leaves=leaves,
        columns=columns,
        lengths=tuple(map(as_range, [*numbers, *([column] for column in counts.values())])),
        schema=_schema(fields, leaves, columns, roles),
        roles=roles,
        order=order,
        counts=counts,
        jagged=tuple(index for index, leaf in enumerate(leaves) if not leaf.rows),
        on_host=frozenset(index for index, leaf in enumerate(leaves) if leaf.on_host),
        reads_lengths=any(map(reads_lengths, fields)),
        derived={i: one for i, one in enumerate(fields) if isinstance(one, Derived) and one.needs_batch},
    )


def as_range(columns: list[int]) -> list[int] | range:
    """Columns that follow each other as a range."""
    following = range(columns[0], columns[0] + len(columns)) if columns else range(0)
    return following if columns == list(following) else columns


def _counted(reading: Reading, leaves: Sequence[Any], jagged: Sequence[str]) -> set[str]:
    """Columns that are named and are no jagged field's, but integer tensors with the lengths."""
    lengths = set(jagged) - {leaf.path for leaf in leaves if leaf.label == PICKLES}  # whose lengths are bytes
    counts = {leaf.path for leaf in leaves if is_count(leaf)}
    named = [
        (one.function.path, f"derived[{one.path!r}] is the longest")
        for one in reading.fields
        if isinstance(one, Derived) and isinstance(one.function, MaxLength)
    ]
    for leaf in [leaves[one.leaf] for one in reading.fields if isinstance(one, Rows)]:
        if leaf.columns and (leaf.padding is None or leaf.padding.lengths is not None):
            what = "rows_per_sample" if leaf.padding is None else "padded"
            named.append((leaf.columns[0], f"{what} of {leaf.path!r} names"))
    for column, who in named:
        if column not in lengths | counts:
            raise BatchError(
                f"{who} {column!r}, which is neither a jagged field nor an int32 or int64 tensor with one "
                f"count per sample: {_what_is(column, reading, leaves, lengths)}"
            )
    return {column for column, _ in named} - lengths


def _what_is(path: str, reading: Reading, leaves: Sequence[Leaf], jagged: set[str]) -> str:
    """What there is at a path that has no lengths, and what to do."""
    index = next((index for index, leaf in enumerate(leaves) if leaf.path == path), None)
    if index is None:
        below = sorted(column for column in jagged if column.startswith(f"{path}."))
        if below:
            return f"name one of {', '.join(below[:8])}"
        if any(isinstance(one, Shared) and one.path == path and one.number >= 0 for one in reading.fields):
            return "it is declared in shared"
        return "the batch has no field of this path with one entry for each sample"
    leaf, tensor = leaves[index], reading.tensors[index]
    if leaf.label == PICKLES:
        return "it is a list or array of Python objects; make it a tensor, as with torch.tensor"
    if leaf.rows == 0:
        return "it is flattened by the lengths of another field itself; name those"
    if leaf.rows > 1:
        return f"it has {leaf.rows} rows per sample"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"it is of {dtype} and shape {tuple(tensor.shape)}; convert it, as with .flatten() or .to(torch.int64)"


def _used(
    fields: Sequence[Field], leaves: Sequence[Leaf], columns: Sequence[str], declared: Declarations
) -> set[tuple[str, str]]:
    """Parameters of the spec and paths that they say something about."""
    used: set[tuple[str, str]] = set()
    for one in fields:
        if isinstance(one, Rows):
            used.add(("rows_per_sample" if one.padding is None else "padded", leaves[one.leaf].path))
        elif isinstance(one, Objects):
            used.add(("objects", one.path))
        elif isinstance(one, Derived):
            used.add(("batch_size" if one.function is None else "derived", one.path))
        elif isinstance(one, Shared) and one.number >= 0:
            used.add(("shared", one.path))
    if declared.spec.sequence:
        jagged = {*columns, *(path for leaf in leaves if leaf.columns for path in leaf.field_paths)}
        used.update((name, path) for name in ("sequence", "parts") for path in jagged)
    return used


def _schema(fields: Sequence[Field], leaves: Sequence[Leaf], columns: Sequence[str], roles: Sequence[int]) -> Schema:
    shown = [(one.path, f"{one.path}: shared") for one in fields if isinstance(one, Shared) and one.number >= 0]
    for leaf in leaves:
        kind = f"{leaf.label or str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if leaf.rows:
            shown.append((leaf.path, f"{leaf.path}: {kind}, {leaf.rows} rows per sample"))
        for path, column in leaf.jagged_fields:
            parts = shown_role(roles[column]) if roles else ""
            shown.append((path, f"{path}: {kind}, jagged by {columns[column]}{parts}"))
    return Schema(lines=tuple(text for _, text in sorted(shown)))
