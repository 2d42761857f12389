"""How well key statistics of the first half of a trace predict the misses of the second, and what they cost a step.

python -m benchmarks.key_statistics --json benchmarks/results/key_statistics.json
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table as RichTable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.key_traces import LATER, TRACES, simulated
from evenkeel import key_statistics
from evenkeel.key_statistics import KeySampler, KeyTrace, dumps, miss_curve
from evenkeel.key_statistics.curves import checked
from evenkeel.placement import Eviction
from evenkeel.placement.access import Histogram
from evenkeel.placement.hit_rates import step_keys
from trainer_client.planning import KeyHistogram, KeyStatistics

SHARES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
AIM = 0.02


def sampled(steps: list[Any], most: int) -> KeyTrace:
    """What a sampler keeps of a trace."""
    sampler = KeySampler(["table"], max_references=most)
    for keys in steps:
        sampler.observe([(keys.astype(np.int64), np.array([[0, 0, len(keys)]]))], len(keys))
    return sampler.traces()["table"]


def counted(steps: list[Any]) -> Histogram:
    """A histogram of a trace."""
    counter = KeyHistogram()
    for keys in steps:
        counter.observe(torch.from_numpy(keys.astype(np.int64)))
    return counter.histogram()


def compare(name: str, lookups: int, steps: list[Any]) -> list[dict[str, Any]]:
    """Both policies on one trace: trained on the first half, held against caches simulated over the second."""
    half, keys = len(steps) // 2, len(np.unique(np.concatenate(steps)))
    sizes = np.array(SHARES) * keys
    whole, small = sampled(steps[:half], 2_000_000), sampled(steps[:half], 100_000)
    histogram = counted(steps[:half])
    rows = []
    for eviction in Eviction:
        actual = simulated(steps, sizes, half, eviction)
        begin = time.perf_counter()
        curve = miss_curve(whole, keys, eviction=eviction)
        seconds = time.perf_counter() - begin
        found = {
            "curve": checked(whole, eviction, sizes, ahead=1.0, rows=keys)[0].rates,
            "curve, 100,000 references": checked(small, eviction, sizes, ahead=1.0, rows=keys)[0].rates,
            "histogram": step_keys(histogram, keys, float(lookups), eviction).misses(sizes),
        }
        rows.append(
            {
                "trace": name,
                "lookups_per_step": lookups,
                "policy": eviction.value,
                "keys": keys,
                "cache_over_keys": SHARES,
                "simulated": actual.tolist(),
                "predicted": {how: rates.tolist() for how, rates in found.items()},
                "worst": {how: float(np.abs(rates - actual).max()) for how, rates in found.items()},
                "error_told": curve.error,
                "seconds_for_a_curve": seconds,
                "file_bytes": len(dumps({"table": whole})),
                "sampled_share": {"curve": whole.share, "curve, 100,000 references": small.share},
            }
        )
    return rows


def overhead(features: int, samples: int, steps: int) -> dict[str, Any]:
    """Time that `observe` takes of the training thread, and of the thread beside it, once the sample is small."""
    key_statistics.warm_up()
    draw = np.random.default_rng(0)
    names = [f"f{index}" for index in range(features)]
    lengths = torch.ones(features * samples, dtype=torch.int32)
    batches = [
        KeyedJaggedTensor(keys=names, values=torch.from_numpy(keys.astype(np.int64)), lengths=lengths)
        for keys in (draw.random((16, features * samples)) ** 6 * 10_000_000)
    ]
    collector = KeyStatistics({name: [name] for name in names})
    calls, work = [], []
    for step in range(steps):
        begin = time.perf_counter()
        collector.observe(batches[step % len(batches)])
        calls.append(time.perf_counter() - begin)
        collector._queue.join()
        work.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    content = dumps(collector.traces())
    last = steps // 2
    return {
        "lookups_per_step": features * samples,
        "steps": steps,
        "call_us": statistics.median(calls[last:]) * 1e6,
        "with_the_thread_us": statistics.median(work[last:]) * 1e6,
        "mean_with_the_thread_us": statistics.mean(work) * 1e6,
        "file_bytes": len(content),
        "save_s": time.perf_counter() - begin,
        "cores": os.cpu_count(),
    }


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    total: Annotated[int, typer.Option(help="Lookups of a trace.")] = 1_200_000,
    seed: Annotated[int, typer.Option(help="Of the traces.")] = 7,
    steps: Annotated[int, typer.Option(help="Steps whose overhead is measured; 0 leaves it out.")] = 1_000,
    keys: Annotated[Path | None, typer.Option(help="A .npy file of integer keys in their order, instead.")] = None,
) -> None:
    """Print the worst error of each way to predict, by trace, step and policy."""
    console = Console(width=120)
    out = RichTable(title=f"Miss rates of caches of {SHARES[0]:.0%} to {SHARES[-1]:.0%} of the keys: largest error")
    for heading in ("trace", "lookups a step", "policy", "curve", "100,000 references", "told", "histogram"):
        out.add_column(heading, justify="left" if heading in ("trace", "policy") else "right")
    rows = []
    real = None if keys is None else np.load(keys).astype(np.int64).ravel()
    for name in [keys.name] if keys is not None else [*TRACES, *LATER]:
        for many in (4_096, 32_768):
            lookups = many if real is not None else max(1, many * total // 1_200_000)
            if real is None:
                source = (TRACES | LATER)[name](np.random.default_rng(seed), total // lookups, lookups)
            else:
                source = iter(np.split(real[: len(real) // lookups * lookups], max(1, len(real) // lookups)))
            for row in compare(name, lookups, list(source)):
                rows.append(row)
                errors = list(row["worst"].values())
                cells = [f"{errors[0]:.3f}", f"{errors[1]:.3f}", f"{row['error_told']:.3f}", f"{errors[2]:.3f}"]
                out.add_row(name, f"{lookups:,}", row["policy"], *cells)
    console.print(out)
    cost = [overhead(26, 4_096, steps), overhead(26, 512, steps)] if steps else []
    for each in cost:
        console.print(
            f"{each['lookups_per_step']:,} lookups a step: {each['call_us']:.0f} µs of the training thread, "
            f"{each['with_the_thread_us']:.0f} µs until all is done, a file of {each['file_bytes'] / 1e6:.1f} MB"
        )
    if json_path:
        within = {how: sum(row["worst"][how] <= AIM for row in rows) for how in rows[0]["worst"]}
        payload: dict[str, Any] = {"command": "python -m benchmarks.key_statistics --json FILE", "lookups": total}
        payload |= {"within_0.02": within, "of": len(rows), "judging": list(LATER)}
        json_path.write_text(json.dumps(payload | {"overhead": cost, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
