"""What follows from a batch's fields alone: found once for all batches that have the same ones, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any

from trainer_client.balancing.batches.containers import Tree
from trainer_client.balancing.batches.contents import OBJECTS, Contents, Derived, Leaf
from trainer_client.balancing.batches.roles import roles_of, shown_role
from trainer_client.balancing.batches.schema import Schema
from trainer_client.balancing.batches.spec import BatchError, Declarations


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What batches of one kind have in common."""

    tree: Tree | None  # the containers; None if the batch is a single field
    fields: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]  # the leaves of the tree, as `Field`
    leaves: tuple[Leaf, ...]  # the tensors
    columns: tuple[str, ...]  # path of each jagged column, ascending
    order: dict[str, int]  # number of each column
    lengths: tuple[Sequence[int], ...]  # columns of each tensor of lengths: of the fields', and of `counts`
    counts: dict[int, int]  # leaf and column of each tensor that holds lengths
    roles: tuple[int, ...]  # of columns in parts, see `evenkeel.partitioning.splits`; none without a sequence
    jagged: tuple[int, ...]  # leaves with as many rows as lengths say
    sample_bytes: int  # of each sample in leaves with as many rows for each
    value_bytes: tuple[int, ...]  # of each value of a column, in all leaves
    on_host: frozenset[int]  # leaves that are in the host's memory wherever the batch is
    reads_lengths: bool  # building a batch does, on the host
    shared: tuple[str, ...]  # paths of the shared values
    derived: dict[int, Derived]  # fields that are computed from the others, by their number
    schema: Schema  # what other ranks' batches must agree with


def structure_of(found: Contents, tree: Tree | None, paths: Iterable[str], declared: Declarations) -> Structure:
    """The structure of a batch whose values have these paths; refuses declarations that do not fit it."""
    by_path: list[Any] = [Leaf(*one) for one in found.leaves]  # whose columns are paths yet
    _check_named(found, by_path)
    jagged = [path for _, of in found.lengths for path in of]
    columns = tuple(sorted({*jagged, *(column for _, _, column in found.named)}))
    order = {path: index for index, path in enumerate(columns)}
    leaves = tuple(leaf._replace(columns=tuple([order[path] for path in leaf.columns])) for leaf in by_path)
    roles = roles_of(leaves, columns, declared)
    used = {*found.values, *((leaf.declared_in, leaf.path) for leaf in leaves)}
    if roles:
        with_roles = {*columns, *(path for leaf in leaves for path, _ in leaf.jagged_fields)}
        used.update((name, path) for name in ("sequence", "parts") for path in with_roles)
    absent = [path for parameter, path in found.values if not parameter]
    declared.check_used(used, absent, sorted({*paths, *(leaf.path for leaf in leaves)}))
    for what, given in ("jagged fields", jagged), ("fields", [path for leaf in leaves for path in leaf.field_paths]):
        if len(set(given)) < len(given):
            twice = next(path for index, path in enumerate(given) if path in given[:index])
            raise BatchError(f"two {what} have the path {twice!r}; rename one")
    counts = {index: order[leaf.path] for index, leaf in enumerate(leaves) if leaf.rows and leaf.path in order}
    numbers = [*([order[path] for path in of] for _, of in found.lengths), *([column] for column in counts.values())]
    value_bytes = [0] * len(columns)
    for leaf in leaves:
        for column in leaf.columns:
            value_bytes[column] += leaf.row_bytes
    shared = tuple(path for parameter, path in found.values if parameter == "shared")
    return Structure(
        tree=tree,
        fields=tuple((build, tuple(known)) for build, *known in found.fields),
        leaves=leaves,
        columns=columns,
        order=order,
        lengths=tuple(map(as_range, numbers)),
        counts=counts,
        roles=roles,
        jagged=tuple(index for index, leaf in enumerate(leaves) if not leaf.rows),
        sample_bytes=sum(leaf.rows * leaf.row_bytes for leaf in leaves),
        value_bytes=tuple(value_bytes),
        on_host=frozenset(index for index, leaf in enumerate(leaves) if leaf.on_host),
        reads_lengths=found.reads_lengths,
        shared=shared,
        derived=found.derived,
        schema=_schema(shared, leaves, columns, roles),
    )


def as_range(columns: Sequence[int]) -> Sequence[int]:
    """Columns that follow each other as a range."""
    following = range(columns[0], columns[0] + len(columns)) if columns else range(0)
    return following if all(map(eq, columns, following)) else columns


def _schema(shared: Sequence[str], leaves: Sequence[Leaf], columns: Sequence[str], roles: Sequence[int]) -> Schema:
    shown = [(path, f"{path}: shared") for path in shared]
    for leaf in leaves:
        name = OBJECTS if leaf.declared_in == OBJECTS else str(leaf.dtype).removeprefix("torch.")
        if leaf.rows:
            shown.append((leaf.path, f"{leaf.path}: {name}{list(leaf.shape)}, {leaf.rows} rows per sample"))
        for path, column in leaf.jagged_fields:
            parts = shown_role(roles[column]) if roles else ""
            shown.append((path, f"{path}: {name}{list(leaf.shape)}, jagged by {columns[column]}{parts}"))
    return Schema(lines=tuple(text for _, text in sorted(shown)))


def _check_named(found: Contents, leaves: Sequence[Leaf]) -> None:
    """Refuses columns that are named, and are neither a jagged field's nor integer tensors with the lengths."""
    objects = {leaf.path for leaf in leaves if leaf.declared_in == OBJECTS}  # whose lengths are bytes
    jagged = {path for _, columns in found.lengths for path in columns} - objects
    counts = {leaf.path for leaf in leaves if leaf.is_count}
    for parameter, path, column in found.named:
        if column not in jagged | counts:
            named = f"derived[{path!r}] is the longest" if parameter == "derived" else f"{parameter} of {path!r} names"
            raise BatchError(
                f"{named} {column!r}, which is neither a jagged field nor an int32 or int64 tensor with one "
                f"count per sample: {_what_is(column, found, leaves, jagged)}"
            )


def _what_is(path: str, found: Contents, leaves: Sequence[Leaf], jagged: set[str]) -> str:
    """What there is at a path that has no lengths, and what to do."""
    index = next((index for index, leaf in enumerate(leaves) if leaf.path == path), None)
    if index is None:
        if below := sorted(column for column in jagged if column.startswith(f"{path}.")):
            return f"name one of {', '.join(below[:8])}"
        if ("shared", path) in found.values:
            return "it is declared in shared"
        return "the batch has no field of this path with one entry for each sample"
    leaf, tensor = leaves[index], found.tensors[index]
    if leaf.declared_in == OBJECTS:
        return "it is a list or array of Python objects; make it a tensor, as with torch.tensor"
    if leaf.rows == 0:
        return "it is flattened by the lengths of another field itself; name those"
    if leaf.rows > 1:
        return f"it has {leaf.rows} rows per sample"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"it is of {dtype} and shape {tuple(tensor.shape)}; convert it, as with .flatten() or .to(torch.int64)"
