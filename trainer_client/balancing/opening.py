"""What the ranks settle once, when their stream opens."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel import partitioning
from trainer_client import redistribution
from trainer_client.balancing.groups import Groups, node_name
from trainer_client.balancing.schemas import raise_mismatch
from trainer_client.batches import FlatBatch


class NoDataError(Exception):
    """No rank has had any batch yet, so nobody knows what an empty one looks like."""


def warm_up(groups: Groups, device: torch.device | str | None) -> None:
    """Compiles the kernels, or loads them from numba's cache, before the first step instead of within one. Collective.

    The first rank of each host goes first, so that the others find the cache filled.
    """
    names = groups.gather_objects(node_name())
    leads = groups.leads and names.index(names[groups.rank]) == groups.rank
    for turn in (True, False):
        if leads is turn:
            partitioning.warm_up()
            redistribution.warm_up(device)
        groups.gather_objects(None)


def wire_fields(template: FlatBatch) -> list[tuple[str, str, str, tuple[int, ...]]]:
    """(path, dtype, kind, shape) as the service sees the batch: a jagged field is what has lengths of its own."""
    fields = [
        (leaf.path, str(leaf.dtype).removeprefix("torch."), "dense", leaf.shape)
        for leaf in template.structure.leaves
        if leaf.rows
    ]
    for index, path in enumerate(template.structure.columns):
        dtypes = [str(leaf.dtype).removeprefix("torch.") for leaf in template.structure.leaves if index in leaf.columns]
        fields.append((path, "+".join(dtypes), "jagged", ()))
    return fields


def agree_on_template(flat: FlatBatch | None, groups: Groups) -> FlatBatch:
    """An empty batch of the one schema that all ranks' batches have. Collective."""
    schemas = groups.gather_objects(None if flat is None else flat.schema.lines)
    known = {lines for lines in schemas if lines is not None}
    if not known:
        raise NoDataError
    if len(known) > 1:
        raise_mismatch(schemas)
    template = None if flat is None else flat.empty()
    if any(lines is None for lines in schemas):
        return next(other for other in groups.gather_objects(template) if other is not None)
    assert template is not None
    return template


def node_numbers(groups: Groups) -> NDArray[np.int32] | None:
    """The host of each rank as a number; None when there is only one. Collective."""
    names = groups.gather_objects(node_name())
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([order[name] for name in names], dtype=np.int32) if len(order) > 1 else None
