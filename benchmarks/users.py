"""What naming users saves: rows that ranks look up and bytes that they exchange, with and without.

    python -m benchmarks.users [--json FILE]

Made streams with Yambda's published moments, a sample being the latest 4,096 items before one event of a user.
`stride`: 16 events a user in the mean, one user after the other, dealt out by stride as in MLPerf's DLRMv4. `random`:
events of a million users at random. Each rank looks up each of its different items once: 512 floats there, and as many
back. Rows are those of sixteen ranks. Times are of a processor, the least of five.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.balance_gap import YAMBDA
from benchmarks.harness.results import read_options, write
from evenkeel.partitioning import warm_up
from evenkeel.partitioning.refinements import plan_round
from evenkeel.partitioning.rounds import RoundOptions, RoundSamples
from examples.hstu.model import ModelOptions

CELLS = ((8, 16), (8, 128), (8, 1024), (64, 16), (64, 128), (64, 1024), (1024, 128))
USERS, ITEMS, MOST, EVENTS = 1_000_000, 9_390_000, 4096, 16
ROW, POSITION = 2 * 512 * 4, 3 * 8  # bytes: a row and its gradient; item, action and time of a position
COUNTED = 16  # ranks whose rows are counted

Integers = NDArray[np.int64]


def draw(stream: str, ranks: int, samples: int) -> tuple[Integers, Integers]:
    """(ranks × samples,) users and ends of histories, of one rank after the other."""
    rng, n = np.random.default_rng([ranks, samples]), ranks * samples
    history = YAMBDA.draw(rng, USERS).astype(np.int64)
    if stream == "random":
        users = rng.choice(USERS, n, p=history / history.sum())
        return users, rng.integers(1, history[users] + 1)
    events = np.ceil(rng.lognormal(np.log(EVENTS) - 0.5, 1.0, n)).astype(np.int64)  # of more users than are needed
    users = np.repeat(np.arange(n), events)[:n]
    number = np.arange(n) - (np.cumsum(events) - events)[users]
    dealt = np.arange(n).reshape(samples, ranks).T.ravel()
    return users[dealt], (history[users] + number)[dealt]


def rows_of(users: Integers, ends: Integers, destinations: NDArray[np.int32], ranks: int) -> list[int]:
    """Different items that a rank looks up, of some ranks; an item's share falls as its place^(-2 / 3)."""
    rows = []
    for rank in range(0, ranks, max(1, ranks // COUNTED)):
        own, looked_up = np.flatnonzero(destinations == rank), np.zeros(ITEMS, np.bool_)
        for user in np.unique(users[own]).tolist():
            ends_here = ends[own[users[own] == user]]
            drawn = np.random.default_rng(user).random(int(ends_here.max()))
            seen = np.zeros(drawn.size, np.bool_)
            for end in ends_here.tolist():
                seen[max(end - MOST, 0) : end] = True
            places = drawn[seen]
            looked_up[(ITEMS * (places * places * places)).astype(np.int32)] = True
        rows.append(int(np.count_nonzero(looked_up)))
    return rows


def measure(stream: str, ranks: int, samples: int) -> dict[str, Any]:
    """Of a global batch, with and without users."""
    users, ends = draw(stream, ranks, samples)
    lengths = np.minimum(ends, MOST)
    flops = ModelOptions().cost().flops(lengths.astype(np.float64), 1.0, 2.0)
    one = RoundSamples(
        batch_sizes=np.full((ranks, 1), samples), costs=np.asarray(flops / 1e3).astype(np.int64),
        lengths=lengths[:, None], sizes=POSITION * lengths, users=users.astype(np.uint32),
    )  # fmt: skip
    row: dict[str, Any] = {"stream": stream, "ranks": ranks, "samples": samples}
    for name, given in (("without", replace(one, users=None)), ("with", one)):
        times = []
        for _ in range(5):
            began = time.process_time()
            plan = plan_round(given, RoundOptions())
            times.append(1e3 * (time.process_time() - began))
        rows, figures = rows_of(users, ends, plan.destinations, ranks), plan.figures
        moved = figures.moved_size / ranks
        row[name] = {
            "rows": float(np.mean(rows)), "most_rows": max(rows), "moved_mb": moved / 1e6,
            "exchanged_mb": (ROW * float(np.mean(rows)) + moved) / 1e6, "max_load": figures.max_load_after,
            "imbalance": figures.imbalance_after, "ms": min(times),
        }  # fmt: skip
    assert row["with"]["max_load"] <= row["without"]["max_load"]
    return row


def main() -> None:
    options, table = read_options(__doc__, quick="small cells only"), Table(title="Of a rank, without users and with")
    warm_up()
    cells = CELLS[:2] if options.quick else CELLS
    rows = [measure(stream, *cell) for stream in ("stride", "random") for cell in cells]
    keys = ("rows", "most_rows", "moved_mb", "exchanged_mb", "imbalance", "ms")
    for name in ("stream", "ranks x samples", *keys):
        table.add_column(name, justify="right")
    for row in rows:
        cells_of = [f"{row['without'][key]:.4g}  {row['with'][key]:.4g}" for key in keys]
        table.add_row(row["stream"], f"{row['ranks']} x {row['samples']}", *cells_of)
    Console(width=160).print(table)
    write(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
