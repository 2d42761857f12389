"""The core of a problem as a mixed-integer program in HiGHS: on one thread, without a word, deterministic."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import highspy
import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from evenkeel.placement.limits import SolveCancelledError, Watch
from evenkeel.placement.problem import SLACK, Choice, Problem

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MOST_COLUMNS = 50_000
"""Options of a program at most: HiGHS takes some 8 kB of memory for each."""
_FINER = 1e3
"""What the largest cost is scaled to: HiGHS takes a point that is better by less than 1e-6 for no better."""
_ROUNDING = 1e-6


class Highs(highspy.Highs):
    """A solver that prints nothing, is deterministic, and runs beside whatever else of the process uses HiGHS."""

    def __init__(self, **options: float | str) -> None:
        """Sets options; presolve has called points optimal that were up to 13 % from the optimum."""
        super().__init__()  # type: ignore[no-untyped-call]
        fixed: dict[str, float | str] = {"threads": 1, "parallel": "off", "random_seed": 0, "presolve": "off"}
        for option, value in (fixed | options).items():
            self.setOptionValue(option, value)

    def enableCallbacks(self) -> None:  # noqa: N802
        """Silence it first: HiGHS 1.16 prints its name and licence at the first call, which this is."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]

    def run(self) -> highspy.HighsStatus:
        """Solve.

        All solvers of a process share one pool of threads. HiGHS refuses to run where the rest of the program has made
        it with another number of threads than these; it is then used as it is.
        """
        status: highspy.HighsStatus = super().run()
        if status == highspy.HighsStatus.kError:
            self.setOptionValue("threads", 0)
            status = super().run()
        return status


@dataclass(frozen=True, slots=True)
class Core:
    """Outcome of a program over some options.

    Attributes:
        choice: The modules; `None` where none was found.
        bound: No choice among the options costs less; infinite where there is none.
        proved: Whether the program was solved to its gap, or proved to have no solution.
    """

    choice: Choice | None
    bound: float
    proved: bool


def solve_core(problem: Problem, kept: list[BoolArray], *, gap: float, start: Choice | None, watch: Watch) -> Core:
    """The cheapest choice among the options in `kept`, (tables, modules) of each group, to a relative gap."""
    if not all(mask.any(axis=1).all() for mask in kept):
        return Core(None, np.inf, True)
    if watch.is_over():
        return Core(None, -np.inf, False)
    program = _Program(problem, kept)
    solver = Highs(mip_rel_gap=gap, mip_abs_gap=1e-12, time_limit=max(0.01, watch.wall_left()))
    solver.passModel(program.model())
    if start is not None and (values := program.values(start)) is not None:
        point = highspy.HighsSolution()
        point.col_value = values.tolist()
        solver.setSolution(point)
    for event in (solver.cbMipInterrupt, solver.cbSimplexInterrupt):
        event.subscribe(lambda call: call.interrupt() if watch.is_cancelled() or watch.left() <= 0 else None)
    solver.run()
    if watch.is_cancelled():
        raise SolveCancelledError
    proved = solver.getModelStatus() in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible)
    info = solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return Core(None, np.inf if proved else -np.inf, proved)
    values = np.array(solver.getSolution().col_value)
    cost, claimed = float(program.costs @ values), float(info.objective_function_value) / program.scale
    if abs(claimed - cost) > _ROUNDING * (1 / program.scale + abs(cost)):
        # The objective is not that of the point: whatever else is said is in doubt.
        return Core(program.choice(values), -np.inf, False)
    return Core(program.choice(values), min(float(info.mip_dual_bound) / program.scale, cost), proved)


