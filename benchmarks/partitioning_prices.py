"""What a move is worth: load above the bound and bytes moved, by the price of moving all samples.

    python -m benchmarks.partitioning_prices --json benchmarks/results/partitioning_prices.json

Cells of lengths × ranks × samples a rank, some draws each. With price 0 only the load counts.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.partitioning_draws import LENGTHS as DRAWN
from evenkeel.partitioning import partition

PRICES = (0.0, 0.001, 0.01, 0.05)
SHAPES = ((8, 32), (8, 256), (64, 32), (64, 256))
LENGTHS: dict[str, Callable[[np.random.Generator, int], NDArray[np.int64]]] = {
    **{name: DRAWN[name] for name in ("lognormal", "zipf_1.2", "zipf_1.2_heaped", "bimodal")},
    "pareto_1.3": lambda rng, n: np.minimum((rng.pareto(1.3, n) + 1) * 64, 65536).astype(np.int64),
}


def measure(name: str, ranks: int, samples: int, price: float, draws: int) -> dict[str, Any]:
    """One cell; the bytes of a sample are 8 for each of its tokens."""
    above, moved, staying = [], [], []
    for seed in range(draws):
        lengths = np.asarray(LENGTHS[name](np.random.default_rng(7000 + seed), ranks * samples), np.int64)
        costs, homes = lengths * lengths // 64 + 8 * lengths, np.repeat(np.arange(ranks, dtype=np.int32), samples)
        part = partition(costs, homes, ranks, sizes=8.0 * lengths, move_price=price)
        above.append(float(part.loads.max()) / part.lower_bound - 1)
        staying.append(float(part.home_loads.max()) / part.lower_bound - 1)
        moved.append(part.moved_size / part.size)
    return {
        "lengths": name, "ranks": ranks, "samples": samples, "price": price, "draws": draws,
        "above_bound": statistics.fmean(above), "above_bound_worst": max(above), "as_loaded": statistics.fmean(staying),
        "moved": statistics.fmean(moved), "moved_worst": max(moved),
    }  # fmt: skip


def main(
    draws: Annotated[int, typer.Option(help="Batches a cell.")] = 12,
    quick: Annotated[bool, typer.Option(help="Two draws of the smaller shapes.")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Where results go.")] = None,
) -> None:
    """Partitions the same batches under each price."""
    shapes, draws = (SHAPES[:1], 2) if quick else (SHAPES, draws)
    cells = [(name, *shape, price) for name in LENGTHS for shape in shapes for price in PRICES]
    rows = [measure(*cell, draws) for cell in track(cells, "partitions", console=Console(stderr=True))]
    table = Table(title="load above the bound and share of bytes moved, by the price of moving all (worst draw)")
    for head in ("lengths", "ranks × samples", "as loaded", *(f"price {price:g}" for price in PRICES)):
        table.add_column(head, justify="left" if head == "lengths" else "right")
    for at in range(0, len(rows), len(PRICES)):
        first, *_ = same = rows[at : at + len(PRICES)]
        table.add_row(
            first["lengths"], f"{first['ranks']} × {first['samples']}", f"{first['as_loaded']:.1%}",
            *(f"{row['above_bound']:.2%}, {row['moved']:.0%} ({row['moved_worst']:.0%})" for row in same),
        )  # fmt: skip
    Console(width=None if Console().is_terminal else 140).print(table)
    if output is not None:
        told = {
            "command": "python -m benchmarks.partitioning_prices", "machine": platform.machine(),
            "versions": {name: version(name) for name in ("numpy", "numba")} | {"python": platform.python_version()},
            "cells": rows,
        }  # fmt: skip
        output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
