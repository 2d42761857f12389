"""How tables are spread over ranks: our planner beside TorchRec's own, on the same tables, budgets and bandwidths.

python -m benchmarks.placement_sharding --limit-s 20 --json benchmarks/results/placement_sharding.json

TorchRec's `EmbeddingShardingPlanner` enumerates its sharding types, kernels and column shards with its own estimates.
Both plans are then rated by one cost model, ours, and each by the HBM that it takes. `ours / bound` is the time over
the bound that our planner proves: 1 is the best possible. Planning times are CPU seconds of one core, and the limit is
one of them; TorchRec's planner knows only a limit by the clock, and gets four times as much.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import platform
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torchrec
import typer
from rich.console import Console
from rich.table import Table as RichTable
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import Topology as TheirTopology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from evenkeel.placement import (
    Mode,
    Optimizer,
    PlanRequest,
    Runtime,
    Sharding,
    SolverOptions,
    Step,
    Table,
    Topology,
    Zipf,
    plan,
)
from evenkeel.placement.placing import rate
from evenkeel.placement.problem import build_problem

MODES = {"fused": Mode.HBM_ONLY, "dense": Mode.HBM_ONLY, "fused_uvm": Mode.HOST_ONLY, "fused_uvm_caching": Mode.CACHING}
WORKSPACE = 2 << 30
SAMPLES = 1024


def draw_tables(count: int, seed: int = 0) -> tuple[Table, ...]:
    """Tables of log-normal sizes, pooled, with all ways of spreading them to choose from."""
    draw = np.random.default_rng(seed)
    return tuple(
        Table(
            name=f"table_{index}",
            dim=int(draw.choice([32, 64, 128, 256])),
            rows=int(min(4e8, draw.lognormal(14, 1.8))) + 1000,
            ids_per_sample=float(draw.choice([1, 1, 5, 20])),
            pooled=True,
            optimizer=Optimizer.ROWWISE_ADAGRAD,
            access=Zipf(exponent=float(draw.uniform(0.7, 1.2))),
            sharding=tuple(Sharding),
        )
        for index in range(count)
    )


def ask(tables: tuple[Table, ...], ranks: int, local: int, part: float, limit_s: float) -> PlanRequest:
    """A request whose ranks have room for a part of the tables together."""
    total = sum(table.rows * table.dim * 4 for table in tables)
    topology = Topology(
        ranks=ranks,
        ranks_per_host=local,
        hbm_bytes=int(part * total / ranks) + WORKSPACE + (1 << 30),
        host_bytes=1 << 43,
    )
    return PlanRequest(
        tables=tables,
        topology=topology,
        runtime=Runtime.TORCHREC,
        step=Step(samples_per_rank=SAMPLES),
        solver=SolverOptions(time_limit_s=limit_s),
    )


def theirs(request: PlanRequest, limit_s: int) -> dict[str, Any] | str:
    """What TorchRec's planner chooses: its sharding of each table, or why there is none."""
    profile, topology = request.profile, request.topology
    configs = [
        EmbeddingBagConfig(name=t.name, embedding_dim=t.dim, num_embeddings=t.rows, feature_names=[f"f_{t.name}"])
        for t in request.tables
    ]
    model = torch.nn.Sequential(EmbeddingBagCollection(tables=configs, device=torch.device("meta")))
    kernels = [kernel.value for kernel in EmbeddingComputeKernel if kernel.value in MODES]
    constraints = {
        t.name: ParameterConstraints(compute_kernels=kernels, pooling_factors=[t.ids_per_sample])
        for t in request.tables
    }
    planner = EmbeddingShardingPlanner(
        topology=TheirTopology(
            world_size=topology.ranks,
            local_world_size=topology.local_ranks,
            compute_device="cuda",
            hbm_cap=topology.hbm_bytes - WORKSPACE,
            ddr_cap=(topology.host_bytes or 0) // topology.local_ranks,
            intra_host_bw=profile.intra_host_bytes_per_s / 1e3,
            inter_host_bw=profile.inter_host_bytes_per_s / 1e3,
        ),
        batch_size=SAMPLES,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        timeout_seconds=4 * limit_s,
    )
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = planner.plan(model, [EmbeddingBagCollectionSharder()])
    except PlannerError as error:
        return str(error).strip()[:300]
    return dict(found.plan["0"])


