"""How far each balancer ends above the bound, what it moves and how long it decides: peers' own code beside ours.

    python -m benchmarks.balance_gap --recsys-examples PATH --verl PATH [--json FILE]

Peers are the compiled Karmarkar-Karp of NVIDIA recsys-examples and that of verl, out of checkouts that you give;
nothing of theirs is part of Evenkeel. Costs are the FLOPs of an HSTU. Every rank loads and trains as many samples, as
theirs need it. No assignment has a smaller largest load than the bound. Their sets go to the ranks in the order in
which they come; an all-gather, as in recsys-examples, moves all samples to every rank instead. Times are of a
processor, the least of three where a decision takes less than a second.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness.results import write
from benchmarks.peers.checkouts import commit_of
from evenkeel.partitioning import partition, warm_up
from examples.datasets import Lengths, LogNormalLengths, ZipfLengths
from examples.hstu.model import ModelOptions

RANKS, SAMPLES = (8, 64, 512, 4096), (8, 32, 128, 512)
MOST = 1 << 19  # samples of a cell
SEEDS, DRAWN = 3, 1 << 18  # draws of a cell: as many, or as give so many samples
YAMBDA = LogNormalLengths(mean=math.exp(7.90 + 1.07**2 / 2), sigma=1.07, maximum=27_738)  # its published moments
LENGTHS: dict[str, Lengths] = {
    "zipf": ZipfLengths(exponent=1.2, maximum=4096), "lognormal": LogNormalLengths(maximum=4096), "yambda": YAMBDA,
}  # fmt: skip

Decide = Callable[[NDArray[np.int64], int], NDArray[np.int64]]  # from costs and a number of ranks to ranks


def load_peers(options: argparse.Namespace) -> dict[str, Decide]:
    """The decisions of each peer whose checkout is given."""
    found: dict[str, Decide] = {}
    if options.recsys_examples:
        nvidia = _load(options.recsys_examples / "examples/commons/perf_model/partitioner.py")
        if nvidia._kk_cpu_ops is None:
            sys.exit(
                "recsys-examples: kk_cpu_ops is not built; in its examples/commons run "
                "`BUILD_EXT_ONLY=kk_cpu_ops python setup.py build_ext --inplace`"
            )
        nvidia.nvtx = mock.MagicMock()  # marks for profilers, which a CPU build of torch lacks
        found["recsys-examples"] = _by_rank(lambda costs, k: nvidia.karmarkar_karp(costs, k, equal_size=True))
    if options.verl:
        unused = ("verl", "verl.protocol", "verl.utils", "verl.utils.tensordict_utils", "verl.utils.device")
        verl = _load(options.verl / "verl/utils/seqlen_balancing.py", unused)
        found["verl"] = _by_rank(lambda costs, k: verl.get_seqlen_balanced_partitions(costs, k, equal_size=True))
    return found


def _load(path: Path, unused: tuple[str, ...] = ()) -> Any:
    """A peer's file as a module, beside stand-ins for what it imports and deciding does not use."""
    if not path.is_file():
        sys.exit(f"there is no {path}; give a checkout's root")
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in unused}):
        spec.loader.exec_module(module)
    return module


def _by_rank(decide: Callable[[list[int], int], list[list[int]]]) -> Decide:
    def destinations(costs: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
        ranks = np.empty(costs.size, np.int64)
        for rank, samples in enumerate(decide(costs.tolist(), num_ranks)):
            ranks[samples] = rank
        return ranks

    return destinations


def measure(lengths: str, num_ranks: int, samples: int, peers: dict[str, Decide], seeds: int) -> dict[str, Any]:
    """Means over draws: of each balancer its gap above the bound, its share of moved tokens, its milliseconds."""
    drawn = [_decide(lengths, num_ranks, samples, peers, seed) for seed in range(seeds)]
    means: dict[str, Any] = {
        name: {key: float(np.mean([one[name][key] for one in drawn])) for key in drawn[0][name]} for name in drawn[0]
    }
    return {"lengths": lengths, "ranks": num_ranks, "samples": samples} | means


def _decide(
    lengths: str, num_ranks: int, samples: int, peers: dict[str, Decide], seed: int
) -> dict[str, dict[str, float]]:
    rng = np.random.default_rng([seed, num_ranks, samples])
    tokens = LENGTHS[lengths].draw(rng, num_ranks * samples)
    flops = ModelOptions().cost().flops(tokens.astype(np.float64), 1.0, 2.0)
    costs = np.asarray(flops / 1e3).astype(np.int64)
    homes = np.repeat(np.arange(num_ranks, dtype=np.int32), samples)
    ours = partition(costs, homes, num_ranks, sizes=tokens)
    balancers = {"evenkeel": lambda c, k: partition(c, homes, k, sizes=tokens).destinations} | peers
    found = {"as loaded": _figures(homes, costs, tokens, homes, num_ranks, ours.lower_bound)}
    for name, balancer in balancers.items():
        times: list[float] = []
        took = 0.0
        while len(times) < 3 and took < 1.0:
            began = time.process_time()
            ranks = balancer(costs, num_ranks)
            took = time.process_time() - began
            times.append(1e3 * took)
        found[name] = _figures(ranks, costs, tokens, homes, num_ranks, ours.lower_bound) | {"ms": min(times)}
    return found


def _figures(
    ranks: NDArray[Any],
    costs: NDArray[np.int64],
    tokens: NDArray[np.int64],
    homes: NDArray[np.int32],
    num_ranks: int,
    bound: float,
) -> dict[str, float]:
    largest = float(np.bincount(ranks, costs, num_ranks).max())
    return {"gap": largest / bound - 1, "moved": float(tokens[ranks != homes].sum() / tokens.sum())}


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """A table of all rows."""
    names = [name for name, value in rows[0].items() if isinstance(value, dict)]
    table = Table(title="Largest load above the bound, share of tokens moved, milliseconds of a processor")
    for name in ("lengths", "ranks x samples", *names):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row[name]['gap']:.2%}" for name in names]
        for at, one in enumerate(row[name] for name in names):
            if "ms" in one:
                cells[at] += f"  {one['moved']:.1%}  {one['ms']:.2f}"
        table.add_row(row["lengths"], f"{row['ranks']} x {row['samples']}", *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recsys-examples", type=Path, help="checkout of NVIDIA recsys-examples, its kk_cpu_ops built")
    parser.add_argument("--verl", type=Path, help="checkout of verl")
    parser.add_argument("--quick", action="store_true", help="small cells only")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    console, peers = Console(width=150), load_peers(options)
    warm_up()
    cells = itertools.product(LENGTHS, RANKS[:2] if options.quick else RANKS, SAMPLES)
    asked = [cell for cell in cells if cell[1] * cell[2] <= MOST]
    rows = [
        measure(name, ranks, samples, peers, 1 if options.quick else max(1, min(SEEDS, DRAWN // (ranks * samples))))
        for name, ranks, samples in track(asked, console=console, transient=True)
    ]
    show(rows, console)
    checkouts = {"recsys-examples": options.recsys_examples, "verl": options.verl}
    commits = {name: commit_of(path) for name, path in checkouts.items() if path}
    write(options.json, {"commits": commits, "seeds": SEEDS, "rows": rows})


if __name__ == "__main__":
    main()
