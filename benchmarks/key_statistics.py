"""How well key statistics of the first half of a trace predict the misses of the second, and what they cost a step.

python -m benchmarks.key_statistics --json benchmarks/results/key_statistics.json
python -m benchmarks.key_statistics --trace keys.npy --trace clicks.csv --column 1 --png curves.png
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table as RichTable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.key_files import read_keys
from benchmarks.key_statistics_limits import best_in_hindsight
from benchmarks.key_statistics_plot import draw
from benchmarks.key_traces import LATER, TRACES
from benchmarks.key_traces_public import PUBLIC
from benchmarks.key_traces_unseen import UNSEEN
from evenkeel import key_statistics
from evenkeel.key_statistics import KeySampler, KeyTrace, dumps
from evenkeel.key_statistics.curves import checked
from evenkeel.key_statistics.ranks import observed
from evenkeel.placement import Eviction
from evenkeel.placement.access import Histogram
from evenkeel.placement.hit_rates import step_keys
from trainer_client.planning import KeyHistogram, KeyStatistics

SHARES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
AIM = 0.02
Steps = tuple[str, int | None, str, int, list[Any]]
"""Kind, lookups in all where all of a kind have as many, name, lookups a step, and the steps."""
MOST_STEPS = 5_000
"""Of a trace from a file; more are left to larger steps."""


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
    half, every = len(steps) // 2, sampled(steps, 1 << 30)
    keys = len(np.unique(every.key))
    sizes = np.array(SHARES) * keys
    whole, small = sampled(steps[:half], 2_000_000), sampled(steps[:half], 100_000)
    histogram = counted(steps[:half])
    rows = []
    for eviction in Eviction:
        actual = observed(every, eviction, sizes, half, len(steps)).rates
        begin = time.process_time()
        curve, told = checked(whole, eviction, sizes, ahead=1.0, rows=keys)
        seconds = time.process_time() - begin
        few, told_by_few = checked(small, eviction, sizes, ahead=1.0, rows=keys)
        found = {
            "curve": curve.rates,
            "curve, 100,000 references": few.rates,
            "histogram": step_keys(histogram, keys, float(lookups), eviction).misses(sizes),
        }
        worst = {how: float(np.abs(rates - actual).max()) for how, rates in found.items()}
        rows.append(
            {
                "trace": name,
                "lookups_per_step": lookups,
                "steps": len(steps),
                "policy": eviction.value,
                "keys": keys,
                "cache_over_keys": SHARES,
                "simulated": actual.tolist(),
                "predicted": {how: rates.tolist() for how, rates in found.items()},
                "worst": worst,
                "told": {"curve": told, "curve, 100,000 references": told_by_few},
                "best_in_hindsight": best_in_hindsight(every.before(half), eviction, sizes, actual),
                "by_sampling": float(np.abs(few.rates - curve.rates).max()),
                "cpu_s_for_a_curve": seconds,
                "file_bytes": len(dumps({"table": whole})),
                "sampled_share": {"curve": whole.share, "curve, 100,000 references": small.share},
            }
        )
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By kind of traces, lookups in all and policy: how many predictions are within the aim, and by what they fail."""
    groups: dict[tuple[str, int | None, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row["total"], row["policy"]), []).append(row)
    found = []
    for (kind, total, policy), own in groups.items():
        one: dict[str, Any] = {"kind": kind, "total": total, "policy": policy, "of": len(own)}
        for how in own[0]["worst"]:
            errors = [row["worst"][how] for row in own]
            one[how] = {
                "within_0.02": sum(error <= AIM for error in errors),
                "sizes_within_0.02": float(
                    np.mean([np.abs(np.subtract(row["predicted"][how], row["simulated"])) <= AIM for row in own])
                ),
                "mean": statistics.mean(errors),
                "most": max(errors),
            }
            if how in own[0]["told"]:
                one[how]["told"] = statistics.mean(row["told"][how] for row in own)
                one[how]["covered"] = sum(row["worst"][how] <= row["told"][how] for row in own)
                one[how]["sizes_covered"] = float(
                    np.mean(
                        [
                            np.abs(np.subtract(row["predicted"][how], row["simulated"])) <= row["told"][how]
                            for row in own
                        ]
                    )
                )
        limits = [row["best_in_hindsight"] for row in own]
        one["best_in_hindsight"] = {"within_0.02": sum(each <= AIM for each in limits), "mean": statistics.mean(limits)}
        one["by_sampling"] = statistics.mean(row["by_sampling"] for row in own)
        missed = [row for row in own if row["worst"]["curve"] > AIM]
        one["missed_for"] = {
            "what_no_extrapolation_knew": sum(row["best_in_hindsight"] > AIM for row in missed),
            "the_choice_between_them": sum(row["best_in_hindsight"] <= AIM for row in missed),
        }
        found.append(one)
    return found


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
    total: Annotated[
        list[int] | None, typer.Option(help="Lookups of a trace; 150,000 and 1,200,000, the latter for unseen traces.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the traces.")] = 23,
    steps: Annotated[int, typer.Option(help="Steps whose overhead is measured; 0 leaves it out.")] = 1_000,
    trace: Annotated[
        list[Path] | None, typer.Option(help="Keys in their order, instead: .npy or text, also as .gz or .xz.")
    ] = None,
    column: Annotated[int, typer.Option(help="Of a text file: where the key is.")] = 0,
    png: Annotated[Path | None, typer.Option(help="Draw simulated and predicted miss rates.")] = None,
) -> None:
    """Print the worst error of each way to predict, by trace, step and policy."""
    console = Console(width=130)
    out = RichTable(title=f"Miss rates of caches of {SHARES[0]:.0%} to {SHARES[-1]:.0%} of the keys: largest error")
    for heading in (
        "trace",
        "lookups a step",
        "policy",
        "curve",
        "told",
        "hindsight",
        "100,000 references",
        "histogram",
    ):
        out.add_column(heading, justify="left" if heading in ("trace", "policy") else "right")
    rows = []
    made = _read(trace, column) if trace else _generated(total or [150_000, 1_200_000], seed)
    for kind, asked, name, lookups, own in made:
        for row in compare(name, lookups, own):
            rows.append({"kind": kind, "total": asked} | row)
            errors = [*row["worst"].values()]
            cells = [errors[0], row["told"]["curve"], row["best_in_hindsight"], *errors[1:]]
            out.add_row(name, f"{lookups:,}", row["policy"], *(f"{cell:.3f}" for cell in cells))
        if json_path:
            _write(json_path, seed, rows, [])
    console.print(out)
    if png:
        draw(rows, png)
    cost = [overhead(26, 4_096, steps), overhead(26, 512, steps)] if steps and not trace else []
    for each in cost:
        console.print(
            f"{each['lookups_per_step']:,} lookups a step: {each['call_us']:.0f} µs of the training thread, "
            f"{each['with_the_thread_us']:.0f} µs until all is done, a file of {each['file_bytes'] / 1e6:.1f} MB"
        )
    if json_path:
        _write(json_path, seed, rows, cost)