class _Program:
    """Columns: which option each table takes, then which choice each agreement is."""

    def __init__(self, problem: Problem, kept: list[BoolArray]) -> None:
        self.problem = problem
        self.cells = [np.nonzero(mask) for mask in kept]
        pairs = list(zip(problem.groups, self.cells, strict=True))
        self.ends = np.cumsum([len(rows) for rows, _ in self.cells])
        self.choices: dict[Hashable, dict[Hashable, int]] = {}
        """Of each agreement that there is more than one choice for, the column of each."""
        for group, (_, modules) in pairs:
            for module in np.unique(modules).tolist():
                for what, choice in group.modules[module].agreements:
                    self.choices.setdefault(what, {}).setdefault(choice, 0)
        self.choices = {what: found for what, found in self.choices.items() if len(found) > 1}
        number = int(self.ends[-1])
        for found in self.choices.values():
            for choice in found:
                found[choice] = number
                number += 1
        none = np.zeros(number - int(self.ends[-1]))
        self.costs = np.concatenate([*(group.seconds[cells] for group, cells in pairs), none])
        self.uses = [
            np.concatenate([*(use[cells] for use, cells in zip(uses, self.cells, strict=True)), none])
            for uses in ([group.hbm for group in problem.groups], [group.host for group in problem.groups])
        ]
        self.scale = _FINER / max(float(np.abs(self.costs).max(initial=0.0)), 1e-300)

    def model(self) -> highspy.HighsLp:
        """What HiGHS solves: an option for each table, one choice for each agreement, both budgets kept."""
        parts: list[tuple[sp.csr_matrix, float, float]] = []
        columns, begin = len(self.costs), 0
        one_each = [_matrix(np.zeros(len(found)), [*found.values()], columns) for found in self.choices.values()]
        parts += [(matrix, -np.inf, 1.0) for matrix in one_each]
        for group, (rows, modules), end in zip(self.problem.groups, self.cells, self.ends.tolist(), strict=True):
            mine = np.arange(begin, end)
            begin = end
            parts.append((_matrix(rows, mine, columns), 1.0, 1.0))
            for slot in range(max((len(module.agreements) for module in group.modules), default=0)):
                agreed = np.array([self._column(module.agreements[slot : slot + 1]) for module in group.modules])
                linked = agreed[modules] >= 0
                if linked.any():  # a table's options that need a choice are taken only if the choice is made
                    pairs = np.stack([rows[linked], agreed[modules][linked]])
                    unique, row = np.unique(pairs, axis=1, return_inverse=True)
                    taken = _matrix(row.ravel(), mine[linked], columns)
                    parts.append((taken - _matrix(np.arange(unique.shape[1]), unique[1], columns), -np.inf, 0.0))
        for use, budget in zip(self.uses, self.problem.budget.tolist(), strict=True):
            if np.isfinite(budget):
                parts.append((sp.csr_matrix(use[None, :]), -np.inf, budget + SLACK / 2))
        matrix = sp.vstack([part for part, _, _ in parts]).tocsc()
        sides = np.array([(low, high) for part, low, high in parts for _ in range(part.shape[0])])
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = columns, matrix.shape[0]
        model.col_cost_ = self.costs * self.scale
        model.col_lower_, model.col_upper_ = np.zeros(columns), np.ones(columns)
        model.row_lower_ = np.where(np.isneginf(sides[:, 0]), -highspy.kHighsInf, sides[:, 0])
        model.row_upper_ = sides[:, 1]
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_, model.a_matrix_.index_ = matrix.indptr, matrix.indices
        model.a_matrix_.value_ = matrix.data.astype(np.float64)
        model.integrality_ = [highspy.HighsVarType.kInteger] * columns
        return model

    def _column(self, agreements: tuple[tuple[Hashable, Hashable], ...]) -> int:
        return next((self.choices.get(what, {}).get(choice, -1) for what, choice in agreements), -1)

    def values(self, choice: Choice) -> FloatArray | None:
        """(columns,) the values that stand for a choice; `None` where an option of it is not in the program."""
        values = np.zeros(len(self.costs))
        begin = 0
        for group, (rows, modules), mine, end in zip(
            self.problem.groups, self.cells, choice, self.ends.tolist(), strict=True
        ):
            taken = mine[rows] == modules
            if taken.sum() < len(mine):
                return None
            values[begin:end] = taken
            begin = end
            for module in np.unique(mine).tolist():
                agreed = [self._column((agreement,)) for agreement in group.modules[module].agreements]
                values[[column for column in agreed if column >= 0]] = 1.0
        return values

    def choice(self, values: FloatArray) -> Choice:
        """For each group, the module of each of its tables."""
        found = []
        for (rows, modules), own in zip(self.cells, np.split(values, self.ends), strict=False):
            taken = own > 0.5
            mine = np.zeros(int(rows.max(initial=-1)) + 1, dtype=np.int64)
            mine[rows[taken]] = modules[taken]
            found.append(mine)
        return tuple(found)


def _matrix(rows: IntArray | FloatArray, columns: IntArray | list[int], width: int) -> sp.csr_matrix:
    """Ones in some rows and columns."""
    rows = np.asarray(rows, dtype=np.int64)
    return sp.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(int(rows.max()) + 1, width))
