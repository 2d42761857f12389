"""What mixed-integer programs prove."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from evenkeel.placement import Optimizer, PlanRequest, SolverOptions, Status, Step, Table, Topology, Zipf, plan
from evenkeel.placement.building import build_problem
from evenkeel.placement.joint import solve_joint
from evenkeel.placement.limits import Watch
from evenkeel.placement.milp import MilpResult, solve_milp
from evenkeel.placement.solver import seconds, solve
from tests.evenkeel.placement.test_sharding import ask


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


def test_no_gap_at_all_can_be_asked_for() -> None:
    ways = (("column_wise", "row_wise"), ("grid_shard", "column_wise"), ("data_parallel", "column_wise"), "table_wise")
    rows, dims, lookups = (5_617_441, 1_190_676, 2_600_238, 3_458_028), (32, 64, 64, 128), (1.0, 0.0, 20.0, 0.1)
    exponents = (1.144041383433433, 0.8485372236563421, 0.9618821845371943, 0.9752417982970037)
    same = {"pooled": True, "optimizer": Optimizer.SGD}
    tables = tuple(
        Table(name=f"t{i}", rows=n, dim=d, ids_per_sample=ids, access=Zipf(exponent=e), sharding=way, **same)  # type: ignore[arg-type]
        for i, (n, d, ids, e, way) in enumerate(zip(rows, dims, lookups, exponents, ways, strict=True))
    )
    assert plan(ask(tables, 2.01, 3, 1, gap=0.0), split=False).status is Status.OPTIMAL


def test_a_start_that_presolving_takes_for_the_best_is_not_believed() -> None:
    """HiGHS 1.16 calls the start of this program optimal, at an objective that is not that of its values."""
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
    machines = Topology(ranks=8, hbm_bytes=1_230_783_256, host_bytes=1_828_962_304)
    options = SolverOptions(ratio_steps=6)
    problem = build_problem(
        PlanRequest(tables=tables, topology=machines, step=Step(samples_per_rank=2048), solver=options)
    )
    every = [np.isfinite(group.time).any(axis=0) for group in problem.groups]
    best = solve_joint(problem, every, gap=0.0, start=None, watch=Watch()).modules
    assert best is not None
    found = solve(problem)
    assert found.proved
    assert found.cost == pytest.approx(seconds(problem, best), rel=1e-6)
