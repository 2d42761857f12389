"""Requests that once took minutes and gigabytes, planned within a limit of memory: what came of each, as JSON lines.

python -m tests.evenkeel.placement.hostile
"""

from __future__ import annotations

import json
import resource
import time
from dataclasses import replace
from pathlib import Path

from evenkeel.placement import PlanRequest, Sharding, SolverOptions, Table, plan
from tests.evenkeel.placement.instances import random_tables, request

LIMIT_S = 1.0
MEMORY_BYTES = 1 << 30


def in_groups(count: int, groups: int, *, hbm_gib: float, host_gib: float, ratio_steps: int = 0) -> PlanRequest:
    tables = tuple(replace(table, group=f"m{i % groups}") for i, table in enumerate(random_tables(count, 0)))
    solver = SolverOptions(time_limit_s=LIMIT_S, ratio_steps=ratio_steps)
    return request(tables, hbm_gib=hbm_gib, host_gib=host_gib, solver=solver)


def pooled_and_sequences() -> PlanRequest:
    sizes = (800, 400, 120, 50, 20, 400, 30)
    tables = tuple(
        Table(name=f"t{i}", rows=rows * 1_000_000, dim=128, ids_per_sample=1 + 7 * (i % 3), pooled=i % 2 == 0)
        for i, rows in enumerate(sizes)
    )
    return request(tables, hbm_gib=60, host_gib=400, solver=SolverOptions(time_limit_s=LIMIT_S))


def over_all_ranks_there_may_be() -> PlanRequest:
    table = Table(name="t", rows=10**9, dim=32_768, pooled=True, sharding=Sharding.COLUMN_WISE)
    tables, solver = tuple(replace(table, name=f"t{i}") for i in range(3)), SolverOptions(time_limit_s=LIMIT_S)
    return request(tables, hbm_gib=80, ranks=65_536, ranks_per_host=8, runtime="torchrec", solver=solver)


REQUESTS = {
    "host memory 10 % short": lambda: in_groups(12, 4, hbm_gib=2, host_gib=19258 / 1024),
    "the finest ratios": lambda: in_groups(40, 12, hbm_gib=3, host_gib=60, ratio_steps=200),
    "seven tables": pooled_and_sequences,
    "as many tables as a service takes": lambda: in_groups(5000, 1700, hbm_gib=60, host_gib=4000),
    "as many ranks as there may be": over_all_ranks_there_may_be,
}


def peak_bytes() -> int:
    """Most memory of this program; what `getrusage` tells may be that of the process which started it."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) << 10


def main() -> None:
    for name, build in REQUESTS.items():
        asked = build()
        begin = time.process_time()  # the planner's own: what else the machine does takes its time as well
        try:
            outcome = plan(asked).status.value
        except ValueError as error:
            outcome = str(error)
        took = time.process_time() - begin
        peak = peak_bytes()
        print(json.dumps({"request": name, "outcome": outcome, "seconds": took, "peak_bytes": peak}), flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (2 * MEMORY_BYTES, 2 * MEMORY_BYTES))
    main()
