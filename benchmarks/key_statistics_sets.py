"""What caches in sets of 32 rows, as FBGEMM's, miss beside caches that hold any row anywhere, and what is said of it.

python -m benchmarks.key_statistics_sets --json benchmarks/results/key_statistics_sets.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from benchmarks.key_statistics import sampled
from benchmarks.key_traces import LATER, TRACES
from benchmarks.key_traces_unseen import UNSEEN
from evenkeel.key_statistics import KeyTrace
from evenkeel.key_statistics.ranks import observed
from evenkeel.key_statistics.sets import SLOTS, in_sets
from evenkeel.placement import Eviction, Runtime

Array = npt.NDArray[Any]
SHARES = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)


def missed_in_sets(trace: KeyTrace, size: int, eviction: Eviction, begin: int, slots: int) -> float:
    """Misses over unique keys, from step `begin` on, of a cache in sets that is filled as FBGEMM fills its own.

    A step's keys that are there get their new costs (LRU: the step; LFU: lookups so far, of evicted keys too). Those
    that are not, the costliest first, take the places of the cheapest keys of their set; LRU spares keys of this step,
    LFU such as cost more.
    """
    sets = max(1, size // slots)
    names, key = np.unique(trace.key, return_inverse=True)
    home = np.random.default_rng(5).integers(0, sets, len(names))
    held, cost = np.full((sets, slots), -1, dtype=np.int64), np.full((sets, slots), -1, dtype=np.int64)
    count = np.zeros(len(names), dtype=np.int64)
    starts = np.searchsorted(trace.step, np.arange(trace.steps + 1))
    missed = total = 0
    for step in range(trace.steps):
        part = slice(starts[step], starts[step + 1])
        own = key[part]
        count[own] += trace.times[part]
        there = held[home[own]] == own[:, None]
        found = there.any(axis=1)
        if step >= begin:
            total, missed = total + len(own), missed + int((~found).sum())
        new = count[own] if eviction is Eviction.LFU else np.full(len(own), step)
        cost[home[own[found]], there[found].argmax(axis=1)] = new[found]
        own, new = own[~found], new[~found]
        order = np.lexsort((-new, home[own]))
        own, new = own[order], new[order]
        filled, first, many = np.unique(home[own], return_index=True, return_counts=True)
        place = np.arange(len(own)) - np.repeat(first, many)
        own, new, cheapest = own[place < slots], new[place < slots], np.argsort(cost[filled], axis=1, kind="stable")
        slot = cheapest[np.repeat(np.arange(len(filled)), many)[place < slots], place[place < slots]]
        taken = cost[home[own], slot] <= new if eviction is Eviction.LFU else cost[home[own], slot] < step
        held[home[own[taken]], slot[taken]], cost[home[own[taken]], slot[taken]] = own[taken], new[taken]
    return missed / max(1, total)


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    total: Annotated[int, typer.Option(help="Lookups of a trace.")] = 150_000,
    seed: Annotated[int, typer.Option(help="Of the traces.")] = 23,
) -> None:
    """Print, for each trace and policy, by how much either curve is off at its worst size."""
    lookups, slots = 512, SLOTS[Runtime.TORCHREC]
    rows = []
    for name, source in (TRACES | LATER | UNSEEN).items():
        trace = sampled(list(source(np.random.default_rng(seed), total // lookups, lookups)), 1 << 30)
        keys, begin = len(np.unique(trace.key)), trace.steps // 2
        sizes = np.array(SHARES) * keys // slots * slots
        grid = np.geomspace(8, keys, 160)
        for eviction in Eviction:
            anywhere = observed(trace, eviction, grid, begin, trace.steps).rates
            actual = np.array([missed_in_sets(trace, int(size), eviction, begin, slots) for size in sizes])
            said = np.interp(sizes, grid, in_sets(grid, anywhere, slots))
            whole = observed(trace, eviction, sizes, begin, trace.steps).rates
            rows.append(
                {
                    "trace": name,
                    "policy": eviction.value,
                    "keys": keys,
                    "cache_over_keys": SHARES,
                    "in_sets": actual.tolist(),
                    "anywhere": whole.tolist(),
                    "said": said.tolist(),
                    "off_anywhere": float(np.abs(whole - actual).max()),
                    "off_said": float(np.abs(said - actual).max()),
                }
            )
            typer.echo(f"{name:12} {eviction}: {rows[-1]['off_anywhere']:.3f} {rows[-1]['off_said']:.3f}")
    if json_path:
        within: dict[str, Any] = {
            eviction.value: {
                how: sum(row[f"off_{how}"] <= 0.01 for row in rows if row["policy"] == eviction.value)
                for how in ("anywhere", "said")
            }
            for eviction in Eviction
        }
        command = "python -m benchmarks.key_statistics_sets --json FILE"
        head = {"command": command, "slots": slots, "within_0.01": within, "of": len(rows) // 2}
        json_path.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
