"""Plans for TorchRec held against GPUs: HBM and time of a step, predicted and measured, by mode and in a mixture.

torchrun --nproc-per-node 2 -m benchmarks.placement_gpu --json benchmarks/results/placement_gpu.json
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torchrec
import typer
from rich.console import Console
from rich.table import Table as RichTable
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.placement_gpu_model import (
    Model,
    keys_of,
    planned_tables,
    sharders,
    table_bytes_by_kernel,
)
from evenkeel.placement import Mode, Optimizer, Plan, PlanRequest, Runtime, Status, Step, Table, Topology, plan
from evenkeel.placement.hardware import HardwareProfile, parse_profile
from trainer_client.planning import parameter_constraints, sharding_plan
from trainer_client.planning.whole_steps import join_group

GIB = float(1 << 30)
LARGE = 4 << 30
ALLOWED = 1.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Tables under one choice of modes.

    Attributes:
        name: What it is called in the output.
        modes: Modes that tables may have; all where empty.
        ratio: Fraction of the rows that HBM holds; the planner's choice where `None`.
        budget: HBM that tables may use, over what all of them in HBM take; ample where `None`.
        optimizer: Fused optimizer of the tables.
        theirs: Whether TorchRec's planner makes the sharding plan under our constraints, instead of us.
    """

    name: str
    modes: tuple[Mode, ...] = ()
    ratio: float | None = None
    budget: float | None = None
    optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD
    theirs: bool = False


