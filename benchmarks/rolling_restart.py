"""What a rolling restart of the balancer costs a running job: SIGTERM, drain, and another process at the same port.

python -m benchmarks.rolling_restart --json benchmarks/results/rolling_restart.json

Two real ranks train with a real balancer. A restart is counted from its SIGTERM until the service has decided 20
rounds in a row; before and after it every round is the service's. Under the default fallback the rounds between are
balanced on the ranks; under `identity` they are the unbalanced steps that it costs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from benchmarks.harness.crew import Crew
from benchmarks.harness.steps import Steps

RANKS = 2
CALM = 40  # steps by the service before each restart


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One restart under a running job.

    Attributes:
        fallback: What the job does without the service.
        drain_seconds: From SIGTERM to the end of the process.
        start_seconds: From the start of the new process to its open port.
        other_steps: Steps that the service did not decide, from the SIGTERM on.
        back_seconds: From the SIGTERM to the first step of those that the service decides again.
        longest_step_seconds: The longest step from the SIGTERM to the end of the job.
        usual_step_seconds: The median step of the job.
        longest_wait_seconds: The longest time that a rank waited for the service in one round.
    """

    fallback: str
    drain_seconds: float
    start_seconds: float
    other_steps: int
    back_seconds: float
    longest_step_seconds: float
    usual_step_seconds: float
    longest_wait_seconds: float


def restart_under_job(crew: Crew, balancer: ServiceProcess, name: str, fallback: str, pace: float) -> Restart:
    """Runs one job and restarts its balancer; every sample of every step is checked."""
    steps = Steps(address=balancer.address, name=name, pace=pace, fallback=fallback, timeout=2.0, batch_size=32)
    with crew.run(steps) as run:
        run.until(mode="service", times=CALM, seconds=60)
        began = time.monotonic()
        assert balancer.stop() == 0
        drained = time.monotonic()
        balancer.start()
        started = time.monotonic()
        run.catch_up()  # rounds went on during the drain
        run.until(mode="service", times=20, seconds=120)
    records = run.results[0]["records"]
    after = [number for number, record in enumerate(records) if record["at"] >= began]
    others = [number for number in after if records[number]["mode"] not in ("service", "end")]
    gaps = [later["at"] - earlier["at"] for earlier, later in pairwise(records)]
    back = records[others[-1] + 1]["at"] if others else began
    return Restart(
        fallback=fallback,
        drain_seconds=drained - began,
        start_seconds=started - drained,
        other_steps=len(others),
        back_seconds=back - began,
        longest_step_seconds=max(gaps[after[0] - 1 :]),
        usual_step_seconds=statistics.median(gaps),
        longest_wait_seconds=run.longest_wait,
    )


def main() -> None:
    """Measures and shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=5, help="for each fallback")
    parser.add_argument("--pace", type=float, default=0.07, help="seconds of a step's own work")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    results: list[Restart] = []
    with running_balancer() as balancer, Crew(RANKS) as crew:
        for fallback in ("embedded", "identity"):
            for number in range(options.restarts):
                results.append(restart_under_job(crew, balancer, f"{fallback}-{number}", fallback, options.pace))
    table = Table(title=f"Rolling restart under {RANKS} ranks, steps of {options.pace * 1e3:.0f} ms and more")
    columns = ("restarts", "drain s", "start s", "steps not by the service", "back after s", "longest wait s",
               "longest / usual step ms")  # fmt: skip
    table.add_column("fallback")
    for column in columns:
        table.add_column(column, justify="right")
    for fallback in ("embedded", "identity"):
        mine = [result for result in results if result.fallback == fallback]

        def spread(name: str, scale: float = 1.0, digits: int = 2, of: list[Restart] = mine) -> str:
            values = [scale * getattr(result, name) for result in of]
            return f"{statistics.median(values):.{digits}f} (at most {max(values):.{digits}f})"

        usual = 1e3 * statistics.median(result.usual_step_seconds for result in mine)
        table.add_row(
            fallback, str(len(mine)), spread("drain_seconds"), spread("start_seconds"), spread("other_steps", digits=0),
            spread("back_seconds"), spread("longest_wait_seconds"),
            f"{1e3 * max(result.longest_step_seconds for result in mine):.0f} / {usual:.0f}",
        )  # fmt: skip
    Console(width=160).print(table)
    if options.json is not None:
        document = {
            "command": "python -m benchmarks.rolling_restart", "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_average_at_start": load, "ranks": RANKS, "pace_seconds": options.pace,
            "restarts": [asdict(result) for result in results],
        }  # fmt: skip
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
