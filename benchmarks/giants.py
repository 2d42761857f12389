"""What splitting samples over ranks gains where single samples outweigh a rank's share, by replay.

    python -m benchmarks.giants                      # writes benchmarks/results/giants.json
    python -m benchmarks.giants --quick              # few shapes, prints the table only

Windows of eight batches are planned as a balancer plans them: of whole samples, batch by batch and with samples that
may change their batch; and with samples in parts. The figure is the largest time of a rank over an even division of the
same work, summed over the batches. Time is predicted: FLOPs of a bf16 HSTU of 8 layers, width 1024 and 4 heads of 256,
at a given rate; the exchange of keys and values, forward, and of their gradients, backward, overlapped with nothing: to
each node once, to each rank there an equal share, which it passes on to the others. Its rates are those of the profile
`h200` within and between nodes, of 8 ranks or 64 as the table says; some rows have the rate within a node that was
measured on two H200. Beside the time stands what of it is exchange in the mean of all ranks, and the least that any
plan can take if counts are free and all ranks were of one node (`benchmarks.references.least_splits`). With all it
takes, a split step takes what was measured beside the exchange. So the table depends on
these numbers and not on the machine, but for the time of a decision, which is processor time of one thread.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.results import RESULTS, write
from benchmarks.references.least_splits import least_time
from evenkeel.partitioning import warm_up
from evenkeel.partitioning.rounds import Figures, RoundOptions, RoundPlan, RoundSamples
from evenkeel.partitioning.splits import MOST, SHARE, STEP_SECONDS, Divisible, SplitOptions
from evenkeel.partitioning.splits.parts import read_splits
from evenkeel.partitioning.stages import plan_round
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
        divisible=Divisible(samples=which, first_items=np.zeros(which.size), spans=spans.take(which)).table,
        roles=np.ones(1, np.int64),
    )


def measure(kind: str, ranks: int, samples: int, node: int, within: float, counts: str, seeds: int) -> dict[str, Any]:
    """One row: sums over the seeds' batches, over an even division."""
    split, options = prices(within), RoundOptions(counts=counts)
    figures = ("split: load", "split: exchange", "split: mean exchange", "split: least")
    sums = dict.fromkeys(("even", "off", "bound", *WAYS, *figures), 0.0)
    counted = dict.fromkeys(("split_samples", "pieces", "exchanged", "exchanged_between_nodes"), 0)
    seconds: dict[str, list[float]] = {"whole": [], "split": []}
    least = 0
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
            assert one.divisible is not None
            told = one.costs.astype(np.float64), Divisible.of_table(one.divisible), ranks, split.within
            sums["split: least"] += least_time(*told, ranks)
            far = found.exchanged_between_nodes
            sums["split: mean exchange"] += (split.within * (found.exchanged - far) + split.between * far) / ranks
            for name in counted:
                counted[name] += getattr(found, name)
            least += least_exchange(plan, one)
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
        "exchange_over_least": counted["exchanged"] / least if least else 1.0,
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


def least_exchange(plan: RoundPlan, samples: RoundSamples) -> int:
    """Positions that must travel if each part computes the attention of its own queries: all that come before it."""
    if plan.parts is None:
        return 0
    splits = read_splits(plan.parts.pieces, samples.num_batches)
    return sum(piece.begin for batch in splits for sample in batch for piece in sample.pieces)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    heads = (
        "lengths", "ranks × samples", "ranks of a node", "GB/s in it", "counts", "off", "bound of whole samples",
        "whole", f"windows of {WINDOW}", "split: load", "with exchange", "exchange, mean", "at least",
        "with all it takes", "windows and split", "samples split", "parts each", "GB within, between",
        "decision, CPU ms: whole, split (worst)",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    ratios = (
        "bound", "whole", "windows", "split: load", "split: exchange", "split: mean exchange",
        "split: least", "split", "windows and split",
    )  # fmt: skip
    for row in rows:
        cells = [
            row["lengths"], f"{row['ranks']} × {row['samples']}", str(row["ranks_of_a_node"]),
            f"{row['bytes_within'] / 1e9:.0f}", row["counts"],
            f"{row['off']:.2f}", *(f"{row[name]:.3f}" for name in ratios), f"{row['samples_split']:.1f}",
            f"{row['pieces']:.1f}", f"{row['gigabytes_within']:.2f}, {row['gigabytes_between']:.2f}",
            f"{row['cpu_ms_whole_median']:.1f}, {row['cpu_ms_split_median']:.1f} ({row['cpu_ms_split_worst']:.0f})",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 seed, 8 ranks; writes nothing")
    options = parser.parse_args()
    warm_up()
    rows = []
    for shape in SHAPES:
        for counts in ("equal", "free"):
            if not options.quick or shape[1] == 8:
                rows.append(measure(*shape, counts, 1 if options.quick else 2))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))
    if options.quick:
        return
    result = {
        "rates": {
            "flops": FLOPS, "bytes_between": PROFILE.inter_host_bytes_per_s, "bytes_of_a_position": POSITION,
            "step_seconds": STEP_SECONDS,
        },
        "rows": rows,
    }  # fmt: skip
    write(RESULTS / "giants.json", result)


if __name__ == "__main__":
    main()
