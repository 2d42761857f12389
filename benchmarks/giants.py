"""What splitting samples over ranks gains where single samples outweigh a rank's share, by replay.

    python -m benchmarks.giants --json benchmarks/results/giants.json
    python -m benchmarks.giants --quick

Windows of eight batches are planned as a balancer plans them: of whole samples, batch by batch and with samples that
may change their batch; and with samples in parts. The figure is the largest time of a rank over an even division of the
same work, summed over the batches. Time is predicted: FLOPs of a bf16 HSTU of 8 layers, width 1024 and 4 heads of 256,
at a given rate; the exchange of keys and values, forward, and of their gradients, backward, overlapped with nothing: to
each node once, to each rank there an equal share, which it passes on to the others. Its rates are those of the profile
`h200` within and between nodes, of 8 ranks or 64 as the table says; some rows have the rate within a node that was
measured on two H200. With all it
takes, a split step takes what was measured beside the exchange. So the table depends on these numbers and not on the
machine, but for the time of a decision, which is processor time of one thread.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.harness.results import read_options, write
from evenkeel.partitioning import warm_up
from evenkeel.partitioning.refinements import plan_round
from evenkeel.partitioning.rounds import Figures, RoundOptions, RoundPlan, RoundSamples
from evenkeel.partitioning.splits import MOST, SHARE, STEP_SECONDS, SplitOptions, table_of
from evenkeel.placement.hardware import builtin_profile
from trainer_client.balancing.costs import HSTUCost

MODEL = HSTUCost(num_layers=8, width=1024, num_heads=4, head_dim=256, history="n")
FLOPS = 400e12  # of a rank, per second; above what is measured for whole steps, so that the exchange is not too cheap
POSITION = 2 * 1024 * 2 * 8 * 2  # bytes: keys and values, bf16, layers, forward and backward
WINDOW = 8
LONG = "long histories"
PROFILE = builtin_profile("h200")
FAST, MEASURED = PROFILE.intra_host_bytes_per_s, 131e9  # bytes per second inside a node
SHAPES = (
    *(("giants", ranks, 32, 8, rate) for rate in (FAST, MEASURED) for ranks in (8, 16, 64)),
    *(("giants", ranks, 32, 64, FAST) for ranks in (16, 64)),
    *((LONG, ranks, samples, 8, FAST) for ranks in (8, 16, 64) for samples in (2, 4, 8, 32)),
    (LONG, 64, 2, 64, FAST),
)
WAYS = ("whole", "windows", "split", "windows and split")


def lengths(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Log-normal, of mean 600 and one in 200 of 32,768 to 65,536; or of median 2,695 and mean 4,763, up to 27,738."""
    if kind == LONG:
        return np.clip(rng.lognormal(np.log(2695), 1.067, shape), 1, 27_738).astype(np.int64)
    values = np.clip(rng.lognormal(6.0, 0.9, shape), 1, 4096).astype(np.int64)
    giant = rng.random(shape) < 1 / 200
    return np.where(giant, rng.integers(32_768, 65_537, shape), values)


def prices(within: float) -> SplitOptions:
    """The exchange of a position, in FLOPs."""
    return SplitOptions.at_rates(
        position_bytes=POSITION, within=within, between=PROFILE.inter_host_bytes_per_s, cost_per_second=FLOPS
    )