def _write(path: Path, seed: int, rows: list[dict[str, Any]], cost: list[dict[str, Any]]) -> None:
    read = sorted({row["trace"] for row in rows if row["kind"] == "read"})
    payload: dict[str, Any] = {"command": "python -m benchmarks.key_statistics --json FILE"}
    if read:
        payload["command"] += " --trace FILE" + " …" * (len(read) > 1)
        known = {name: PUBLIC[name] for name in read if name in PUBLIC}
        payload["from"] = {name: [own.repository, own.file, own.about] for name, own in known.items()}
    else:
        payload["seed"] = seed
    payload |= {"summary": summary(rows), "overhead": cost, "rows": rows}
    path.write_text(json.dumps(payload, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _read(paths: list[Path], column: int) -> Iterator[Steps]:
    """From files, at some numbers of lookups a step, where they make neither too few steps nor too many."""
    for path in paths:
        keys = read_keys(path, column)
        for many in (512, 4_096, 32_768):
            if 16 <= len(keys) // many <= MOST_STEPS:
                steps = keys[: len(keys) // many * many].reshape(-1, many)
                yield "read", None, path.name.partition(".")[0], many, list(steps)


def _generated(totals: list[int], seed: int) -> Iterator[Steps]:
    """From the generators."""
    for total, kind in product(totals, ("unseen", "developed on")):
        if kind == "developed on" and total != min(totals):
            continue
        for name, source in (UNSEEN if kind == "unseen" else TRACES | LATER).items():
            for many in (4_096, 32_768):
                lookups = max(1, many * total // 1_200_000)
                yield kind, total, name, lookups, list(source(np.random.default_rng(seed), total // lookups, lookups))


if __name__ == "__main__":
    typer.run(main)
