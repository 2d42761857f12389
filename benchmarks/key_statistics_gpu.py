"""What FBGEMM's own caches on a GPU miss, beside the simulation of them and beside what the statistics say of it.

python -m benchmarks.key_statistics_gpu --json benchmarks/results/key_statistics_h200.json
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import fbgemm_gpu
import numpy as np
import numpy.typing as npt
import torch
import typer
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    OptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks.key_statistics import sampled
from benchmarks.key_statistics_sets import missed_in_sets
from benchmarks.key_traces import LATER, TRACES
from benchmarks.key_traces_unseen import UNSEEN
from evenkeel.key_statistics.ranks import observed
from evenkeel.key_statistics.sets import SLOTS, in_sets
from evenkeel.placement import Eviction, Runtime

Array = npt.NDArray[Any]
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
_ALGORITHM = {Eviction.LRU: CacheAlgorithm.LRU, Eviction.LFU: CacheAlgorithm.LFU}


def missed_on_gpu(steps: list[torch.Tensor], rows: int, sets: int, eviction: Eviction, begin: int) -> float:
    """Misses over unique keys, from step `begin` on, of FBGEMM's cache of so many sets.

    Read off what the cache holds when a step begins, since FBGEMM's own counts are of LRU alone.
    """
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, 4, EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA)],
        cache_algorithm=_ALGORITHM[eviction],
        cache_sets=sets,
        optimizer=OptimType.EXACT_SGD,
        device=torch.device("cuda"),
    )
    missed, asked = torch.zeros((), dtype=torch.int64, device="cuda"), 0
    with torch.no_grad():
        for index, keys in enumerate(steps):
            if index >= begin:
                unique: torch.Tensor = torch.unique(keys)
                asked += len(unique)
                missed += (~torch.isin(unique, table.lxu_cache_state)).sum()
            table(keys, torch.tensor([0, len(keys)], device="cuda"))
    return int(missed) / asked


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    total: Annotated[int, typer.Option(help="Lookups of a trace.")] = 150_000,
    seed: Annotated[int, typer.Option(help="Of the traces.")] = 23,
    seconds: Annotated[float, typer.Option(help="Begin no trace after this time.")] = 200.0,
) -> None:
    """Print, for each trace and policy, how far simulation and statistics are from FBGEMM at the worst size."""
    lookups, slots, start = 512, SLOTS[Runtime.TORCHREC], time.monotonic()
    rows: list[dict[str, Any]] = []
    for name, source in (UNSEEN | LATER | TRACES).items():
        if time.monotonic() - start > seconds:
            break
        drawn = list(source(np.random.default_rng(seed), total // lookups, lookups))
        trace = sampled(drawn, 1 << 30)
        names = np.unique(np.concatenate(drawn))
        steps = [torch.from_numpy(np.searchsorted(names, keys)).to("cuda", torch.int64) for keys in drawn]
        begin, sets = trace.steps // 2, [max(1, int(share * len(names)) // slots) for share in SHARES]
        sizes, grid = np.array(sets) * float(slots), np.geomspace(8, len(names), 160)
        for eviction in Eviction:
            anywhere = observed(trace, eviction, grid, begin, trace.steps).rates
            said = np.interp(sizes, grid, in_sets(grid, anywhere, slots))
            own = np.array([missed_on_gpu(steps, len(names), count, eviction, begin) for count in sets])
            made = np.array([missed_in_sets(trace, int(size), eviction, begin, slots) for size in sizes])
            whole = observed(trace, eviction, sizes, begin, trace.steps).rates
            rows.append(
                {
                    "trace": name,
                    "policy": eviction.value,
                    "keys": len(names),
                    "rows_cached": sizes.tolist(),
                    "fbgemm": own.tolist(),
                    "simulated": made.tolist(),
                    "said": said.tolist(),
                    "anywhere": whole.tolist(),
                    "off_simulated": float(np.abs(made - own).max()),
                    "off_said": float(np.abs(said - own).max()),
                    "off_anywhere": float(np.abs(whole - own).max()),
                }
            )
            off = rows[-1]
            typer.echo(
                f"{name:12} {eviction}: simulated {off['off_simulated']:.3f}, said {off['off_said']:.3f}, "
                f"anywhere {off['off_anywhere']:.3f}"
            )
    if json_path:
        head = {
            "command": "python -m benchmarks.key_statistics_gpu --json FILE",
            "gpu": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "fbgemm_gpu": fbgemm_gpu.__version__},
            "slots": slots,
        }
        json_path.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
