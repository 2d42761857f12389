"""Where the reference's tables live: our plan without overrides, beside TorchRec's with and without those set by hand.

    python -m examples.dlrmv4.plan
    python -m examples.dlrmv4.plan --gpu h100 --ranks 32 --json plans.json

No GPU is needed: nothing is trained, figures are predictions and counts on the synthetic stream of `stream.py`. As in
the reference, planners may use HBM only; where ours finds nothing, all are asked again with the memory of the hosts.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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
from evenkeel.placement.report import make_report
from evenkeel.placement.whole_step import whole_step_seconds
from examples.dlrmv4.model import HISTORY, keys_of, make_model, torchrec_tables
from examples.dlrmv4.stream import ROWS, Scale, Stream
from trainer_client.planning import KeyStatistics, plan_model
from trainer_client.planning.model import RESERVE

OVERRIDES = ("album_id", "artist_id")
"""What the reference sets to column-wise by hand."""
THIN = 32
"""One of so many samples stands for all: samples of a user that follow each other differ by few events."""
STEPS = 8
SHARDINGS = (Sharding.ROW_WISE, Sharding.TABLE_WISE, Sharding.COLUMN_WISE)
COLUMNS = {
    "hbm_gib": "HBM needed, GiB",
    "shard_gib": "largest shard, GiB",
    "temporary_gib": "largest temporary, GiB",
    "owner_load": "heaviest owner / mean",
    "step_ms": "predicted step, ms",
}
GIB = 2**30
_MODES = {
    "fused": Mode.HBM_ONLY,
    "dense": Mode.HBM_ONLY,
    "fused_uvm_caching": Mode.CACHING,
    "fused_uvm": Mode.HOST_ONLY,
}


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
        seen = Seen(stream, count)
        for gpu in gpus:
            named, topology = parse_topology(f"{gpu}x{count}")
            for host_bytes in (0, topology.host_bytes):
                machines = replace(topology, host_bytes=host_bytes, hbm_reserved_fraction=RESERVE)
                planners = {"evenkeel": _ours(seen, machines, named)} | _theirs(seen, machines)
                if planners["evenkeel"].plan is not None:
                    break
            request = planners["evenkeel"].request
            rows = {
                name: {"why": each.why} if each.plan is None else seen.figures(each.plan, request)
                for name, each in planners.items()
            }
            there = machines.hbm_bytes * (1 - RESERVE) / GIB
            cells.append(
                {"gpu": gpu, "ranks": count, "hbm_gib": there, "host_gib": (host_bytes or 0) / GIB, "planners": rows}
            )
    return {"keys": "synthetic", "samples_per_rank": samples, "tables_gb": 2048e-9 * sum(ROWS.values()), "cells": cells}


class Answer(NamedTuple):
    """A planner's sharding plan, or why there is none; of ours the request."""

    plan: Any = None
    why: str = ""
    request: PlanRequest | None = None


class Seen:
    """What some steps of a job look up, of each step every `THIN`-th sample."""

    def __init__(self, stream: Stream, ranks: int) -> None:
        self.scale, self.ranks = stream.scale, ranks
        size, begin = ranks * stream.scale.samples, len(stream) // 2
        self.model = make_model(self.scale, torchrec_tables(self.scale), torch.device("cpu"))
        statistics, found = KeyStatistics(self.model), {table: [] for table in ROWS}  # type: ignore[var-annotated]
        for step in range(STEPS):
            keys = keys_of(stream.batch(range(begin + step * size, begin + (step + 1) * size, THIN)), self.scale)
            statistics.observe(keys)
            for table, values in found.items():
                values += [keys[feature].values().numpy() for feature in HISTORY.get(table, (table,))]
        counted = {table: np.unique(np.concatenate(values), return_counts=True) for table, values in found.items()}
        self.keys = {table: (keys, counts * (THIN / STEPS)) for table, (keys, counts) in counted.items()}
        traces = statistics.traces()
        self.ids = {name: trace.lookups / trace.samples for name, trace in traces.items()}
        # Of a lookup a sample the thinned steps show too few different keys, unless they count as whole ones.
        whole = {name: trace.lookups * (THIN if name in HISTORY else 1) for name, trace in traces.items()}
        self.access = {
            name: miss_curve(replace(trace, lookups=whole[name]), self.scale.rows_of(name)).access
            for name, trace in traces.items()
        }

    def figures(self, sharded: Any, request: PlanRequest | None) -> dict[str, Any]:
        """What a sharding plan asks of the ranks: loads from the keys of a mean step, memory and time as we predict.

        The temporary is what a rank looks up for one exchange: float32 rows of all tables that are sharded alike, each
        as often as it is asked for. Its load is that of all exchanges.
        """
        placed = {table: entry for module in sharded.plan.values() for table, entry in module.items()}
        asked: dict[str, NDArray[np.float64]] = {}
        largest = 0.0
        for table, entry in placed.items():
            known, counts = self.keys[table]
            load = asked.setdefault(entry.sharding_type, np.zeros(self.ranks))
            if entry.sharding_spec is None:  # a copy on each rank
                load += counts.sum() / self.ranks * self.scale.width * 4
            for shard in entry.sharding_spec.shards if entry.sharding_spec else ():
                (row, _), (rows, columns) = shard.shard_offsets, shard.shard_sizes
                largest = max(largest, rows * columns * 4)
                low, high = np.searchsorted(known, [row, row + rows])
                load[shard.placement.rank()] += float(counts[low:high].sum()) * columns * 4
        total = sum(asked.values(), np.zeros(self.ranks))
        found = {"shard_gib": largest / GIB, "temporary_gib": max(load.max() for load in asked.values()) / GIB}
        found["owner_load"] = total.max() / total.mean()
        if request is not None:
            found |= _predicted(placed, request)
        layout = {
            table: f"{entry.sharding_type} {_MODES[entry.compute_kernel].value}" for table, entry in placed.items()
        }
        return found | {"tables": layout}


