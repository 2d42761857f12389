"""Where the reference's tables live: our plan without overrides, beside TorchRec's with and without those set by hand.

    python -m examples.dlrmv4.plan [--gpu h100 ...] [--ranks 8 ...]

No GPU is needed: nothing is trained, figures are predictions and counts on the synthetic stream of `stream.py`. As in
the reference, planners may use HBM only; where ours finds nothing, all are asked again with the memory of the hosts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.types import PlannerError

from evenkeel.key_statistics import miss_curve
from evenkeel.placement import InvalidInputError, Mode, PlanRequest, Sharding, Topology, parse_topology, plan
from evenkeel.placement.application import TORCHREC_KERNELS
from evenkeel.placement.report import make_report
from evenkeel.placement.whole_step import whole_step_seconds
from evenkeel.plan_requests import DEFAULT_RESERVE
from examples.dlrmv4.model import HISTORY, keys_of, make_model, torchrec_tables
from examples.dlrmv4.stream import ROWS, Scale, Stream
from trainer_client.planning import KeyStatistics, plan_model

OVERRIDES = ("album_id", "artist_id")  # what the reference sets to column-wise by hand
THIN = 32  # one of so many samples stands for all: those of a user that follow each other differ by few events
STEPS = 8
SHARDINGS = (Sharding.ROW_WISE, Sharding.TABLE_WISE, Sharding.COLUMN_WISE, Sharding.DATA_PARALLEL)
COLUMNS = {
    "hbm_gib": ("HBM needed, GiB", ".0f"),
    "shard_gib": ("largest shard, GiB", ".1f"),
    "temporary_gib": ("largest temporary, GiB", ".1f"),
    "owner_load": ("heaviest owner / mean", ".2f"),
    "step_ms": ("predicted step, ms", ",.0f"),
}
NAMES = {"evenkeel": "Evenkeel", "torchrec": "TorchRec", "torchrec, by hand": "TorchRec, by hand"}
GIB = 2**30
_MODES = {"dense": Mode.HBM_ONLY} | {kernel: mode for mode, kernel in TORCHREC_KERNELS.items()}


class Answer(NamedTuple):
    """A planner's sharding plan, or why there is none; of ours the request."""

    plan: Any = None
    why: str = ""
    request: PlanRequest | None = None


def compare(gpus: Sequence[str] = ("h100", "h200"), ranks: Sequence[int] = (8, 16, 32)) -> dict[str, Any]:
    """Figures of all planners' plans by GPU and ranks."""
    logging.getLogger("torchrec").setLevel(logging.ERROR)  # or its planner prints pages
    stream, cells = Stream(Scale()), []
    for count in ranks:
        seen = Seen(stream, count)
        for gpu in gpus:
            named, topology = parse_topology(f"{gpu}x{count}")
            for host_bytes in (0, topology.host_bytes):
                machines = replace(topology, host_bytes=host_bytes, hbm_reserved_fraction=DEFAULT_RESERVE)
                planners = {"evenkeel": _ours(seen, machines, named)} | _theirs(seen, machines)
                if planners["evenkeel"].plan is not None:
                    break
            rows = {
                name: {"why": each.why} if each.plan is None else seen.figures(each.plan, planners["evenkeel"].request)
                for name, each in planners.items()
            }
            there = {"hbm_gib": machines.hbm_bytes * (1 - DEFAULT_RESERVE) / GIB, "host_gib": (host_bytes or 0) / GIB}
            cells.append({"gpu": gpu, "ranks": count, **there, "planners": rows})
    return {"keys": "synthetic", "samples_per_rank": stream.scale.samples, "cells": cells}


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
        return {
            "shard_gib": largest / GIB,
            "temporary_gib": max(load.max() for load in asked.values()) / GIB,
            "owner_load": total.max() / total.mean(),
            "tables": {
                name: f"{each.sharding_type} {_MODES[each.compute_kernel].value}" for name, each in placed.items()
            },
        } | ({} if request is None else _predicted(placed, request))


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
        topology = TorchRecTopology(
            world_size=machines.ranks, local_world_size=machines.local_ranks, compute_device="cuda",
            hbm_cap=machines.hbm_bytes, ddr_cap=(machines.host_bytes or 0) // machines.local_ranks,
        )  # fmt: skip
        planner = EmbeddingShardingPlanner(topology, seen.scale.samples, constraints=constraints, debug=False)
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
    used = found.workspace_bytes + max(part.hbm_bytes for part in report.ranks)
    return {"hbm_gib": used / GIB, "step_ms": 1e3 * (whole_step_seconds(asked, found) or 0.0)}


def shown(result: Mapping[str, Any]) -> str:
    """The figures as a table of Markdown."""
    lines = [["GPUs", "planner", *(title for title, _ in COLUMNS.values())], ["---"] * (2 + len(COLUMNS))]
    for cell in result["cells"]:
        machines = f"{cell['ranks']} {cell['gpu'].upper()}" + " and hosts' memory" * (cell["host_gib"] > 0)
        for name, row in cell["planners"].items():
            figures = [format(row[key], form) if key in row else "-" for key, (_, form) in COLUMNS.items()]
            lines.append([machines, NAMES[name], *figures])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(
    gpu: Annotated[list[str], typer.Option(help="Profile.")] = ["h100", "h200"],  # noqa: B006
    ranks: Annotated[list[int], typer.Option(min=1, help="Of the job.")] = [8, 16, 32],  # noqa: B006
) -> None:
    """Plans for each of the machines, as a table; why there is none where that is so."""
    result = compare(gpu, ranks)
    print(shown(result))
    for cell in result["cells"]:
        for name, row in cell["planners"].items():
            if "why" in row:
                print(f"{cell['ranks']} {cell['gpu']}: {NAMES[name]} has no plan: {row['why']}")


if __name__ == "__main__":
    typer.run(main)
