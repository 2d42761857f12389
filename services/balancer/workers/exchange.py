"""Rounds and plans as messages of an arena."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.slices import Slices
from services.balancer.decisions import Plan, PlanFailure, Reason, Summary, WindowParts
from services.balancer.effects import PlanInput
from services.balancer.planning import Round, pieces_of
from services.balancer.submissions import PlanOptions
from services.balancer.workers.arena import Arena, Column, MessageError

_NAMES = tuple(field.name for field in fields(Summary))
_values = attrgetter(*_NAMES)
_SLICES = ("destinations", "home_begin", "source_begin", "sources", "source_counts", "source_totals")


def round_columns(inputs: PlanInput) -> tuple[dict[str, Any], list[Column]]:
    """A round as `Arena.write` takes it: header and arrays, which it joins where they are to be read."""
    options, pieces = inputs.options, pieces_of(inputs)
    header = {
        "window": inputs.window,
        "strategy": options.strategy,
        "counts": options.counts,
        "tolerance": options.tolerance,
        "min_samples": options.min_samples,
        "arrays": list(pieces),
    }
    limits = (np.array(values, np.float64) for values in (options.speeds, options.memory_caps))
    return header, [*(Column(*each) for each in pieces.values()), *map(Column.of, limits)]


def read_round(header: dict[str, Any], arrays: list[NDArray[Any]]) -> Round:
    """The round that was written; its arrays are the arena's."""
    *own, speeds, caps = arrays
    options = PlanOptions(
        strategy=header["strategy"],
        counts=header["counts"],
        tolerance=header["tolerance"],
        speeds=tuple(speeds.tolist()),
        memory_caps=tuple(caps.tolist()),
        min_samples=header["min_samples"],
    )
    return Round(options=options, window=header["window"], **dict(zip(header["arrays"], own, strict=True)))


def write_result(arena: Arena, result: Plan | PlanFailure) -> int:
    """Writes the outcome of a partition; returns its length in bytes."""
    if isinstance(result, PlanFailure):
        return arena.write({"reason": int(result.reason), "detail": result.detail}, [])
    header: dict[str, Any] = {"digest": result.digest.hex(), "summary": _values(result.summary)}
    arrays = [*_slices_arrays(result.slices), result.loads_before, result.loads_after]
    window = result.window
    if window is not None:
        header["summaries"] = [_values(summary) for summary in window.summaries]
        arrays += [window.steps, window.home_begin, window.loads_before, window.loads_after]
        for cut in window.cuts:
            arrays += _slices_arrays(cut)
    return arena.write(header, [Column.of(array) for array in arrays])


def read_result(arena: Arena, nbytes: int) -> Plan | PlanFailure:
    """Reads the outcome of a partition; its arrays are copies.

    Raises:
        MessageError: If it is none.
    """
    header, arrays = arena.read(nbytes)
    try:
        if "reason" in header:
            return PlanFailure(reason=Reason(header["reason"]), detail=str(header["detail"]))
        taken = iter(arrays)

        def take(dtype: str, dimensions: int) -> NDArray[Any]:
            array = next(taken)
            if array.dtype != dtype or array.ndim != dimensions:
                raise MessageError(f"{array.dtype} of {array.ndim} dimensions where {dtype} of {dimensions} belongs")
            return array.copy()

        slices = _read_slices(take)
        before, after = take("<f8", 1), take("<f8", 1)
        window = None
        if "summaries" in header:
            steps, home_begin = take("<i4", 1), take("<i8", 1)
            batches_before, batches_after = take("<f8", 2), take("<f8", 2)
            summaries = tuple(_summary(each) for each in header["summaries"])
            window = WindowParts(
                steps=steps,
                home_begin=home_begin,
                cuts=tuple(_read_slices(take) for _ in summaries),
                loads_before=batches_before,
                loads_after=batches_after,
                summaries=summaries,
            )
        return Plan(
            slices=slices,
            digest=bytes.fromhex(header["digest"]),
            loads_before=before,
            loads_after=after,
            summary=_summary(header["summary"]),
            window=window,
        )
    except MessageError:
        raise
    except (ValueError, TypeError, KeyError, StopIteration) as error:
        raise MessageError(f"{type(error).__name__}: {error}") from error


def _summary(values: list[Any]) -> Summary:
    if not all(type(value) in (int, float) for value in values):
        raise MessageError(f"a summary of {values}")
    return Summary(**dict(zip(_NAMES, values, strict=True)))


def _slices_arrays(slices: Slices) -> Iterator[NDArray[Any]]:
    return map(slices.__getattribute__, _SLICES)


def _read_slices(take: Callable[[str, int], NDArray[Any]]) -> Slices:
    return Slices(take("<i4", 1), take("<i8", 1), take("<i8", 1), take("<i4", 1), take("<i4", 1), take("<i8", 2))
