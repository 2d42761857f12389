"""What each jagged column is to a sample in parts: of the sequence, which is cut, or with which parts it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.splits import ALL, FIRST, LAST
from trainer_client.balancing.batches.contents import OBJECTS, Leaf
from trainer_client.balancing.batches.spec import BatchError, Declarations

_PARTS = {"last": LAST, "first": FIRST, "all": ALL}
_SHOWN = {LAST: "the last part", FIRST: "the first part", ALL: "all parts"}


def roles_of(leaves: Sequence[Leaf], columns: Sequence[str], declared: Declarations) -> tuple[int, ...]:
    """(jagged columns,) as `Structure.roles`; refuses fields that cannot be cut, or are declared differently."""
    if not declared.spec.sequence:
        return ()
    for leaf in leaves:
        for name, remedy in (("sequence", "a field that is cut needs lengths"), ("parts", "leave it out")):
            if leaf.rows and leaf.path not in columns and leaf.path in getattr(declared.spec, name):
                raise BatchError(
                    f"{name} names {leaf.path!r}, which has {leaf.rows} row{'s' * (leaf.rows > 1)} for each sample: "
                    f"all parts get it; {remedy}, or say its lengths in rows_per_sample or padded"
                )
    return tuple(_role(index, path, leaves, declared) for index, path in enumerate(columns))


def _role(column: int, path: str, leaves: Sequence[Leaf], declared: Declarations) -> int:
    fields = [(leaf, field) for leaf in leaves for field, of in leaf.jagged_fields if of == column]
    paths = {one: declared.at(one) for one in (path, *(field for _, field in fields))}
    items = {one: int(at["sequence"]) for one, at in paths.items() if "sequence" in at}
    parts = {one: str(at["parts"]) for one, at in paths.items() if "parts" in at}
    by_name: tuple[tuple[str, Mapping[str, object]], ...] = (("sequence", items), ("parts", parts))
    for name, values in by_name:
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{path!r}: {value!r}" for path, value in values.items())
            raise BatchError(f"fields with the lengths of {path!r} are declared differently in {name}: {shown}")
    # one for each sample, so that it has no positions; or a number, which belongs to no field of its own
    is_object = any(
        leaf.declared_in == OBJECTS or (leaf.padding and leaf.padding.lengths is None) for leaf, _ in fields
    )
    if items and is_object:
        raise BatchError(
            f"sequence names {next(iter(items))!r}, whose samples have no positions: it is a list of objects, or "
            "padded without lengths; make it a jagged tensor, or name its lengths in padded"
        )
    if items and parts:
        raise BatchError(
            f"{next(iter(items))!r} is in sequence and {next(iter(parts))!r}, which has the same lengths, in "
            "parts; declare one of them"
        )
    if items:
        return next(iter(items.values()))
    is_whole = is_object or not fields
    role = next((_PARTS[part] for part in parts.values()), ALL if is_whole else LAST)
    if is_whole and role != ALL:
        raise BatchError(f"parts names {path!r}, which has one entry for each sample; it goes with all parts")
    return role


def shown_role(role: int) -> str:
    """A role in a line of the schema."""
    return f", {role} an item of the sequence" if role > 0 else f", with {_SHOWN[role]}"


def check_items(lengths: NDArray[np.int64], columns: Sequence[str], roles: Sequence[int]) -> None:
    """Refuses samples, of (n, jagged columns) lengths, without whole items in the fields of the sequence."""
    for column, role in enumerate(roles):
        if role > 1 and (rest := lengths[:, column] % role).any():
            sample = int(rest.argmax())
            raise BatchError(
                f"sample {sample} has {lengths[sample, column]} values in {columns[column]!r}, which sequence declares "
                f"to have {role} an item; give whole items"
            )


def check_alike(
    lengths: NDArray[np.int64], columns: Sequence[str], roles: Sequence[int], leaves: Sequence[Leaf]
) -> None:
    """Refuses samples, of (n, jagged columns) lengths, without as many items in all fields of the sequence."""
    names = dict(enumerate(columns))
    for leaf in reversed(leaves):  # the first field with the lengths of a column, as users call it
        names |= {column: path for path, column in reversed(leaf.jagged_fields)}
    first, *others = [column for column, role in enumerate(roles) if role > 0] or [0]
    for other in others:
        items, its = (lengths[:, column] // roles[column] for column in (first, other))
        if (differ := items != its).any():
            sample = int(differ.argmax())
            raise BatchError(
                f"sample {sample} has {items[sample]} items in {names[first]!r} and {its[sample]} in {names[other]!r}, "
                "both of which sequence declares: item i of one must belong to item i of the other, as they are cut "
                "alike; leave out of sequence what is no part of the history, such as candidates, which go with a "
                "sample's last part or as parts says, or say in sequence how many values an item has"
            )