def samples_of(batches: NDArray[np.int64], node: int) -> RoundSamples:
    """A round of (ranks, batches, samples) lengths, as the ranks tell of it, `node` of them on a host."""
    ranks, count, samples = batches.shape
    own = batches.reshape(-1)
    spans = MODEL.spans({"n": own})
    costs = spans.whole.reshape(batches.shape)
    heavy = costs >= SHARE * costs.sum(axis=2, keepdims=True)
    heavy &= np.argsort(np.argsort(-costs, axis=2, kind="stable"), axis=2) < MOST
    which = np.flatnonzero(heavy)
    return RoundSamples(
        batch_sizes=np.full((ranks, count), samples),
        costs=spans.whole,
        lengths=own[:, None],
        nodes=(np.arange(ranks) // node).astype(np.int32),
        divisible=table_of(spans.take(which), which, np.zeros(which.size)),
        roles=np.ones(1, np.int64),
    )


def measure(kind: str, ranks: int, samples: int, node: int, within: float, counts: str, seeds: int) -> dict[str, Any]:
    """One row: sums over the seeds' batches, over an even division."""
    split, options = prices(within), RoundOptions(counts=counts)
    figures = ("split: load", "split: exchange")
    sums = dict.fromkeys(("even", "off", "bound", *WAYS, *figures), 0.0)
    counted = dict.fromkeys(("split_samples", "pieces", "exchanged", "exchanged_between_nodes"), 0)
    seconds: dict[str, list[float]] = {"whole": [], "split": []}
    for seed in range(seeds):
        window = lengths(kind, np.random.default_rng(seed), (ranks, WINDOW, samples))
        for batch in range(WINDOW):
            one = samples_of(window[:, batch : batch + 1], node)
            (whole,) = timed(one, options, seconds["whole"]).batches
            plan = timed(one, replace(options, split=split), seconds["split"])
            (found,) = plan.batches
            sums["even"] += whole.mean_load
            sums["off"] += whole.max_load_before
            sums["bound"] += whole.lower_bound
            sums["whole"] += whole.max_load_after
            sums["split"] += found.max_load_after
            sums["split: load"] += float(plan.loads_after.max())
            sums["split: exchange"] += found.max_load_after - (split.fixed if found.split_samples else 0.0)
            for name in counted:
                counted[name] += getattr(found, name)
        met = samples_of(window, node)
        sums["windows"] += total(plan_round(met, options).batches)
        sums["windows and split"] += total(plan_round(met, replace(options, split=split)).batches)
    even, batches = sums.pop("even"), seeds * WINDOW
    far = counted["exchanged_between_nodes"]
    return {
        "lengths": kind, "ranks": ranks, "samples": samples, "ranks_of_a_node": node, "bytes_within": within,
        "counts": counts,
        "seeds": seeds, "batches": batches,
        **{name: figure / even for name, figure in sums.items()},
        "samples_split": counted["split_samples"] / batches,
        "pieces": counted["pieces"] / max(counted["split_samples"], 1),
        "gigabytes_within": POSITION * (counted["exchanged"] - far) / batches / 1e9,
        "gigabytes_between": POSITION * far / batches / 1e9,
        **{f"cpu_ms_{name}_median": 1e3 * float(np.median(each)) for name, each in seconds.items()},
        **{f"cpu_ms_{name}_worst": 1e3 * max(each) for name, each in seconds.items()},
    }  # fmt: skip


def timed(samples: RoundSamples, options: RoundOptions, seconds: list[float]) -> RoundPlan:
    """A plan, and its processor time."""
    started = time.thread_time()
    plan = plan_round(samples, options)
    seconds.append(time.thread_time() - started)
    return plan


def total(batches: tuple[Figures, ...]) -> float:
    """The time of all batches."""
    return sum(batch.max_load_after for batch in batches)


def table(rows: list[dict[str, Any]]) -> Table:
    """The ratios of each row."""
    ratios = ("off", "bound", "whole", "windows", "split: load", "split: exchange", "split", "windows and split")
    found = Table("lengths", "ranks × samples", "ranks of a node", "counts", *ratios, "decision, CPU ms: whole, split")
    for row in rows:
        times = (f"{row[f'cpu_ms_{name}_median']:.1f}" for name in ("whole", "split"))
        found.add_row(
            row["lengths"], f"{row['ranks']} × {row['samples']}", str(row["ranks_of_a_node"]), row["counts"],
            *(f"{row[name]:.3f}" for name in ratios), ", ".join(times),
        )  # fmt: skip
    return found


def main() -> None:
    options = read_options(__doc__, quick="1 seed, 8 ranks")
    warm_up()
    rows = []
    for shape in SHAPES:
        for counts in ("equal", "free"):
            if not options.quick or shape[1] == 8:
                rows.append(measure(*shape, counts, 1 if options.quick else 2))
    Console(width=180).print(table(rows))
    result = {
        "rates": {
            "flops": FLOPS, "bytes_between": PROFILE.inter_host_bytes_per_s, "bytes_of_a_position": POSITION,
            "step_seconds": STEP_SECONDS,
        },
        "rows": rows,
    }  # fmt: skip
    write(options.json, result)


if __name__ == "__main__":
    main()
