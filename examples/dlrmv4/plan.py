"""Where the reference's tables live: our plan without overrides, beside TorchRec's with and without those set by hand.

    python -m examples.dlrmv4.plan [--gpu h100 ...] [--ranks 8 ...]

No GPU is needed: nothing is trained, figures are predictions and counts on the synthetic stream of `stream.py`. As in
the reference, planners may use HBM only; where ours finds nothing, all are asked again with the memory of the hosts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan

from evenkeel.key_statistics import miss_curve
from evenkeel.placement import InvalidInputError, Plan, PlanRequest, Sharding, Topology, parse_topology
from evenkeel.placement.report import make_report
from evenkeel.placement.whole_step import whole_step_seconds
from evenkeel.plan_requests import DEFAULT_RESERVE
from examples.dlrmv4.model import HISTORY, keys_of, make_model, torchrec_tables
from examples.dlrmv4.stream import ROWS, Scale, Stream
from trainer_client.planning import KeyStatistics, plan_model
from trainer_client.planning.clock import as_cut

OVERRIDES = ("album_id", "artist_id")  # what the reference sets to column-wise by hand
THIN = 32  # one of so many samples stands for all: those of a user that follow each other differ by few events
STEPS = 8
SHARDINGS = (Sharding.ROW_WISE, Sharding.TABLE_WISE, Sharding.COLUMN_WISE, Sharding.DATA_PARALLEL)
HEAD = (
    "| GPUs | planner | HBM, GiB | largest shard | largest temporary | heaviest owner / mean | predicted step, ms |"
    f"\n{'| --- ' * 7}|"
)
LINE = "| {} | {} | {hbm_gib:.0f} of {} | {shard_gib:.1f} | {temporary_gib:.1f} | {owner_load:.2f} | {step_ms:,.0f} |"
GIB = 2**30


def compare(gpus: Sequence[str] = ("h100", "h200"), ranks: Sequence[int] = (8, 16, 32)) -> dict[str, Any]:
    """Figures of all planners' plans by GPU and ranks.

    Raises:
        InvalidInputError: If there is no such GPU, or ours finds no plan even with the memory of the hosts.
    """
    logging.getLogger("torchrec").setLevel(logging.ERROR)  # or its planner prints pages
    stream = Stream(Scale())
    cells = [seen.cell(gpu) for seen in (Seen(stream, count) for count in ranks) for gpu in gpus]
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
        self.access = {}
        for name, trace in traces.items():
            # Of a lookup a sample the thinned steps show too few different keys, unless they count as whole ones.
            whole = replace(trace, lookups=trace.lookups * (THIN if name in HISTORY else 1))
            self.access[name] = miss_curve(whole, self.scale.rows_of(name)).access

    def cell(self, gpu: str) -> dict[str, Any]:
        """Figures of all planners' plans for as many GPUs."""
        named, topology = parse_topology(f"{gpu}x{self.ranks}")
        for host_bytes in (0, topology.host_bytes):
            machines = replace(topology, host_bytes=host_bytes, hbm_reserved_fraction=DEFAULT_RESERVE)
            try:  # no table is treated by name
                ours = plan_model(
                    self.model, access=self.access, ids_per_sample=self.ids, samples_per_rank=self.scale.samples,
                    topology=machines, hardware=named, sharding=SHARDINGS,
                )  # fmt: skip
                break
            except InvalidInputError:
                if host_bytes != 0:
                    raise
        rows = {"Evenkeel": self.figures(ours.sharding_plan, ours.request, ours.plan)}
        for name, overridden in (("TorchRec", ()), ("TorchRec, by hand", OVERRIDES)):
            try:
                rows[name] = self.figures(self._theirs(machines, overridden), ours.request)
            except PlannerError as error:
                rows[name] = {"why": str(error).splitlines()[0]}
        there = {"hbm_gib": machines.hbm_budget / GIB, "host_gib": (machines.host_bytes or 0) / GIB}
        return {"gpu": gpu, "ranks": self.ranks, **there, "planners": rows}

    def _theirs(self, machines: Topology, overridden: Sequence[str]) -> ShardingPlan:
        """TorchRec's plan, which knows the lookups of a sample too."""
        constraints = {}
        for table, ids in self.ids.items():
            pooling = [ids / len(HISTORY.get(table, " "))] * len(HISTORY.get(table, " "))
            kinds = ["column_wise"] if table in overridden else None
            constraints[table] = ParameterConstraints(pooling_factors=pooling, sharding_types=kinds)
        topology = TorchRecTopology(
            world_size=machines.ranks, local_world_size=machines.local_ranks, compute_device="cuda",
            hbm_cap=machines.hbm_bytes, ddr_cap=(machines.host_bytes or 0) // machines.local_ranks,
        )  # fmt: skip
        planner = EmbeddingShardingPlanner(topology, self.scale.samples, constraints=constraints, debug=False)
        return planner.plan(self.model, [EmbeddingCollectionSharder()])

    def figures(self, sharded: ShardingPlan | None, request: PlanRequest, plan: Plan | None = None) -> dict[str, Any]:
        """What a sharding plan asks of the ranks: loads from the keys of a mean step, memory and time as we predict.

        The temporary is what a rank looks up for one exchange: float32 rows of all tables that are sharded alike, each
        as often as it is asked for. Its load is that of all exchanges.
        """
        assert sharded is not None, "it was asked for TorchRec"
        placed: dict[str, Any] = {name: entry for module in sharded.plan.values() for name, entry in module.items()}
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
        # Our model's word; of others' layouts and kernels on ranks of our choice, where there is room for all.
        roomy = replace(request, topology=replace(request.topology, hbm_bytes=1 << 45, host_bytes=None))
        found = plan or as_cut(roomy, placed)
        assert found is not None, "there is room"
        report = make_report(roomy, found)
        assert report is not None, "there is room"
        return {
            "shard_gib": largest / GIB,
            "temporary_gib": max(load.max() for load in asked.values()) / GIB,
            "owner_load": total.max() / total.mean(),
            "tables": {name: f"{each.sharding_type} {each.compute_kernel}" for name, each in placed.items()},
            "hbm_gib": (found.workspace_bytes + max(part.hbm_bytes for part in report.ranks)) / GIB,
            "step_ms": 1e3 * (whole_step_seconds(roomy, found) or 0.0),
        }


def shown(result: Mapping[str, Any]) -> str:
    """The figures as a table of Markdown, and why a planner has no plan."""
    lines = [HEAD]
    for cell in result["cells"]:
        machines = f"{cell['ranks']} {cell['gpu'].upper()}" + " and hosts' memory" * (cell["host_gib"] > 0)
        for name, row in cell["planners"].items():
            why = f"| {machines} | {name} | {row.get('why')} |"
            lines.append(why if "why" in row else LINE.format(machines, name, int(cell["hbm_gib"]), **row))
    return "\n".join(lines)


def main(
    gpu: Annotated[list[str], typer.Option(help="Profile.")] = ["h100", "h200"],  # noqa: B006
    ranks: Annotated[list[int], typer.Option(min=1, help="Of the job.")] = [8, 16, 32],  # noqa: B006
) -> None:
    """Plans for each of the machines, as a table."""
    print(shown(compare(gpu, ranks)))


if __name__ == "__main__":
    typer.run(main)
