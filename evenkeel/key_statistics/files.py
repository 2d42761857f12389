"""Key statistics as a file, and what a plan request takes from them."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from evenkeel.key_statistics.curves import LEAST_STEPS, SLOTS, MeasuredCurve, miss_curve
from evenkeel.key_statistics.trace import ALL, HeavyKeys, KeyTrace
from evenkeel.placement.fields import InvalidInputError, require
from evenkeel.placement.hardware import Runtime
from evenkeel.placement.request import PlanRequest, Table

FORMAT = "evenkeel-key-statistics"
VERSION = 2
_MOST_BYTES = 1 << 30
_SIGMAS = 6.0
"""Deviations by which chance may overstate the number of keys that a sample is of."""
_FIGURES = ("steps", "samples", "lookups", "limit", "excess")
_PARTS = ("names", "keys", "counts", "times")
_HEAVY_PARTS = ("keys", "times")


def dumps(traces: Mapping[str, KeyTrace]) -> bytes:
    """The bytes of a file of key statistics, by table."""
    arrays: dict[str, Any] = {}
    about: list[dict[str, Any]] = []
    for index, (name, trace) in enumerate(traces.items()):
        figures = {figure: getattr(trace, figure) for figure in _FIGURES}
        about.append({"table": name, **figures, "heavy_lookups": trace.heavy.lookups})
        names, key = np.unique(trace.key, return_inverse=True)
        counts = np.bincount(trace.step, minlength=trace.steps)
        for part, values in zip(_PARTS, (names, key, counts, trace.times), strict=True):
            arrays[f"{index}.{part}"] = values.astype(np.min_scalar_type(int(values.max(initial=0))))
        arrays |= {f"{index}.heavy_{part}": getattr(trace.heavy, part) for part in _HEAVY_PARTS}
    header = {"format": FORMAT, "version": VERSION, "tables": about}
    arrays["about"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def loads(content: bytes) -> dict[str, KeyTrace]:
    """Key statistics by table, from the bytes of a file.

    Raises:
        InvalidInputError: If it is no such file, of another version, or damaged.
    """
    remedy = "give a file that KeyStatistics.save wrote"
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        require(size <= _MOST_BYTES, "statistics", size, "take too many bytes", remedy)
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            require(about.get("format") == FORMAT, "statistics", about.get("format"), "are of another form", remedy)
            version = about.get("version")
            require(version == VERSION, "version", version, "is of another version", f"this one reads {VERSION}")
            return {str(entry["table"]): _trace(entry, arrays, index) for index, entry in enumerate(about["tables"])}
    except InvalidInputError:
        raise
    except Exception as error:  # a damaged archive may raise anything
        raise InvalidInputError("statistics", content[:20], f"are no key statistics ({error})", remedy) from None


def _heavy(entry: dict[str, Any], arrays: Mapping[str, Any], index: int) -> HeavyKeys:
    """The keys looked up most; earlier releases wrote none."""
    lookups = int(entry.get("heavy_lookups", 0))
    if not lookups:
        return HeavyKeys()
    keys, times = (arrays[f"{index}.heavy_{part}"].astype(np.int64) for part in _HEAVY_PARTS)
    if keys.shape != times.shape or keys.ndim != 1 or times.min(initial=0) < 0 or times.sum() > lookups:
        raise ValueError("its parts do not fit together")
    return HeavyKeys(keys=keys, times=times, lookups=lookups)


def _trace(entry: dict[str, Any], arrays: Mapping[str, Any], index: int) -> KeyTrace:
    names, key, counts, times = (arrays[f"{index}.{part}"] for part in _PARTS)
    steps, limit = int(entry["steps"]), int(entry["limit"])
    samples, lookups, excess = (float(entry[figure]) for figure in ("samples", "lookups", "excess"))
    key, counts = key.astype(np.int64), counts.astype(np.int64)
    fits = len(counts) == steps and counts.sum() == len(key) == len(times)
    if not fits or (len(key) and not 0 <= key.min() <= key.max() < len(names)):
        raise ValueError("its parts do not fit together")
    sane = all(map(math.isfinite, (samples, lookups, excess))) and lookups >= 0 and samples >= (lookups > 0)
    if not sane or not 0 <= limit <= ALL:
        raise ValueError("numbers are in it that nothing observed has")
    return KeyTrace(
        steps=steps,
        samples=samples,
        lookups=lookups,
        limit=limit,
        step=np.repeat(np.arange(steps), counts),
        key=names.astype(np.uint64)[key],
        times=times.astype(np.uint32),
        excess=excess,
        heavy=_heavy(entry, arrays, index),
    )


def with_statistics(
    request: PlanRequest, traces: Mapping[str, KeyTrace]
) -> tuple[PlanRequest, dict[str, MeasuredCurve]]:
    """The request with measured curves and lookups a sample for all tables that there are traces of.

    Where the plan is for larger steps than those observed, several are joined: statistics of one rank's batches serve a
    plan for many ranks.

    Args:
        request: What is to be planned.
        traces: Statistics by table, of all ranks together; those of tables that the request has not are ignored.

    Returns:
        The request, and the curve of each table by name.

    Raises:
        InvalidInputError: If the steps of a table are too few, once as many are joined as a step of the plan needs, or
            if more keys were seen than a table of TorchRec has rows.
    """
    wanted = request.step.samples_per_rank * request.topology.ranks
    curves: dict[str, MeasuredCurve] = {}
    tables = []
    for table in request.tables:
        trace = traces.get(table.name)
        if trace is None or not trace.steps:
            tables.append(table)
            continue
        counted = replace(table, ids_per_sample=trace.lookups / trace.samples if trace.lookups else 0.0)
        if not len(trace.key):  # never looked up, or of so few keys that none is in the sample
            tables.append(counted)
            continue
        _check_keys(request, table, trace)
        observed = trace.samples / trace.steps
        count = max(1, round(wanted / observed))
        try:
            curve = miss_curve(trace.joined(count), table.rows, eviction=table.eviction, slots=SLOTS[request.runtime])
        except InvalidInputError as error:
            what = f"of {table.name!r}, each of {observed:g} samples, are too few for steps of {wanted} samples"
            remedy = f"observe at least {LEAST_STEPS * count}, better some hundreds" if count > 1 else error.remedy
            raise InvalidInputError("statistics", trace.steps, what, remedy) from None
        curves[table.name] = curve
        tables.append(replace(counted, access=curve.access))
    return replace(request, tables=tuple(tables)), curves


def _check_keys(request: PlanRequest, table: Table, trace: KeyTrace) -> None:
    """Refuses statistics of another table, or of keys before they were folded; DynamicEmb gives up keys."""
    seen = len(np.unique(trace.key))
    surely = seen if trace.share == 1 else (seen - _SIGMAS * math.sqrt(seen)) / trace.share
    what = f"of {table.name!r} saw about {seen / trace.share:.0f} keys, and the table has {table.rows} rows, one a key"
    remedy = "observe the keys that the table is given, and name the tables as in the statistics"
    fits = request.runtime is not Runtime.TORCHREC or surely <= table.rows
    require(fits, "statistics", round(seen / trace.share), what, remedy)
