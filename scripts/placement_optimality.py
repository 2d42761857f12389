"""What is called optimal, of many small requests of both runtimes, beside every choice that there is.

python -m scripts.placement_optimality --count 5000 --json benchmarks/results/placement_optimality.json

Tables are of mixed widths and some fuse, so that a cache of TorchRec is as wide as the widest table that is in it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.harness.results import write
from evenkeel.placement import InvalidInputError, Mode, Plan, PlanRequest, Runtime, SolverOptions, Status, plan
from tests.evenkeel.placement.instances import brute_force, mixed_request

_NOISE = 1e-7


def compared(seed: int) -> tuple[Plan | None, list[str]]:
    """The plan of a request, `None` where that is refused, and what is false of it or of plans of requests near it."""
    asked, draw = mixed_request(seed), np.random.default_rng(seed)
    asked = replace(asked, solver=SolverOptions(ratio_steps=5 - len(asked.tables)))
    found = _planned(asked)
    if found is None:
        return None, []
    seconds, bound, best = _seconds(found), found.bound_seconds or math.inf, brute_force(asked)
    kept = [mode for mode in Mode if mode is not Mode.HYBRID or asked.runtime is Runtime.DYNAMICEMB]
    modes = [tuple(mode for mode in kept if draw.random() < 0.6) for _ in asked.tables]  # of none, all may be had
    fewer = replace(asked, tables=tuple(replace(t, modes=own) for t, own in zip(asked.tables, modes, strict=True)))
    more_hbm = int(asked.topology.hbm_bytes * draw.uniform(1.0, 1.5))
    more = replace(asked, topology=replace(asked.topology, hbm_bytes=more_hbm))
    is_false = {
        "a plan is missed": math.isinf(seconds) and math.isfinite(best),
        "a plan does not fit": seconds < best * (1 - _NOISE),
        "a bound is too high": best < min(bound, seconds) * (1 - _NOISE),
        "not optimal": seconds > best * (1 + _NOISE) or found.status not in {Status.OPTIMAL, Status.INFEASIBLE},
        "fewer choices beat the bound": _seconds(_planned(fewer)) < min(bound, seconds) * (1 - _NOISE),
        "more HBM is slower": _seconds(_planned(more)) > seconds * (1 + _NOISE),
    }
    return found, [name for name, one in is_false.items() if one]


def _planned(request: PlanRequest) -> Plan | None:
    try:
        return plan(request)
    except InvalidInputError:  # a table may have nothing to choose from
        return None


def _seconds(found: Plan | None) -> float:
    return math.inf if found is None or found.seconds is None else found.seconds


def main(
    count: Annotated[int, typer.Option(help="Number of requests.")] = 200,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Figures; those that are there are gone on with.")
    ] = None,
) -> None:
    """Plan, and try all; what is false is told with its seed."""
    known = json.loads(json_path.read_text("utf-8")) if json_path is not None and json_path.exists() else {}
    done, planned, wrong = known.get("requests", 0), Counter[str](known.get("plans", {})), known.get("false", {})
    for seed in range(done, count):
        found, names = compared(seed)
        planned["refused" if found is None else f"{found.runtime.value} {found.status.value}"] += 1
        for name in names:
            wrong.setdefault(name, []).append(seed)
        if seed + 1 == count or not (seed + 1) % 100:
            write(json_path, {"requests": seed + 1, "plans": dict(sorted(planned.items())), "false": wrong})
    print(f"{count} requests, false: {wrong or 'none'}")


if __name__ == "__main__":
    typer.run(main)
