"""What mixed-integer programs prove."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from evenkeel.placement import Optimizer, PlanRequest, SolverOptions, Step, Table, Topology, Zipf
from evenkeel.placement.limits import Watch
from evenkeel.placement.milp import MilpResult, solve_milp
from evenkeel.placement.problem import build_problem
from evenkeel.placement.search import cost_of, solve, solve_core


def slowest_of_two(weights: list[float], start: list[int] | None = None) -> MilpResult:
    """The least load of the fuller of two ranks, from the rank of each weight at the start."""
    size = np.array(weights)
    # Column 0 is the load; then each weight on the second rank.
    matrix = sp.csr_matrix(np.array([[-1.0, *size], [-1.0, *-size]]))
    point = None if start is None else np.array([max(size @ start, size.sum() - size @ start), *start])
    return solve_milp(
        np.array([1.0, *np.zeros(len(size))]),
        matrix,
        np.full(2, -np.inf),
        np.array([0.0, -size.sum()]),
        np.array([False, *np.ones(len(size), dtype=bool)]),
        np.array([1e6, *np.ones(len(size))]),
        start=point,
    )


def test_what_is_better_by_less_than_a_millionth_is_found() -> None:
    little = 5e-7
    result = slowest_of_two([4, 3, 3 + little, 2, 2 - little], [1, 0, 1, 0, 0])
    assert result.proved
    assert result.objective == pytest.approx(7, abs=1e-8)
    assert result.bound <= 7 + 1e-8


def test_a_program_that_presolving_made_wrong_is_solved() -> None:
    """With presolve HiGHS 1.16 calls a start of it optimal, at an objective that is not that of its values."""
    rows = (430_645, 2_068_629, 2_551_545, 202_673, 550_723, 309_439, 3_000_001, 1_978_802)
    dims, lookups = (32, 32, 64, 128, 128, 128, 64, 64), (20.0, 1.0, 1.0, 5.0, 1.0, 1.0, 20.0, 1.0)
    exponents = (
        1.0216412719388595, 1.0764582901572335, 1.1067808737074292, 1.026357563788462,
        0.9580383727744257, 1.0387878856886057, 0.8790758113571994, 1.1002895228252756,
    )  # fmt: skip
    tables = tuple(
        Table(
            name=f"t{i}", rows=n, dim=d, ids_per_sample=ids, access=Zipf(exponent=e),
            optimizer=Optimizer.ADAGRAD, pooled=i not in (1, 4),
        )
        for i, (n, d, ids, e) in enumerate(zip(rows, dims, lookups, exponents, strict=True))
    )  # fmt: skip
    machines = Topology(ranks=8, hbm_bytes=1_250_000_000, host_bytes=1_828_962_304)
    options = SolverOptions(ratio_steps=6)
    problem = build_problem(
        PlanRequest(tables=tables, topology=machines, step=Step(samples_per_rank=2048), solver=options)
    )
    every = [np.isfinite(group.seconds) for group in problem.groups]
    best = solve_core(problem, every, gap=0.0, start=None, watch=Watch()).choice
    assert best is not None
    found = solve(problem, Watch())
    assert found.proved
    assert found.cost == pytest.approx(cost_of(problem, best), rel=1e-6)
