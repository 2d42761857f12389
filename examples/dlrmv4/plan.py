"""Where the reference's tables live: our plan without overrides, beside TorchRec's with and without those set by hand.

    python -m examples.dlrmv4.plan
    python -m examples.dlrmv4.plan --gpu h100 --ranks 32 --json plans.json

No GPU is needed: nothing is trained, figures are predictions and counts on the synthetic stream of `stream.py`. As in
the reference, planners may use HBM only; where nothing fits, they are asked again with the memory of the hosts.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table as RichTable
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.types import PlannerError

from evenkeel.key_statistics import miss_curve
from evenkeel.placement import InvalidInputError, Mode, PlanRequest, Sharding, Topology, parse_topology, plan
from evenkeel.placement.whole_step import whole_step_seconds
from examples.datasets import SequenceBatch
from examples.dlrmv4.model import HISTORY, keys_of, make_model, torchrec_tables
from examples.dlrmv4.stream import ROWS, Scale, Stream
from trainer_client.planning import KeyStatistics, plan_model
from trainer_client.planning.model import RESERVE

OVERRIDES = ("album_id", "artist_id")
"""What the reference sets to column-wise by hand."""
THIN = 32
"""One of so many samples stands for all: samples of a user that follow each other differ by few events."""
STEPS = 16
SHARDINGS = (Sharding.ROW_WISE, Sharding.TABLE_WISE, Sharding.COLUMN_WISE)
COLUMNS = {
    "hbm_gib": "fullest HBM, GiB",
    "shard_gib": "largest shard, GiB",
    "temporary_gib": "largest temporary, GiB",
    "owner_load": "heaviest owner / mean",
    "step_ms": "predicted step, ms",
}
GIB = 2**30
_MODES = {"fused": Mode.HBM_ONLY, "fused_uvm_caching": Mode.CACHING, "fused_uvm": Mode.HOST_ONLY}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=("h100", "h200"), action="append", help="profile; default: both")
    parser.add_argument("--ranks", type=int, action="append", help="of the job; default: 8, 16 and 32")
    parser.add_argument("--samples", type=int, default=Scale().samples, help="of a rank in a step")
    parser.add_argument("--json", type=Path, help="where to write the figures; - for the console")
    options = parser.parse_args()
    if options.samples < THIN:
        parser.error(f"--samples is {options.samples}; use at least {THIN}")
    if few := [ranks for ranks in options.ranks or () if ranks < 1]:
        parser.error(f"--ranks is {few[0]}; use at least 1")
    try:
        result = compare(options.gpu or ("h100", "h200"), options.ranks or (8, 16, 32), samples=options.samples)
    except InvalidInputError as error:
        sys.exit(f"dlrmv4.plan: {error}")
    if options.json is None or str(options.json) != "-":
        show(result, Console())
    if options.json is not None:
        text = json.dumps(result, indent=1)
        _ = print(text) if str(options.json) == "-" else options.json.write_text(text + "\n", encoding="utf-8")


def compare(gpus: Sequence[str] = ("h100", "h200"), ranks: Sequence[int] = (8, 16, 32), *, samples: int = 1024) -> Any:
    """Figures of all planners' plans by GPU and ranks, for a file."""
    logging.getLogger("torchrec").setLevel(logging.ERROR)  # or its planner prints pages
    scale = replace(Scale(), samples=samples)
    stream, cells = Stream(scale), []
    for count in track(ranks, "planning", console=Console(stderr=True), transient=True):
        steps = observed(stream, count)
        for gpu in gpus:
            named, topology = parse_topology(f"{gpu}x{count}")
            for host_bytes in (0, topology.host_bytes):
                machines = replace(topology, host_bytes=host_bytes, hbm_reserved_fraction=RESERVE)
                cell = _cell(scale, steps, machines, named)
                if any(row["step_ms"] for row in cell["planners"].values()):
                    break
            cells.append(cell)
    return {"keys": "synthetic", "samples_per_rank": samples, "tables_gb": 2048e-9 * sum(ROWS.values()), "cells": cells}


def observed(stream: Stream, ranks: int) -> list[SequenceBatch]:
    """Steps of all ranks of a job, of each every `THIN`-th sample."""
    size = ranks * stream.scale.samples
    begin = len(stream) // 2
    return [stream.batch(range(begin + step * size, begin + (step + 1) * size, THIN)) for step in range(STEPS)]


