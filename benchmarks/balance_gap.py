"""How far each balancer ends above the bound, what it moves and how long it decides: peers' own code beside ours.

    python -m benchmarks.balance_gap --recsys-examples PATH --verl PATH --unirl PATH --transformers PATH [--json FILE]

Peers are the compiled Karmarkar-Karp of NVIDIA recsys-examples, that of verl, UniRL's longest first, and transformers'
BatchRebalanceSampler, out of checkouts that you give; nothing of theirs is part of Evenkeel. Costs are the FLOPs of an
HSTU. Every rank loads and trains as many samples, as theirs need it; transformers' alone gives ranks different numbers,
by its own cost of samples padded to the longest of a rank. No assignment has a smaller largest load than the bound.
Their sets go to the ranks in the order in which they come; an all-gather, as in recsys-examples, moves all samples to
every rank instead. Times are of a processor, the least of three where a decision takes less than a second. The two in
Python that are quadratic are left out of the cells in which one decision takes minutes.
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

from benchmarks.harness.results import read_options, write
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

Decide = Callable[[list[int], list[int], int], list[list[int]]]  # samples of each rank, of costs, tokens and ranks
STEPS: dict[str, Callable[[int, int], int]] = {  # of those that are left out above MOST_STEPS, by samples and ranks
    "unirl": lambda n, k: 4 * n * k, "transformers": lambda n, k: n * max(30 * k, n),
}  # fmt: skip
MOST_STEPS = 1 << 27


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
        found["recsys-examples"] = lambda costs, _, k: nvidia.karmarkar_karp(costs, k, equal_size=True)
    if options.verl:
        unused = ("verl", "verl.protocol", "verl.utils", "verl.utils.tensordict_utils", "verl.utils.device")
        verl = _load(options.verl / "verl/utils/seqlen_balancing.py", unused)
        found["verl"] = lambda costs, _, k: verl.get_seqlen_balanced_partitions(costs, k, equal_size=True)
    if options.unirl:
        unirl = _load(options.unirl / "unirl/utils/shard_balance.py")
        found["unirl"] = lambda costs, _, k: np.reshape(unirl.lpt_shard_permutation(costs, k), (k, -1)).tolist()
    if options.transformers:
        needed = ("transformers", "transformers.integrations", "transformers.integrations.deepspeed")
        others = ("transformers.utils", "torch_xla", "torch_xla.runtime")
        amazons = ("smdistributed", "smdistributed.modelparallel", "smdistributed.modelparallel.torch")
        path = options.transformers / "src/transformers/trainer_pt_utils.py"
        theirs = _load(path, (*needed, *others, *amazons)).BatchRebalanceSampler
        found["transformers"] = lambda _, tokens, k: [
            samples for (samples,) in theirs(tokens, len(tokens), k, 1)._assign(range(len(tokens)), tokens)
        ]
    return found


def _load(path: Path, unused: tuple[str, ...] = ()) -> Any:
    """A peer's file as a module, beside stand-ins for what it imports and deciding does not use."""
    if not path.is_file():
        sys.exit(f"there is no {path}; give a checkout's root")
    spec = importlib.util.spec_from_file_location(".".join([*unused[:1], f"peer_{path.stem}"]), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in unused}):
        spec.loader.exec_module(module)
    return module


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
    found = {"as loaded": _figures(homes, costs, tokens, homes, num_ranks, ours.lower_bound)}
    given = costs.tolist(), tokens.tolist(), num_ranks
    for name, balancer in ({"evenkeel": None} | peers).items():
        if name in STEPS and STEPS[name](costs.size, num_ranks) > MOST_STEPS:
            continue
        times: list[float] = []
        took, ranks = 0.0, ours.destinations
        while len(times) < 3 and took < 1.0:
            began = time.process_time()
            sets = balancer(*given) if balancer else partition(costs, homes, num_ranks, sizes=tokens)
            took = time.process_time() - began
            times.append(1e3 * took)
        if isinstance(sets, list):
            ranks = np.empty(costs.size, np.int32)
            ranks[list(itertools.chain(*sets))] = np.repeat(np.arange(num_ranks), [len(one) for one in sets])
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
        cells = []
        for one in (row.get(name, {}) for name in names):
            timed = f"  {one['moved']:.1%}  {one['ms']:.2f}" if "ms" in one else ""
            cells.append(f"{one['gap']:.2%}{timed}" if one else "")
        table.add_row(row["lengths"], f"{row['ranks']} x {row['samples']}", *cells)
    console.print(table)


def main() -> None:
    names = ("recsys_examples", "verl", "unirl", "transformers")
    options = read_options(__doc__, quick="small cells only", **{name: f"checkout of {name}" for name in names})
    console, peers = Console(width=150), load_peers(options)
    warm_up()
    cells = itertools.product(LENGTHS, RANKS[:2] if options.quick else RANKS, SAMPLES)
    asked = [cell for cell in cells if cell[1] * cell[2] <= MOST]
    rows = [
        measure(name, ranks, samples, peers, 1 if options.quick else max(1, min(SEEDS, DRAWN // (ranks * samples))))
        for name, ranks, samples in track(asked, console=console, transient=True)
    ]
    show(rows, console)
    commits = {name: commit_of(getattr(options, name.replace("-", "_"))) for name in peers}
    write(options.json, {"commits": commits, "seeds": SEEDS, "rows": rows})


if __name__ == "__main__":
    main()