def _ours(seen: Seen, machines: Topology, gpu: str) -> Answer:
    """Our plan: no table is treated by name."""
    try:
        planned = plan_model(
            seen.model, access=seen.access, ids_per_sample=seen.ids, samples_per_rank=seen.scale.samples,
            topology=machines, hardware=gpu, sharding=SHARDINGS,
        )  # fmt: skip
    except InvalidInputError as error:
        return Answer(why=str(error))
    return Answer(plan=planned.sharding_plan, request=planned.request)


def _theirs(seen: Seen, machines: Topology) -> dict[str, Answer]:
    """TorchRec's plans, which know the lookups of a sample too."""
    found = {}
    for name, overridden in (("torchrec", ()), ("torchrec, by hand", OVERRIDES)):
        constraints = {
            table: ParameterConstraints(
                pooling_factors=[ids / len(HISTORY.get(table, " "))] * len(HISTORY.get(table, " ")),
                sharding_types=["column_wise"] if table in overridden else None,
            )
            for table, ids in seen.ids.items()
        }
        planner = EmbeddingShardingPlanner(
            topology=TorchRecTopology(
                world_size=machines.ranks, local_world_size=machines.local_ranks, compute_device="cuda",
                hbm_cap=machines.hbm_bytes, ddr_cap=(machines.host_bytes or 0) // machines.local_ranks,
            ),
            batch_size=seen.scale.samples, constraints=constraints, debug=False,
        )  # fmt: skip
        try:
            found[name] = Answer(plan=planner.plan(seen.model, [EmbeddingCollectionSharder()]))
        except PlannerError as error:
            found[name] = Answer(why=str(error).splitlines()[0])
    return found


def _predicted(placed: Mapping[str, Any], request: PlanRequest) -> dict[str, float]:
    """What our model says of any planner's plan: its layouts and kernels, on ranks of our choice."""
    pinned = []
    for table in request.tables:
        entry = placed[table.name]
        mode, sharding = _MODES[entry.compute_kernel], Sharding(entry.sharding_type)
        ratio = (getattr(entry.cache_params, "load_factor", None) or 0.2) if mode is Mode.CACHING else None
        parts = len(entry.sharding_spec.shards) if sharding is Sharding.COLUMN_WISE else 0
        pinned.append(replace(table, sharding=sharding, column_shards=parts, modes=(mode,), ratio=ratio))
    roomy = replace(request.topology, hbm_bytes=1 << 45, host_bytes=None)
    asked = replace(request, tables=tuple(pinned), topology=roomy)
    found = plan(asked)
    report = make_report(asked, found)
    assert report is not None, "there is room for all"
    return {
        "hbm_gib": (found.workspace_bytes + max(part.hbm_bytes for part in report.ranks)) / GIB,
        "step_ms": 1e3 * (whole_step_seconds(asked, found) or 0.0),
    }


def show(result: Any, console: Console) -> None:
    """The figures as tables."""
    for cell in result["cells"]:
        host = f", {cell['host_gib']:,.0f} GiB in a host" if cell["host_gib"] else ""
        title = (
            f"{cell['ranks']} × {cell['gpu'].upper()}, {cell['hbm_gib']:.0f} GiB for tables{host}; keys are synthetic"
        )
        table = RichTable("planner", *COLUMNS.values(), title=title)
        for name, row in cell["planners"].items():
            table.add_row(name, *(f"{row[key]:,.2f}" if key in row else "-" for key in COLUMNS))
        console.print(table)
        for name, row in cell["planners"].items():
            if "why" in row:
                console.print(f"{name}: {row['why']}", highlight=False)


if __name__ == "__main__":
    main()
