"""Mixed-integer programs in HiGHS, deterministic and interruptible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from evenkeel.placement.highs import Highs
from evenkeel.placement.limits import SolveCancelledError, Watch

FloatArray = npt.NDArray[np.float64]

_FINER = 1e3
"""What objectives are multiplied by: HiGHS takes a point that is better by less than 1e-6 for no better."""
_ROUNDING = 1e-6
MOST_COLUMNS = 50_000
"""Columns of a program at most: HiGHS takes some 8 kB of memory for each."""


@dataclass(frozen=True, slots=True)
class MilpResult:
    """Outcome of a mixed-integer program.

    Attributes:
        values: Value of each column; `None` without a feasible point.
        objective: Its objective; infinite without a feasible point.
        bound: No feasible point is below this.
        proved: Whether HiGHS finished (optimal within the gap, or infeasible).
    """

    values: FloatArray | None
    objective: float
    bound: float
    proved: bool


def solve_milp(
    cost: FloatArray,
    matrix: sp.csr_matrix,
    row_lower: FloatArray,
    row_upper: FloatArray,
    integer: npt.NDArray[np.bool_],
    upper: FloatArray,
    *,
    gap: float = 0.0,
    start: FloatArray | None = None,
    watch: Watch | None = None,
) -> MilpResult:
    """Minimise `cost @ x` with `row_lower <= matrix @ x <= row_upper` and `0 <= x <= upper`.

    Args:
        cost: Cost of each column.
        matrix: Constraints by columns.
        row_lower: Lower side of each constraint.
        row_upper: Upper side of each constraint.
        integer: Which columns are whole numbers.
        upper: Upper bound of each column.
        gap: Relative gap at which to stop.
        start: A feasible point to start from.
        watch: Once its time is up, the best found is returned with its bound; a minute by default.

    Raises:
        SolveCancelledError: If the caller wants the search to stop.
    """
    watch = watch or Watch()
    if watch.is_over():
        return MilpResult(None, np.inf, -np.inf, False)
    solver = Highs()
    for option, value in (
        ("mip_rel_gap", gap),
        ("mip_abs_gap", 1e-12),
        ("time_limit", max(0.01, watch.left())),
        ("presolve", "off"),  # it has called points optimal that were up to 13 % from the optimum
    ):
        solver.setOptionValue(option, value)
    solver.passModel(_model(cost * _FINER, matrix, row_lower, row_upper, integer, upper))
    if start is not None:
        point = highspy.HighsSolution()
        point.col_value = start.tolist()
        solver.setSolution(point)
    for event in (solver.cbMipInterrupt, solver.cbSimplexInterrupt):
        event.subscribe(lambda call: _interrupt(call, watch))
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInterrupt and watch.is_cancelled():
        raise SolveCancelledError
    info = solver.getInfo()
    proved = status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible)
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if not found:
        return MilpResult(None, np.inf, np.inf if proved else -np.inf, proved)
    values = np.array(solver.getSolution().col_value)
    objective = float(info.objective_function_value) / _FINER
    if abs(objective - float(cost @ values)) > _ROUNDING * (1e-3 + abs(objective)):
        # The objective is not that of the point: whatever else is said is in doubt.
        return MilpResult(values, float(cost @ values), -np.inf, False)
    bound = float(info.mip_dual_bound) / _FINER if integer.any() else objective
    return MilpResult(values, objective, min(bound, objective), proved)


def _interrupt(call: Any, watch: Watch) -> None:
    if watch.is_cancelled() or watch.left() <= 0:
        call.interrupt()


def _model(
    cost: FloatArray,
    matrix: sp.csr_matrix,
    row_lower: FloatArray,
    row_upper: FloatArray,
    integer: npt.NDArray[np.bool_],
    upper: FloatArray,
) -> highspy.HighsLp:
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(cost), matrix.shape[0]
    model.col_cost_ = cost
    model.col_lower_ = np.zeros(len(cost))
    model.col_upper_ = upper
    model.row_lower_ = np.where(np.isneginf(row_lower), -highspy.kHighsInf, row_lower)
    model.row_upper_ = np.where(np.isposinf(row_upper), highspy.kHighsInf, row_upper)
    columns = matrix.tocsc()
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_, model.a_matrix_.index_ = columns.indptr, columns.indices
    model.a_matrix_.value_ = columns.data.astype(np.float64)
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    model.integrality_ = [kinds[int(flag)] for flag in integer]
    return model
