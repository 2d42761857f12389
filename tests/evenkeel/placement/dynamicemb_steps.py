"""Measured steps of DynamicEmb on one H200, to which the profile `h200` is fitted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evenkeel.placement.access import power_law
from evenkeel.placement.calibration import MeasuredStep
from evenkeel.placement.options import table_options
from evenkeel.placement.request import Mode, Optimizer, PlanRequest, Step, Table, Topology

ROWS = 8_000_000
IDS = 262_144


@dataclass(frozen=True, slots=True)
class Row:
    """One measured configuration: ms a step and device MiB in use."""

    mode: Mode
    ratio: float
    milliseconds: float
    device_mib: float
    cache_per_unique: float | None


# 2 tables x 8 M rows, width 128, fp32, Adam, 262,144 ids a table and step from a power law of 1.05.
MEASURED = (
    Row(Mode.HBM_ONLY, 1.0, 2.15, 25_010, None),
    Row(Mode.CACHING, 0.5, 5.63, 13_624, 46),
    Row(Mode.CACHING, 0.25, 8.81, 7_684, 23),
    Row(Mode.CACHING, 0.1, 12.40, 4_138, 9.2),
    Row(Mode.CACHING, 0.05, 22.80, 2_928, 4.6),
    Row(Mode.CACHING, 0.02, 75.83, 2_236, 1.8),
    Row(Mode.HYBRID, 0.5, 15.96, 14_412, None),
    Row(Mode.HYBRID, 0.1, 16.59, 5_086, None),
    Row(Mode.HOST_ONLY, 0.0, 15.31, 2_284, None),
)


def measured_request() -> PlanRequest:
    """The request that describes the measured job."""
    access = power_law(1.05, ROWS)
    tables = tuple(
        Table(name=f"t{i}", rows=ROWS, dim=128, ids_per_sample=1.0, optimizer=Optimizer.ADAM, access=access)
        for i in range(2)
    )
    topology = Topology(ranks=1, hbm_bytes=141 << 30)
    return PlanRequest(tables=tables, topology=topology, hardware="h200", step=Step(samples_per_rank=IDS))


def measured_step(row: Row) -> MeasuredStep:
    """A measured row in the form that the fit takes."""
    seconds = row.milliseconds / 1e3
    return MeasuredStep(mode=row.mode, ratio=row.ratio, seconds=seconds, tables=2, rows=ROWS, dim=128, ids=IDS)


def predicted_mib(request: PlanRequest, row: Row) -> float:
    """Predicted device MiB of a measured row, workspace included."""
    total = float(request.profile.costs(request.runtime).workspace_bytes)
    for table in request.tables:
        options = table_options(request, replace(table, ratio=row.ratio, modes=(row.mode,)), np.array([0.5]))
        total += options[0].hbm[0]
    return total / 2**20
