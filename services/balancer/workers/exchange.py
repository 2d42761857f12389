"""Rounds and plans as messages of an arena."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.rounds import FIGURES, Figures, RoundOptions, RoundPlan
from evenkeel.partitioning.samples import Column, RoundSamples
from evenkeel.partitioning.slices import Slices
from services.balancer.decisions import PlanFailure, Reason
from services.balancer.effects import PlanInput
from services.balancer.planning import columns_of
from services.balancer.workers.arena import Arena, MessageError

_PER_RANK = ("speeds", "memory_caps")  # of the options
_SCALARS = tuple(field.name for field in fields(RoundOptions) if field.name not in _PER_RANK)
_PLAN = (("<f8", 2), ("<f8", 2))  # loads before and after
_SLICES = (("<i4", 1), ("<i8", 1), ("<i8", 1), ("<i4", 1), ("<i4", 1), ("<i8", 2), ("<i4", 1))
_values = attrgetter(*FIGURES)


def round_columns(inputs: PlanInput) -> tuple[dict[str, Any], list[Column]]:
    """A round as `Arena.write` takes it: header and arrays, which it joins where they are to be read."""
    options, columns = inputs.options, columns_of(inputs)
    header = {"arrays": list(columns), "options": {name: getattr(options, name) for name in _SCALARS}}
    limits = (np.array(getattr(options, name), np.float64) for name in _PER_RANK)
    return header, [*columns.values(), *map(Column.of, limits)]


def read_round(header: dict[str, Any], arrays: list[NDArray[Any]]) -> tuple[RoundSamples, RoundOptions]:
    """The round that was written; its arrays are the arena's."""
    count = len(header["arrays"])
    limits: dict[str, Any] = dict(zip(_PER_RANK, (tuple(each.tolist()) for each in arrays[count:]), strict=True))
    samples = RoundSamples(**dict(zip(header["arrays"], arrays[:count], strict=True)))
    return samples, RoundOptions(**header["options"], **limits)


def write_result(arena: Arena, result: RoundPlan | PlanFailure) -> int:
    """Writes the outcome of a partition; returns its length in bytes."""
    if isinstance(result, PlanFailure):
        return arena.write({"reason": int(result.reason), "detail": result.detail}, [])
    header = {
        "digest": result.digest.hex(), "seconds": result.seconds, "batches": [_values(each) for each in result.batches]
    }  # fmt: skip
    arrays = (result.loads_before, result.loads_after, *result.slices.arrays)
    return arena.write(header, [Column.of(array) for array in arrays])


def read_result(arena: Arena, nbytes: int) -> RoundPlan | PlanFailure:
    """Reads the outcome of a partition; its arrays are copies.

    Raises:
        MessageError: If it is none.
    """
    header, arrays = arena.read(nbytes)
    try:
        if "reason" in header:
            return PlanFailure(reason=Reason(header["reason"]), detail=str(header["detail"]))
        kinds = _PLAN + _SLICES
        if not len(kinds) - 1 <= len(arrays) <= len(kinds):  # the batches of the samples come last, if there are any
            raise MessageError(f"{len(arrays)} arrays of a plan")
        for array, (dtype, dimensions) in zip(arrays, kinds, strict=False):
            if array.dtype != dtype or array.ndim != dimensions:
                raise MessageError(f"{array.dtype} of {array.ndim} dimensions where {dtype} of {dimensions} belongs")
        before, after, *slices = (array.copy() for array in arrays)
        return RoundPlan(
            slices=Slices(*slices),
            loads_before=before,
            loads_after=after,
            batches=tuple(map(_figures, header["batches"])),
            digest=bytes.fromhex(header["digest"]),
            seconds=float(header["seconds"]),
        )
    except MessageError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise MessageError(f"{type(error).__name__}: {error}") from error


def _figures(values: list[Any]) -> Figures:
    if not all(type(value) in (int, float) for value in values):
        raise MessageError(f"figures of {values}")
    return Figures(**dict(zip(FIGURES, values, strict=True)))
