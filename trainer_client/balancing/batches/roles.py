"""What each jagged column is to a sample in parts: of the sequence, which is cut, or with which parts it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.splits import ALL, FIRST, LAST
from trainer_client.balancing.batches.spec import BatchError, Declarations
from trainer_client.balancing.batches.structure import PICKLES, Structure
from trainer_client.balancing.batches.walk import Draft

_PARTS = {"last": LAST, "first": FIRST, "all": ALL}


def roles_of(drafts: Sequence[Draft], columns: Sequence[str], declared: Declarations) -> tuple[int, ...]:
    """(jagged columns,) as `Structure.roles`.

    Raises:
        BatchError: If a declared field cannot be cut, or fields of one column are declared differently.
    """
    if not declared.has_sequence:
        return ()
    _check_dense(drafts, columns, declared)
    fields: dict[str, list[str]] = {column: [column] for column in columns}
    objects, counted = set(), set(columns)
    for draft in drafts:
        for column, path in zip(draft.columns, draft.field_paths, strict=False):  # dense fields have no columns
            fields[column] += [path] if path not in fields[column] else []
            counted.discard(column)
            if draft.label == PICKLES or (draft.padding is not None and draft.padding.lengths is None):
                objects.add(column)
    roles = {}
    for column, paths in fields.items():
        items = {path: found for path in paths if (found := declared.items(path)) is not None}
        parts = {path: part for path in paths if (part := declared.part(path)) is not None}
        _check_declared(column, items, "sequence")
        _check_declared(column, parts, "parts")
        if items and column in objects:
            raise BatchError(
                f"sequence names {next(iter(items))!r}, whose samples have no positions: it is a list of objects, or "
                "padded without lengths; make it a jagged tensor, or name its lengths in padded"
            )
        if items and parts:
            raise BatchError(
                f"{next(iter(items))!r} is in sequence and {next(iter(parts))!r}, which has the same lengths, in "
                "parts; declare one of them"
            )
        whole = column in objects or column in counted  # one for each sample, or a number of it
        default = ALL if whole else LAST
        if items:
            roles[column] = next(iter(items.values()))
        else:
            roles[column] = _PARTS[next(iter(parts.values()))] if parts else default
            if whole and roles[column] != ALL:
                raise BatchError(f"parts names {column!r}, which has one entry for each sample; it goes with all parts")
    return tuple(roles[column] for column in columns)


def check_items(lengths: NDArray[np.int64], columns: Sequence[str], roles: Sequence[int]) -> None:
    """Checks that samples have whole items in the fields of the sequence.

    Args:
        lengths: (n, jagged columns).
        columns: Their paths.
        roles: As `Structure.roles`.

    Raises:
        BatchError: If one has not.
    """
    for column, role in enumerate(roles):
        if role > 1 and (rest := lengths[:, column] % role).any():
            sample = int(rest.argmax())
            raise BatchError(
                f"sample {sample} has {lengths[sample, column]} values in {columns[column]!r}, which sequence declares "
                f"to have {role} an item; give whole items"
            )


def check_alike(structure: Structure, lengths: NDArray[np.int64]) -> None:
    """Checks that each sample has as many items in all fields of the sequence, which are cut alike.

    Args:
        structure: With `roles`.
        lengths: (n, jagged columns).

    Raises:
        BatchError: If one has not.
    """
    first, *others = [column for column, role in enumerate(structure.roles) if role > 0] or [0]
    for other in others:
        items, its = (lengths[:, column] // structure.roles[column] for column in (first, other))
        if (differ := items != its).any():
            sample = int(differ.argmax())
            one, another = (_field_of(structure, column) for column in (first, other))
            raise BatchError(
                f"sample {sample} has {items[sample]} items in {one!r} and {its[sample]} in {another!r}, both of which "
                "sequence declares: item i of one must belong to item i of the other, as they are cut alike; leave out "
                "of sequence what is no part of the history, such as candidates, which go with a sample's last part or "
                "as parts says, or say in sequence how many values an item has"
            )


def _field_of(structure: Structure, column: int) -> str:
    """A field with the lengths of a column, as users call it."""
    fields = (pair for leaf in structure.leaves for pair in zip(leaf.field_paths, leaf.columns, strict=False))
    return next((path for path, found in fields if found == column), structure.columns[column])


def _check_dense(drafts: Sequence[Draft], columns: Sequence[str], declared: Declarations) -> None:
    for draft in drafts:
        if not draft.rows or draft.path in columns:
            continue
        for name in ("sequence", "parts"):
            if declared.names(name, draft.path):
                remedy = "leave it out" if name == "parts" else "a field that is cut needs lengths"
                raise BatchError(
                    f"{name} names {draft.path!r}, which has {draft.rows} row{'s' * (draft.rows > 1)} for each sample: "
                    f"all parts get it; {remedy}, or say its lengths in rows_per_sample or padded"
                )


def _check_declared(column: str, found: Mapping[str, object], name: str) -> None:
    if len(set(found.values())) > 1:
        said = ", ".join(f"{path!r}: {value!r}" for path, value in found.items())
        raise BatchError(f"fields with the lengths of {column!r} are declared differently in {name}: {said}")
