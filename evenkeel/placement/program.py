"""The core of a problem as a mixed-integer program in HiGHS: on one thread, without a word, deterministic."""

from __future__ import annotations

import highspy
import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from evenkeel.placement.limits import Watch
from evenkeel.placement.problem import SLACK, BoolArray, Choice, Problem

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

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


def solve_core(
    problem: Problem, kept: BoolArray, *, gap: float, start: Choice | None, watch: Watch
) -> tuple[Choice | None, float, bool]:
    """The cheapest choice among those of the (options,) that are `kept`, to a relative gap.

    Returns:
        The options, `None` where none were found; what no such choice costs less than, infinite where there is none;
        and whether the program was solved to its gap, or proved to have no solution.
    """
    if len(np.unique(problem.table[kept])) < problem.num_tables:
        return None, np.inf, True
    if watch.is_over():
        return None, -np.inf, False
    program = _Program(problem, kept)
    solver = Highs(mip_rel_gap=gap, mip_abs_gap=1e-12, time_limit=max(0.01, watch.wall_left()))
    solver.passModel(program.model())
    if start is not None and (values := program.values(start)) is not None:
        point = highspy.HighsSolution()
        point.col_value = values.tolist()
        solver.setSolution(point)
    for event in (solver.cbMipInterrupt, solver.cbSimplexInterrupt):
        event.subscribe(lambda call: call.interrupt() if watch.is_over() else None)
    solver.run()
    proved = solver.getModelStatus() in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible)
    info = solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None, np.inf if proved else -np.inf, proved
    values = np.array(solver.getSolution().col_value)
    cost, claimed = float(program.costs @ values) - program.free, float(info.objective_function_value) / program.scale
    if abs(claimed - cost) > _ROUNDING * (1 / program.scale + abs(cost)):
        # The objective is not that of the point: whatever else is said is in doubt.
        return program.choice(values), -np.inf, False
    return program.choice(values), min(float(info.mip_dual_bound) / program.scale, cost), proved


class _Program:
    """Columns: which option each table takes, then what is chosen of all that there is more than one choice for."""

    def __init__(self, problem: Problem, kept: BoolArray) -> None:
        self.problem, self.options = problem, np.flatnonzero(kept)
        self.table = problem.table[self.options]
        terms = problem.terms[self.options]
        subject, open_terms = problem.subject, np.unique(terms[terms >= 0])
        open_terms = open_terms[np.bincount(subject[open_terms])[subject[open_terms]] > 1]
        self.subject = np.unique(subject[open_terms], return_inverse=True)[1]
        """Of each further column, the number of what it is about."""
        column = np.full(len(subject) + 1, -1)  # the last one is that of no agreement
        column[open_terms] = len(self.options) + np.arange(len(open_terms))
        # Groups that cost more mixed: whether they have caches, and whether they have others, of which one is free.
        mixing = problem.mixing[problem.group[self.table]]
        dear, kind = np.unique(
            (2 * problem.group[self.table] + problem.cached[self.options])[mixing > 0], return_inverse=True
        )
        kinds = np.full(len(self.options), -1)
        kinds[mixing > 0] = len(self.options) + len(open_terms) + kind
        self.links = np.concatenate([column[terms], kinds[:, None]], axis=1)
        """(options, most) columns that each can be taken with only; -1 for none."""
        self.free = float(problem.mixing[np.unique(dear // 2)].sum())
        none = np.zeros(len(open_terms) + len(dear))
        self.costs = np.concatenate([problem.seconds[self.options], none[: len(open_terms)], problem.mixing[dear // 2]])
        self.uses = [np.concatenate([use[self.options], none]) for use in (problem.hbm, problem.host)]
        self.scale = _FINER / max(float(np.abs(self.costs).max(initial=0.0)), 1e-300)

    def model(self) -> highspy.HighsLp:
        """What HiGHS solves: an option for each table, one choice for each agreement, both budgets kept."""
        columns, number = len(self.costs), len(self.options)
        parts: list[tuple[sp.csr_matrix, float, float]] = [(_matrix(self.table, np.arange(number), columns), 1.0, 1.0)]
        if len(self.subject):
            chosen = np.arange(number, number + len(self.subject))
            parts.append((_matrix(self.subject, chosen, columns), -np.inf, 1.0))
        for link in self.links.T:
            linked = np.flatnonzero(link >= 0)
            if len(linked):  # a table's options that need a choice are taken only if the choice is made
                pairs, row = np.unique(np.stack([self.table[linked], link[linked]]), axis=1, return_inverse=True)
                taken = _matrix(row.ravel(), linked, columns)
                parts.append((taken - _matrix(np.arange(pairs.shape[1]), pairs[1], columns), -np.inf, 0.0))
        for use, budget in zip(self.uses, self.problem.budget.tolist(), strict=True):
            if np.isfinite(budget):
                parts.append((sp.csr_matrix(use[None, :]), -np.inf, budget + SLACK / 2))
        matrix = sp.vstack([part for part, _, _ in parts]).tocsc()
        sides = np.array([(low, high) for part, low, high in parts for _ in range(part.shape[0])])
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = columns, matrix.shape[0]
        model.col_cost_, model.offset_ = self.costs * self.scale, -self.free * self.scale
        model.col_lower_, model.col_upper_ = np.zeros(columns), np.ones(columns)
        model.row_lower_ = np.where(np.isneginf(sides[:, 0]), -highspy.kHighsInf, sides[:, 0])
        model.row_upper_ = sides[:, 1]
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_, model.a_matrix_.index_ = matrix.indptr, matrix.indices
        model.a_matrix_.value_ = matrix.data.astype(np.float64)
        model.integrality_ = [highspy.HighsVarType.kInteger] * columns
        return model

    def values(self, choice: Choice) -> FloatArray | None:
        """(columns,) the values that stand for a choice; `None` where an option of it is not in the program."""
        values = np.zeros(len(self.costs))
        taken = np.flatnonzero(choice[self.table] == self.options)
        links = self.links[taken]
        values[taken] = values[links[links >= 0]] = 1.0
        return values if len(taken) == len(choice) else None

    def choice(self, values: FloatArray) -> Choice:
        """The option of each table."""
        return self.options[values[: len(self.options)] > 0.5]


def _matrix(rows: IntArray | FloatArray, columns: IntArray | list[int], width: int) -> sp.csr_matrix:
    """Ones in some rows and columns."""
    rows = np.asarray(rows, dtype=np.int64)
    return sp.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(int(rows.max()) + 1, width))
