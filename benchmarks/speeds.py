"""How soon a slow rank gets less to do, by replay: real plans and real learning, made times.

    python -m benchmarks.speeds --json benchmarks/results/speeds.json

Each round, 64 samples a rank with log-normal costs are planned by the round core with what was learned so far; the
times that the ranks would need for their loads, with noise, and now and then a step of 1.5 to 5 times that, are what
the estimator hears, six rounds before a plan can follow them: a step until a time is read, one until it is told, two
rounds in flight, and two more for a host that runs ahead. Speeds fall at one round and rise again at another.

`down` is how many rounds after the fall 90 % of what the speeds allow is reached for good, where 100 % is the least
time of loads in proportion to the speeds and 0 % that of the plan before the fall; `up`, how many after the rise the
rank has 90 % of the load back that it had lost (of many ranks' time it makes no difference); medians and the worst of
the seeds, and how many of them took more than 20 down. `even` are ranks of one speed: the mean over all rounds of the
step's time over that without learning, minus one, and how often a rank was taken for slow.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.harness.results import write
from evenkeel.partitioning.rounds import RoundOptions, RoundSamples
from evenkeel.partitioning.speeds import ALL_EQUAL, SpeedEstimator, planned_speeds
from evenkeel.partitioning.stages import plan_round

SAMPLES = 64  # of a rank
LAG = 6
BEFORE, DURING, AFTER = 100, 120, 120
EVEN_LONG = 10_000
MANY = 512  # ranks, of which fewer cases are run
FEW = 8  # ranks, of which more seeds are


def costs_of(rng: np.random.Generator, num_ranks: int) -> NDArray[np.float64]:
    """Heavier and lighter rounds, as data have them."""
    costs = rng.lognormal(0.0, 0.6, num_ranks * SAMPLES) * 100.0 * rng.lognormal(0, 0.15)
    return np.asarray(np.rint(costs) + 1.0, np.float64)


class Planner:
    """Loads of the ranks, as the round core plans them."""

    def __init__(self, num_ranks: int) -> None:
        self._sizes = np.full((num_ranks, 1), SAMPLES, np.int64)
        self._lengths = np.zeros((num_ranks * SAMPLES, 0), np.int64)
        self._moved = np.ones(num_ranks * SAMPLES, np.int64)
        self._options = RoundOptions(counts="free")

    def loads(self, costs: NDArray[np.float64], learned: Any) -> NDArray[np.float64]:
        """(ranks,) loads."""
        samples = RoundSamples(batch_sizes=self._sizes, costs=costs, lengths=self._lengths, sizes=self._moved)
        at_home = costs.reshape(len(self._sizes), SAMPLES).sum(axis=1).tolist()
        speeds = planned_speeds((), learned, at_home)
        options = self._options if speeds is None else replace(self._options, speeds=tuple(speeds.tolist()))
        loads: NDArray[np.float64] = plan_round(samples, options).loads_after[0]
        return loads


def disturbed(num_ranks: int, slow: float, noise: float, fixed: float, seed: int) -> dict[str, Any]:
    """One rank of `num_ranks` is slow for a while."""
    rng, estimator, planner = np.random.default_rng(seed), SpeedEstimator(num_ranks), Planner(num_ranks)
    known: deque[Any] = deque([ALL_EQUAL] * LAG, maxlen=LAG)
    besides = fixed * SAMPLES * 120.0
    gained, over, back, wrong = [], [], [], 0
    worst = 1.0
    for number in range(BEFORE + DURING + AFTER):
        speeds = np.ones(num_ranks)
        if BEFORE <= number < BEFORE + DURING:
            speeds[num_ranks // 2] = slow
        loads = planner.loads(costs_of(rng, num_ranks), known[0])
        exact = (loads + besides) / speeds
        least = float((loads.sum() + besides * num_ranks) / speeds.sum())
        taken = float(exact.max())
        if number in (BEFORE, BEFORE + DURING):
            worst = taken / least
        gained.append((worst - taken / least) / (worst - 1) if worst > 1 + 1e-9 else 1.0)
        over.append(taken / least - 1)
        back.append(float(loads[num_ranks // 2] / loads.mean()))
        measured = exact * rng.lognormal(0, noise, num_ranks)
        measured = np.where(rng.random(num_ranks) < 0.01, measured * rng.uniform(1.5, 5, num_ranks), measured)
        estimator.note(loads, measured)
        known.append(estimator.learned)
        wrong += any(straggler.rank != num_ranks // 2 for straggler in estimator.learned.stragglers)
    return {
        "down": lasting(gained[BEFORE : BEFORE + DURING]),
        "up": lasting([1 - (1 - one) / (1 - back[BEFORE + DURING]) for one in back[BEFORE + DURING :]]),
        "over_least_during": statistics.fmean(over[BEFORE + 20 : BEFORE + DURING]),
        "rounds_with_others_slow": wrong,
    }


def lasting(gained: list[float]) -> int:
    """The first round from which on nine of ten are at 90 % or more."""
    good = np.array(gained) >= 0.9
    return next((k for k in range(len(good) - 10) if good[k] and good[k : k + 20].mean() >= 0.9), len(good))


def even(num_ranks: int, rounds: int, noise: float, seed: int) -> dict[str, Any]:
    """Ranks of one speed."""
    rng, estimator, planner = np.random.default_rng(seed), SpeedEstimator(num_ranks), Planner(num_ranks)
    known: deque[Any] = deque([ALL_EQUAL] * LAG, maxlen=LAG)
    more, alarms, seconds = [], 0, 0.0
    for _ in range(rounds):
        costs = costs_of(rng, num_ranks)
        if known[0]:
            more.append(float(planner.loads(costs, known[0]).max() / planner.loads(costs, ALL_EQUAL).max()) - 1)
        else:
            more.append(0.0)  # the same plan
        measured = costs.reshape(num_ranks, -1).sum(axis=1).mean() * rng.lognormal(0, noise, num_ranks)
        measured = np.where(rng.random(num_ranks) < 0.01, measured * rng.uniform(1.5, 5, num_ranks), measured)
        begin = time.process_time()
        alarms += estimator.note(np.full(num_ranks, costs.sum() / num_ranks), measured) and bool(estimator.learned)
        seconds += time.process_time() - begin
        known.append(estimator.learned)
    return {
        "ranks": num_ranks, "rounds": rounds, "noise": noise, "alarms": alarms, "more": statistics.fmean(more),
        "milliseconds_to_note": 1e3 * seconds / rounds,
    }  # fmt: skip


def save(options: argparse.Namespace, rows: list[dict[str, Any]], flat: list[dict[str, Any]]) -> None:
    """Writes what there is so far."""
    result = {"samples": SAMPLES, "lag": LAG, "seeds": options.seeds, "changes": rows, "even": flat}
    write(options.json, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64, 1024])
    parser.add_argument("--seeds", type=int, default=8, help="an eighth of more than 8 ranks")
    parser.add_argument("--even-rounds", type=int, default=EVEN_LONG)
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    flat: list[dict[str, Any]] = []
    console = Console()
    table = Table(title="Steps from a change to 90 % of what the speeds allow: median (worst)")
    for column in ("ranks", "speed", "noise", "fixed", "down", "back", "over the least", "equal loads"):
        table.add_column(column, justify="right")
    for num_ranks in options.ranks:
        for slow in (0.83, 0.67, 0.5) if num_ranks < MANY else (0.83, 0.5):
            for noise in (0.005, 0.02, 0.04) if num_ranks < MANY else (0.02,):
                for fixed in (0.0, 0.3) if num_ranks < MANY else (0.3,):
                    seeds = range(options.seeds if num_ranks <= FEW else max(1, options.seeds // 8))
                    found = [disturbed(num_ranks, slow, noise, fixed, seed) for seed in seeds]
                    row = {
                        "ranks": num_ranks, "speed": slow, "noise": noise, "fixed": fixed,
                        **{way: int(statistics.median(one[way] for one in found)) for way in ("down", "up")},
                        **{f"{way}_worst": max(one[way] for one in found) for way in ("down", "up")},
                        "seeds": len(found), "down_over_20": sum(one["down"] > 20 for one in found),
                        "over_least": statistics.fmean(one["over_least_during"] for one in found),
                        "equal_over_least": (num_ranks - 1 + slow) / num_ranks / slow - 1,
                        "rounds_with_others_slow": sum(one["rounds_with_others_slow"] for one in found),
                    }  # fmt: skip
                    rows.append(row)
                    table.add_row(
                        str(num_ranks), f"{slow}", f"{noise:.1%}", f"{fixed}", f"{row['down']} ({row['down_worst']})",
                        f"{row['up']} ({row['up_worst']})", f"{row['over_least']:.2%}",
                        f"{row['equal_over_least']:.2%}",
                    )  # fmt: skip
                    save(options, rows, flat)
    console.print(table)
    for num_ranks in options.ranks:
        for noise in (0.005, 0.02, 0.04):
            rounds = options.even_rounds if noise == 0.02 else options.even_rounds // 5
            rounds = rounds if num_ranks < MANY else rounds // 20
            flat.append(even(num_ranks, rounds, noise, seed=num_ranks))
            console.print(flat[-1])
            save(options, rows, flat)


if __name__ == "__main__":
    main()