def rated(request: PlanRequest, sharded: dict[str, Any]) -> dict[str, float]:
    """TorchRec's plan by our cost model: seconds of the slowest rank, and HBM of the fullest over the budget."""
    tables, places = [], {}
    for index, table in enumerate(request.tables):
        parameter = sharded[table.name]
        sharding, mode = Sharding(parameter.sharding_type), MODES[parameter.compute_kernel]
        local = request.topology.local_ranks
        shards = [] if parameter.sharding_spec is None else parameter.sharding_spec.shards
        pieces = len({shard.shard_offsets[1] for shard in shards}) or 1
        ratio = {Mode.HBM_ONLY: 1.0, Mode.HOST_ONLY: 0.0}.get(mode, 0.2)
        cut = pieces if sharding in (Sharding.COLUMN_WISE, Sharding.GRID) else 0
        tables.append(_pinned(table, sharding, cut, mode, ratio))
        if sharding in (Sharding.TABLE_WISE, Sharding.COLUMN_WISE):
            places[index] = tuple(parameter.ranks)
        if sharding in (Sharding.TABLE_ROW_WISE, Sharding.GRID):
            places[index] = tuple(rank // local for rank in parameter.ranks[::local])
    pinned = PlanRequest(
        tables=tuple(tables),
        topology=request.topology,
        runtime=request.runtime,
        step=request.step,
        solver=request.solver,
    )
    problem = build_problem(pinned)
    choice = tuple(np.isfinite(group.seconds).argmax(axis=1) for group in problem.groups)
    judged = rate(problem, pinned.topology, choice, places)
    return {"seconds": judged.seconds, "hbm_of_budget": float(judged.use[0] / problem.budget[0])}


def _pinned(table: Table, sharding: Sharding, cut: int, mode: Mode, ratio: float) -> Table:
    fields = {name: getattr(table, name) for name in ("name", "rows", "dim", "ids_per_sample", "optimizer", "access")}
    return Table(**fields, pooled=True, sharding=sharding, column_shards=cut, modes=(mode,), ratio=ratio)


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    sizes: Annotated[
        str, typer.Option(help="Tables x ranks / ranks of a host, separated by commas.")
    ] = "26x8/8,100x8/8,100x16/8,500x16/8,1000x16/8",
    parts: Annotated[str, typer.Option(help="Parts of the tables that HBM has room for.")] = "1.2,0.5",
    limit_s: Annotated[int, typer.Option(help="CPU seconds for each plan at most.")] = 60,
    quick: Annotated[bool, typer.Option(help="One small size.")] = False,
) -> None:
    """Plan every size under every budget with both."""
    logging.disable(logging.WARNING)
    console = Console()
    out = RichTable(title=f"ms a step by one cost model, {limit_s} CPU s at most; TorchRec {torchrec.__version__}")
    for heading in (
        "tables x ranks/host",
        "room",
        "ours",
        "TorchRec",
        "TorchRec / ours",
        "ours / bound",
        "CPU s",
        "CPU s TorchRec",
    ):
        out.add_column(heading, justify="right")
    rows: list[dict[str, Any]] = []
    for size in ("26x8/8" if quick else sizes).split(","):
        count, _, machines = size.partition("x")
        ranks, _, local = machines.partition("/")
        for part in ("0.5" if quick else parts).split(","):
            request = ask(draw_tables(int(count)), int(ranks), int(local), float(part), limit_s)
            begin = time.process_time()
            own = plan(request, clock=time.process_time)
            seconds = time.process_time() - begin
            begin = time.process_time()
            other = theirs(request, limit_s)
            their_seconds = time.process_time() - begin
            row: dict[str, Any] = {"size": size, "room": float(part), "hbm_bytes": request.topology.hbm_bytes}
            row |= {"status": own.status.value, "seconds": own.seconds, "bound_seconds": own.bound_seconds}
            row |= {"gap": own.gap, "planning_seconds": seconds, "torchrec_planning_seconds": their_seconds}
            row["torchrec"] = other if isinstance(other, str) else rated(request, other)
            row["ways"] = _count(p.sharding.value for p in own.placements)
            row["torchrec_ways"] = {} if isinstance(other, str) else _count(p.sharding_type for p in other.values())
            rows.append(row)
            out.add_row(*_cells(row))
            if json_path:
                _write(json_path, limit_s, rows)
    console.print(out)


def _write(path: Path, limit_s: int, rows: list[dict[str, Any]]) -> None:
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    command = f"python -m benchmarks.placement_sharding --limit-s {limit_s}"
    payload = {"command": command, "torchrec": torchrec.__version__, **machine, "rows": rows}
    path.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")


def _count(names: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items()))


def _cells(row: dict[str, Any]) -> list[str]:
    own, other = row["seconds"], row["torchrec"]
    mine = "none" if own is None else f"{own * 1e3:.3g}"
    cells = [row["size"], f"{row['room']:g}", mine]
    if isinstance(other, str):
        cells += ["none", ""]
    else:
        over = "" if other["hbm_of_budget"] <= 1 else f" (HBM {other['hbm_of_budget']:.0%})"
        cells += [f"{other['seconds'] * 1e3:.3g}{over}", f"{other['seconds'] / own:.2f}" if own else ""]
    cells.append(f"{own / row['bound_seconds']:.4f}" if own else "")
    return [*cells, f"{row['planning_seconds']:.1f}", f"{row['torchrec_planning_seconds']:.1f}"]


if __name__ == "__main__":
    typer.run(main)