CASES = (
    Case(name="HBM_ONLY", modes=(Mode.HBM_ONLY,)),
    Case(name="CACHING 0.5", modes=(Mode.CACHING,), ratio=0.5),
    Case(name="CACHING 0.2", modes=(Mode.CACHING,), ratio=0.2),
    Case(name="CACHING 0.1", modes=(Mode.CACHING,), ratio=0.1),
    Case(name="HOST_ONLY", modes=(Mode.HOST_ONLY,)),
    Case(name="mixture 0.7", budget=0.7),
    Case(name="mixture 0.4", budget=0.4),
    Case(name="mixture 0.7, constraints", budget=0.7, theirs=True),
    Case(name="HBM_ONLY, Adam", modes=(Mode.HBM_ONLY,), optimizer=Optimizer.ADAM),
    Case(name="mixture 0.5, Adam", budget=0.5, optimizer=Optimizer.ADAM),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all cases share.

    Attributes:
        device: Device of this rank.
        ranks: Number of ranks, all on this host.
        samples: Samples of a batch on a rank.
        scale: Rows of the tables over their usual ones.
        profile: Hardware profile, or the name of a built-in one.
        warmup: Steps before those that are timed; caches fill in them.
        repeats: Timed steps.
    """

    device: torch.device
    ranks: int
    samples: int
    scale: float
    profile: str | HardwareProfile
    warmup: int
    repeats: int


def ask(run: Run, case: Case, tables: tuple[Table, ...]) -> tuple[PlanRequest, Plan]:
    """The planner's answer for `case`."""
    pinned = tuple(replace(table, modes=case.modes, ratio=case.ratio) for table in tables)
    topology = Topology(ranks=run.ranks, hbm_bytes=1 << 45, host_bytes=None)
    step = Step(samples_per_rank=run.samples)
    request = PlanRequest(tables=pinned, topology=topology, hardware=run.profile, runtime=Runtime.TORCHREC, step=step)
    if case.budget is not None:
        everything = tuple(replace(table, modes=(Mode.HBM_ONLY,)) for table in tables)
        most = plan(replace(request, tables=everything), split=False)
        budget = most.workspace_bytes + int(most.hbm.used_bytes * case.budget)
        request = replace(request, topology=replace(topology, hbm_bytes=budget))
    found = plan(request, split=False)
    assert found.status in (Status.OPTIMAL, Status.FEASIBLE), f"{case.name}: {found.status}"
    return request, found


def placed_by(run: Run, case: Case, model: Model, request: PlanRequest, found: Plan) -> ShardingPlan:
    """The sharding plan: ours, or TorchRec's own under our constraints, whose kernels must then be the plan's."""
    ours = sharding_plan(model, request, found, device=run.device.type)
    if not case.theirs or run.device.type == "cpu":
        return ours
    topology = TorchRecTopology(
        world_size=run.ranks, local_world_size=run.ranks, compute_device="cuda", hbm_cap=1 << 40, ddr_cap=1 << 42
    )
    planner = EmbeddingShardingPlanner(topology=topology, constraints=parameter_constraints(request, found))
    theirs: ShardingPlan = planner.plan(model, sharders(case.optimizer))
    for path, parameters in ours.plan.items():
        for name, parameter in parameters.items():
            other: Any = theirs.plan[path][name]
            assert (other.sharding_type, other.compute_kernel) == (parameter.sharding_type, parameter.compute_kernel)
            cached = parameter.cache_params
            assert cached is None or other.cache_params.load_factor == cached.load_factor, name
    return theirs


def batches(run: Run, tables: tuple[Table, ...]) -> Iterator[tuple[KeyedJaggedTensor, KeyedJaggedTensor]]:
    """Fresh keys for the bags and the rows in every step: batches in turn would soon all be in the caches."""
    generator = torch.Generator(run.device).manual_seed(17 + dist.get_rank())
    while True:
        halves = []
        for group in ("bags", "rows"):
            own = [table for table in tables if table.group == group]
            each = [int(table.ids_per_sample) for table in own]
            values = torch.cat([keys_of(t.rows, run.samples * n, generator) for t, n in zip(own, each, strict=True)])
            lengths = torch.cat([torch.full((run.samples,), n, device=run.device) for n in each])
            keys = [f"f_{table.name}" for table in own]
            halves.append(KeyedJaggedTensor(keys=keys, values=values, lengths=lengths))
        yield halves[0], halves[1]


def timed_steps(run: Run, parallel: torch.nn.Module, tables: tuple[Table, ...], warmup: int) -> float:
    """Median seconds of a step, forward and backward with the fused optimizer, of the slowest rank."""
    times = []
    source = batches(run, tables)
    for turn in range(warmup + run.repeats):
        batch = next(source)
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        parallel(*batch).backward()
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= warmup:
            times.append(time.perf_counter() - begin)
    return slowest(run, statistics.median(times))


def slowest(run: Run, value: float) -> float:
    """The largest value over the ranks."""
    cell = torch.tensor(value, dtype=torch.float64, device=run.device)
    dist.all_reduce(cell, dist.ReduceOp.MAX)
    return float(cell)


def measure(run: Run, case: Case) -> dict[str, Any]:
    """Plan, shard, train and compare."""
    model = Model(run.scale)
    tables = planned_tables(model, case.optimizer)
    request, found = ask(run, case, tables)
    placed = placed_by(run, case, model, request, found)
    cuda = run.device.type == "cuda"
    before = 0
    if cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    parallel = DistributedModelParallel(
        model, env=env, device=run.device, plan=placed, sharders=sharders(case.optimizer)
    )
    kernels = table_bytes_by_kernel(parallel, request, found)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    cached = any(p.mode is Mode.CACHING for p in found.placements)
    seconds = timed_steps(run, parallel, tables, run.warmup if cached else min(run.warmup, 10))
    in_steps, outside = 0, 0
    if cuda:
        in_steps = torch.cuda.max_memory_allocated() - before
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
    ranks: list[Any] = [None] * run.ranks
    dist.all_gather_object(ranks, {"kernels": kernels, "tables_and_step_bytes": in_steps, "outside_bytes": outside})
    stored = max(sum(k["measured_hbm_bytes"] for k in rank["kernels"]) for rank in ranks)
    in_use = max(rank["tables_and_step_bytes"] + rank["outside_bytes"] for rank in ranks)
    predicted = found.hbm.used_bytes + found.workspace_bytes
    modes = {mode.value: sum(p.mode is mode for p in found.placements) for mode in Mode}
    return {
        "case": case.name,
        "optimizer": case.optimizer.value,
        "tables_by_mode": {mode: count for mode, count in modes.items() if count},
        "ratios": {p.table: p.ratio for p in found.placements if p.mode is Mode.CACHING},
        "hbm_limit_bytes": found.hbm.limit_bytes,
        "predicted_tables_and_step_bytes": found.hbm.used_bytes,
        "measured_tables_and_step_bytes": max(rank["tables_and_step_bytes"] for rank in ranks),
        "predicted_workspace_bytes": found.workspace_bytes,
        "measured_outside_bytes": max(rank["outside_bytes"] for rank in ranks),
        "predicted_bytes": predicted,
        "measured_bytes": in_use,
        "measured_table_bytes": stored,
        "ratio": predicted / in_use if in_use else None,
        "verdict": verdict(predicted, in_use, stored),
        "predicted_ms": (found.seconds or 0.0) * 1e3,
        "measured_ms": seconds * 1e3,
        "ranks": ranks,
    }


def verdict(predicted: int, in_use: int, stored: int) -> str:
    """Whether a prediction is never below what is in use, and at most 10 % above it for large tables."""
    if not in_use:
        return "not measured"
    if predicted < in_use:
        return "too low"
    return "too high" if stored >= LARGE and predicted > ALLOWED * in_use else "ok"


def show(records: list[dict[str, Any]]) -> None:
    """Print both tables."""
    console = Console(width=150)
    sums = RichTable(title="HBM of the fullest rank, MiB, and time of a step, ms: predicted / measured")
    for heading in ("case", "tables by mode", "tables + step", "outside", "sum", "ratio", "verdict", "step"):
        sums.add_column(heading, justify="left" if heading in ("case", "tables by mode") else "right")

    def pair(record: dict[str, Any], first: str, second: str) -> str:
        return f"{record[first] / 2**20:,.0f} / {record[second] / 2**20:,.0f}"

    for r in records:
        sums.add_row(
            r["case"],
            ", ".join(f"{count} {mode}" for mode, count in r["tables_by_mode"].items()),
            pair(r, "predicted_tables_and_step_bytes", "measured_tables_and_step_bytes"),
            pair(r, "predicted_workspace_bytes", "measured_outside_bytes"),
            pair(r, "predicted_bytes", "measured_bytes"),
            f"{r['ratio']:.3f}" if r["ratio"] else "",
            r["verdict"],
            f"{r['predicted_ms']:.2f} / {r['measured_ms']:.2f}",
        )
    console.print(sums)
    parts = RichTable(title="Kernels of rank 0: bytes of tables, MiB, predicted / measured")
    for heading in ("case", "tables", "in HBM", "in host memory", "caches", "optimizer state in HBM"):
        parts.add_column(heading, justify="left" if heading in ("case", "tables") else "right")
    for r in records:
        for kernel in r["ranks"][0]["kernels"]:
            parts.add_row(
                r["case"],
                " ".join(kernel["tables"]),
                pair(kernel, "predicted_hbm_bytes", "measured_hbm_bytes"),
                pair(kernel, "predicted_host_bytes", "measured_host_bytes"),
                f"{kernel['measured_cache_bytes'] / 2**20:,.0f}",
                f"{kernel['measured_state_bytes'] / 2**20:,.0f}",
            )
    console.print(parts)


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the way without GPUs.")] = "cuda",
    profile: Annotated[Path | None, typer.Option(help="Hardware profile written by `evenkeel calibrate`.")] = None,
    samples: Annotated[int, typer.Option(help="Samples of a batch on a rank.")] = 8192,
    scale: Annotated[float, typer.Option(help="Size of the tables, over 14 GiB of weights in all.")] = 1.0,
    warmup: Annotated[int, typer.Option(help="Steps before the timed ones, where there are caches to fill.")] = 200,
    repeats: Annotated[int, typer.Option(help="Timed steps.")] = 30,
    only: Annotated[list[str] | None, typer.Option("--case", help="Only cases whose name contains this.")] = None,
    check: Annotated[bool, typer.Option(help="Fail where HBM is predicted too low or too high.")] = False,
) -> None:
    """Train under every case and compare with the planner's predictions."""
    place = join_group(device)
    run = Run(
        device=place,
        ranks=dist.get_world_size(),
        samples=samples,
        scale=scale,
        profile="h200" if profile is None else parse_profile(json.loads(profile.read_text("utf-8"))),
        warmup=warmup,
        repeats=repeats,
    )
    records = []
    for case in CASES:
        # FBGEMM has no Adam on the CPU.
        unable = device == "cpu" and case.optimizer is Optimizer.ADAM
        if unable or (only and not any(part in case.name for part in only)):
            continue
        records.append(measure(run, case))
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            last = records[-1]
            step = f"step {last['predicted_ms']:.2f} ms predicted, {last['measured_ms']:.2f} measured"
            print(f"{last['case']}: {last['verdict']}, {step}", flush=True)
            if json_path:
                json_path.write_text(json.dumps(about(run) | {"rows": records}, indent=1) + "\n")
    if dist.get_rank() == 0:
        show(records)
    dist.destroy_process_group()
    if check and any(record["verdict"].startswith("too") for record in records):
        raise typer.Exit(1)


def about(run: Run) -> dict[str, Any]:
    """Where the figures are from."""
    import fbgemm_gpu

    cuda = run.device.type == "cuda"
    return {
        "command": "torchrun --nproc-per-node N -m benchmarks.placement_gpu --json FILE",
        "device": torch.cuda.get_device_name() if cuda else "cpu: memory is not measured, times mean nothing",
        "ranks": run.ranks,
        "samples_per_rank": run.samples,
        "scale": run.scale,
        "profile": run.profile if isinstance(run.profile, str) else run.profile.name,
        "torch": torch.__version__,
        "torchrec": torchrec.__version__,
        "fbgemm": fbgemm_gpu.__version__,
    }


if __name__ == "__main__":
    typer.run(main)