def _cell(scale: Scale, steps: list[SequenceBatch], machines: Topology, gpu: str) -> dict[str, Any]:
    """The planners' plans for one job."""
    model = make_model(scale, torchrec_tables(scale), torch.device("cpu"))
    statistics = KeyStatistics(model)
    for batch in steps:
        statistics.observe(keys_of(batch, scale))
    traces = statistics.traces()
    # Of a lookup a sample the thinned steps show too few different keys, unless they count as whole ones.
    access = {
        name: miss_curve(
            replace(trace, lookups=trace.lookups * (THIN if name in HISTORY else 1)), scale.rows_of(name)
        ).access
        for name, trace in traces.items()
    }
    planners: dict[str, Any] = {}
    request: PlanRequest | None = None
    try:
        planned = plan_model(
            model, access=access, ids_per_sample={name: trace.lookups / trace.samples for name, trace in traces.items()},
            samples_per_rank=scale.samples, topology=machines, hardware=gpu, sharding=SHARDINGS,
        )  # fmt: skip
        request = planned.request
        seconds = whole_step_seconds(request, planned.plan)
        planners["evenkeel"] = figures(planned.sharding_plan, steps, scale, machines) | {
            "step_ms": 1e3 * (seconds or 0)
        }
    except InvalidInputError as error:
        planners["evenkeel"] = {"step_ms": None, "why": str(error)}
    for name, tables in (("torchrec", ()), ("torchrec, by hand", OVERRIDES)):
        planner = EmbeddingShardingPlanner(
            topology=TorchRecTopology(
                world_size=machines.ranks, local_world_size=machines.local_ranks, compute_device="cuda",
                hbm_cap=machines.hbm_bytes, ddr_cap=(machines.host_bytes or 0) // machines.local_ranks,
            ),
            constraints={table: ParameterConstraints(sharding_types=["column_wise"]) for table in tables} or None,
            debug=False,
        )  # fmt: skip
        try:
            theirs = planner.plan(model, [EmbeddingCollectionSharder()])
        except PlannerError as error:
            planners[name] = {"step_ms": None, "why": str(error).splitlines()[0]}
            continue
        planners[name] = figures(theirs, steps, scale, machines)
        planners[name]["step_ms"] = None if request is None else predicted_ms(theirs, request)
    return {"gpu": gpu, "ranks": machines.ranks, "host_gib": (machines.host_bytes or 0) / GIB, "planners": planners}


def figures(sharded: Any, steps: list[SequenceBatch], scale: Scale, machines: Topology) -> dict[str, Any]:
    """What a sharding plan asks of the ranks: memory from its shards, loads from the keys of a mean step.

    The temporary is what a rank looks up for one exchange: float32 rows of all tables that are sharded alike, each as
    often as it is asked for. Its load is that of all exchanges.
    """
    hbm = np.zeros(machines.ranks)
    asked: dict[str, NDArray[np.float64]] = {}
    largest, layout = 0.0, {}
    keys = _counted(steps, scale)
    for table, placed in (entry for module in sharded.plan.values() for entry in module.items()):
        kernel = _MODES[placed.compute_kernel]
        layout[table] = f"{placed.sharding_type} {kernel.value}"
        for shard in placed.sharding_spec.shards:
            (row, _), (rows, columns), rank = shard.shard_offsets, shard.shard_sizes, shard.placement.rank()
            ratio = {Mode.HBM_ONLY: 1.0, Mode.HOST_ONLY: 0.0}.get(
                kernel, getattr(placed.cache_params, "load_factor", 0.2)
            )
            hbm[rank] += ratio * rows * columns * 4 + rows * (12 if kernel is Mode.CACHING else 4)
            largest = max(largest, rows * columns * 4)
            known, counts = keys[table]
            low, high = np.searchsorted(known, [row, row + rows])
            load = asked.setdefault(placed.sharding_type, np.zeros(machines.ranks))
            load[rank] += float(counts[low:high].sum()) * columns * 4
    total = sum(asked.values(), np.zeros(machines.ranks))
    return {
        "hbm_gib": hbm.max() / GIB,
        "shard_gib": largest / GIB,
        "temporary_gib": max(load.max() for load in asked.values()) / GIB,
        "owner_load": total.max() / total.mean(),
        "tables": layout,
    }


def _counted(steps: list[SequenceBatch], scale: Scale) -> Mapping[str, tuple[Any, Any]]:
    """Keys of each table, ascending, and how often a step of all ranks looks each up."""
    found: dict[str, list[NDArray[np.int64]]] = {table: [] for table in ROWS}
    for batch in steps:
        keys = keys_of(batch, scale).to_dict()
        for table, values in found.items():
            values += [keys[feature].values().numpy() for feature in HISTORY.get(table, (table,))]
    every = {table: np.unique(np.concatenate(values), return_counts=True) for table, values in found.items()}
    return {table: (keys, counts * (THIN / len(steps))) for table, (keys, counts) in every.items()}


def predicted_ms(sharded: Any, request: PlanRequest) -> float:
    """What our model says of another planner's plan: its layouts and kernels, on ranks of our choice."""
    pinned = []
    placed = {table: entry for module in sharded.plan.values() for table, entry in module.items()}
    for table in request.tables:
        entry = placed[table.name]
        mode, sharding = _MODES[entry.compute_kernel], Sharding(entry.sharding_type)
        ratio = (getattr(entry.cache_params, "load_factor", None) or 0.2) if mode is Mode.CACHING else None
        parts = len(entry.sharding_spec.shards) if sharding is Sharding.COLUMN_WISE else 0
        pinned.append(replace(table, sharding=sharding, column_shards=parts, modes=(mode,), ratio=ratio))
    roomy = replace(request.topology, hbm_bytes=1 << 45, host_bytes=None)
    asked = replace(request, tables=tuple(pinned), topology=roomy)
    return 1e3 * (whole_step_seconds(asked, plan(asked)) or 0.0)


def show(result: Any, console: Console) -> None:
    """The figures as tables."""
    for cell in result["cells"]:
        host = f"{cell['host_gib']:,.0f} GiB of host memory" if cell["host_gib"] else "HBM only"
        table = RichTable(title=f"{cell['ranks']} × {cell['gpu'].upper()}, {host}; keys are synthetic")
        table.add_column("planner")
        for title in COLUMNS.values():
            table.add_column(title, justify="right")
        for name, row in cell["planners"].items():
            table.add_row(name, *(f"{row[key]:,.2f}" if row.get(key) is not None else "-" for key in COLUMNS))
        console.print(table)
        for name, row in cell["planners"].items():
            if "why" in row:
                console.print(f"{name}: {row['why']}", highlight=False)


if __name__ == "__main__":
    main()
