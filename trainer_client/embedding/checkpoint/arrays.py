"""How the arrays of a table change between the formats: a dump keeps all optimizer state in one array."""

import dataclasses
import math

import torch

from trainer_client.embedding.checkpoint.errors import CheckpointError
from trainer_client.embedding.checkpoint.record import ArraySpec, TableRecord
from trainer_client.embedding.checkpoint.rows import Rows

_LAYOUT = "evenkeel_opt_values"
_SCALARS = "evenkeel_scalars"
_FRESH = "evenkeel_fresh"
_OPTIMIZER = "evenkeel_optimizer"
_OF_A_DUMP = ("values", "scores", "opt_values", "frequencies")


def for_dump(record: TableRecord) -> TableRecord:
    """The record with all optimizer state in one array, which is all that a dump can hold.

    Raises:
        CheckpointError: If values or state are not float32.
    """
    state = [name for name in sorted(record.arrays) if name not in _OF_A_DUMP]
    arrays = {name: spec for name, spec in record.arrays.items() if name not in state}
    if any(record.arrays[name].dtype != "float32" for name in (*state, *({"values"} & set(arrays)))):
        raise CheckpointError(f"table {record.name}: a DynamicEmb dump holds float32 values and optimizer state only")
    extra = dict(record.extra)
    if state:
        layout = {name: list(record.arrays[name].shape) for name in state}
        extra |= {_LAYOUT: layout, _SCALARS: record.scalars, _FRESH: record.fresh, _OPTIMIZER: record.optimizer}
        width = sum(math.prod(shape) for shape in layout.values())
        arrays["opt_values"] = ArraySpec(dtype="float32", shape=(width,))
    return dataclasses.replace(record, arrays=arrays, extra=extra)


def for_dcp(record: TableRecord) -> TableRecord:
    """The record with the optimizer state apart again, if a dump says how it was put together."""
    extra = dict(record.extra)
    layout, scalars = extra.pop(_LAYOUT, None), extra.pop(_SCALARS, None)
    fresh, optimizer = extra.pop(_FRESH, {}), extra.pop(_OPTIMIZER, "")
    if layout is None or "opt_values" not in record.arrays:
        return record
    arrays = {name: spec for name, spec in record.arrays.items() if name != "opt_values"}
    arrays |= {name: ArraySpec(dtype="float32", shape=tuple(shape)) for name, shape in layout.items()}
    return dataclasses.replace(
        record,
        arrays=arrays,
        extra=extra,
        scalars=scalars or record.scalars,
        fresh=fresh or record.fresh,
        optimizer=optimizer or record.optimizer,
    )


def reshape(rows: Rows, target: TableRecord) -> Rows:
    """Rows with the target's arrays: optimizer state joined or taken apart."""
    if rows.arrays.keys() == target.arrays.keys():
        return rows
    arrays = {name: array for name, array in rows.arrays.items() if name in target.arrays}
    if "opt_values" in target.arrays:
        parts = [rows.arrays[name].flatten(1) if rows.arrays[name].dim() > 1 else rows.arrays[name][:, None]
                 for name in sorted(rows.arrays) if name not in target.arrays]  # fmt: skip
        arrays["opt_values"] = torch.cat(parts, dim=1)
    else:
        at = 0
        for name in (n for n in target.arrays if n not in arrays):
            shape = target.arrays[name].shape
            arrays[name] = rows.arrays["opt_values"][:, at : at + math.prod(shape)].reshape(-1, *shape)
            at += math.prod(shape)
    return Rows(keys=rows.keys, arrays=arrays, where=rows.where)
