"""What a plan is worth: the planner's, TorchRec's and a fixed one under the same HBM, by the clock of one GPU.

torchrun --nproc-per-node 1 -m benchmarks.placement_gpu_plans --json plans.json
"""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from rich.console import Console
from rich.table import Table as RichTable
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    EmbeddingOffloadScaleupProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import CacheParams, CacheStatistics, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.placement_gpu_model import sharders
from benchmarks.placement_gpu_steps import timed
from evenkeel.placement import Eviction, MissCurve, Mode, Optimizer, PlanRequest, Runtime, Status, Step, Topology, plan
from evenkeel.placement.hardware import parse_profile
from evenkeel.placement.hit_rates import step_keys
from trainer_client.planning import KeyStatistics, describe_model, sharding_plan, with_statistics

SEED = 11
KERNELS = ["fused", "fused_uvm_caching", "fused_uvm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Tables of a model and their keys.

    Attributes:
        rows: Rows of each table.
        dims: Width of each.
        ids: Lookups of a sample of each.
        exponents: Of the power law of each table's keys.
        samples: Samples of a batch.
    """

    rows: tuple[int, ...]
    dims: tuple[int, ...]
    ids: tuple[int, ...]
    exponents: tuple[float, ...]
    samples: int

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return [f"t{index}" for index in range(len(self.rows))]


def job_of(tables: int, gib: float, samples: int) -> Job:
    """Few large tables and many small ones, as of click logs, `gib` of weights in all."""
    draw = np.random.default_rng(SEED + tables)
    weight = np.exp(draw.normal(0, 2.0, tables))
    dims = draw.choice([32, 64, 128], tables)
    rows = np.maximum(1_000, weight / (weight * dims * 4).sum() * gib * 2**30).astype(np.int64)
    ids = draw.choice([1, 1, 1, 2, 5, 20], tables)
    return Job(
        rows=tuple(rows.tolist()),
        dims=tuple(dims.tolist()),
        ids=tuple(ids.tolist()),
        exponents=tuple(draw.choice([0.7, 0.9, 1.05, 1.2], tables).tolist()),
        samples=samples,
    )


class Model(torch.nn.Module):
    """All tables in one collection of bags, and a loss."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=rows, feature_names=[f"f_{name}"])
            for name, dim, rows in zip(job.names, job.dims, job.rows, strict=True)
        ]
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))

    def forward(self, keys: KeyedJaggedTensor) -> torch.Tensor:
        """The mean of all embeddings."""
        mean: torch.Tensor = self.bags(keys).values().mean()
        return mean


def batches(job: Job, device: torch.device, trace: torch.Tensor | None) -> Iterator[tuple[KeyedJaggedTensor]]:
    """Keys of power laws, or those of a trace in their order, each table from a place of its own."""
    generator = torch.Generator(device).manual_seed(SEED)
    names = [f"f_{name}" for name in job.names]
    lengths = torch.cat([torch.full((job.samples,), ids, device=device, dtype=torch.int32) for ids in job.ids])
    at = [0 if trace is None else len(trace) * index // len(names) for index in range(len(names))]
    while True:
        values = []
        for index, (rows, ids, exponent) in enumerate(zip(job.rows, job.ids, job.exponents, strict=True)):
            count = job.samples * ids
            if trace is None:
                uniform = torch.rand(count, generator=generator, dtype=torch.float64, device=device)
                power = 1 - exponent
                ranks = ((((rows + 1.0) ** power - 1) * uniform + 1) ** (1 / power)).to(torch.int64).clamp_(1, rows) - 1
                values.append(ranks * 2_654_435_761 % rows)
            else:
                places = (at[index] + torch.arange(count, device=device)) % len(trace)
                values.append(trace[places] % rows)
                at[index] = (at[index] + count) % len(trace)
        yield (KeyedJaggedTensor(keys=names, values=torch.cat(values), lengths=lengths),)


class _Statistics(CacheStatistics):  # type: ignore[misc]
    """A table's measured curve, in the form that TorchRec's planner takes."""

    def __init__(self, curve: MissCurve, rows: int, lookups: float) -> None:
        self._keys, self._rows = step_keys(curve, rows, lookups, Eviction.LRU), rows

    @property
    def expected_lookups(self) -> float:
        return self._keys.unique

    def expected_miss_rate(self, clf: float) -> float:
        return float(self._keys.misses(np.array([clf * self._rows]))[0])

    @property
    def cacheability(self) -> float:
        return float(np.mean([self.expected_miss_rate(part / 20) for part in range(1, 21)]))


def theirs(model: Model, request: PlanRequest, hbm: int) -> Any:
    """The best plan of TorchRec's planner: all of its proposers, all kernels, the measured statistics."""
    constraints = {}
    for table in request.tables:
        curve = table.access
        assert isinstance(curve, MissCurve)
        lookups = table.ids_per_sample * request.step.samples_per_rank
        constraints[table.name] = ParameterConstraints(
            compute_kernels=KERNELS,
            sharding_types=["table_wise", "row_wise"],
            pooling_factors=[table.ids_per_sample],
            cache_params=CacheParams(load_factor=0.2, stats=_Statistics(curve, table.rows, lookups)),
        )
    planner = EmbeddingShardingPlanner(
        topology=TorchRecTopology(world_size=1, compute_device="cuda", hbm_cap=hbm, ddr_cap=1 << 42),
        batch_size=request.step.samples_per_rank,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        proposer=[
            GreedyProposer(),
            GreedyProposer(use_depth=False),
            UniformProposer(),
            GridSearchProposer(),
            DynamicProgrammingProposer(),
            EmbeddingOffloadScaleupProposer(),
        ],
    )
    return planner.plan(model, sharders(Optimizer.ROWWISE_ADAGRAD))


def run(model: Model, placed: Any, job: Job, device: torch.device, trace: Any, warmup: int) -> dict[str, Any]:
    """Steps of a plan by the clock, and its HBM."""
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    parallel = DistributedModelParallel(
        model, env=env, device=device, plan=placed, sharders=sharders(Optimizer.ROWWISE_ADAGRAD)
    )
    found, peak = timed(parallel, batches(job, device, trace), device, warmup, 20)
    kernels: dict[str, int] = {}
    for parameters in placed.plan.values():
        for parameter in parameters.values():
            kernels[parameter.compute_kernel] = kernels.get(parameter.compute_kernel, 0) + 1
    return {f"{name}_ms": value * 1e3 for name, value in found.items()} | {
        "hbm_bytes": max(0, peak - before),
        "kernels": kernels,
    }


def compare(
    job: Job, share: float, device: torch.device, trace: Any, warmup: int, hardware: Any
) -> Iterator[dict[str, Any]]:
    """All plans of one job under one budget."""
    model = Model(job)
    statistics = KeyStatistics(model)
    source = batches(job, device, trace)
    for _ in range(120):
        statistics.observe(*next(source))
    tables = describe_model(model, optimizer=Optimizer.ROWWISE_ADAGRAD)
    topology = Topology(ranks=1, hbm_bytes=1 << 45, host_bytes=None)
    request = PlanRequest(
        tables=tables,
        topology=topology,
        hardware=hardware,
        runtime=Runtime.TORCHREC,
        step=Step(samples_per_rank=job.samples),
    )
    request, curves = with_statistics(request, statistics.gather())
    everything = plan(
        replace(request, tables=tuple(replace(t, modes=(Mode.HBM_ONLY,)) for t in request.tables)), split=False
    )
    hbm = int(everything.hbm.used_bytes * share)
    budgeted = replace(topology, hbm_bytes=hbm + everything.workspace_bytes)
    request = replace(request, topology=budgeted)
    begin = time.perf_counter()
    found = plan(request, split=False)
    seconds = time.perf_counter() - begin
    about = {"tables": len(job.rows), "hbm_budget_bytes": hbm, "hbm_share": share}
    about["worst_curve_error"] = max(curve.error for curve in curves.values())
    if found.status in (Status.OPTIMAL, Status.FEASIBLE):
        placed = sharding_plan(model, request, found, device=device.type)
        own = {"plan": "evenkeel", "planning_s": seconds, "predicted_ms": (found.seconds or 0) * 1e3}
        yield about | own | run(model, placed, job, device, trace, warmup)
    begin = time.perf_counter()
    try:
        placed = theirs(Model(job), request, hbm)
        own = {"plan": "torchrec", "planning_s": time.perf_counter() - begin}
        yield about | own | run(Model(job), placed, job, device, trace, warmup)
    except Exception as error:  # a planner that finds no plan is a result
        yield about | {"plan": "torchrec", "failed": str(error)[:300]}
    placed = sharding_plan(model, request, everything, device=device.type)
    for parameters in placed.plan.values():
        for parameter in parameters.values():
            parameter.compute_kernel = "fused_uvm_caching"
            parameter.cache_params = CacheParams(algorithm=CacheAlgorithm.LRU, load_factor=0.2)
    yield about | {"plan": "all cached at 0.2"} | run(Model(job), placed, job, device, trace, warmup)


def show(rows: list[dict[str, Any]]) -> None:
    """Print what was measured."""
    out = RichTable(title="ms a step on one GPU, under the same HBM")
    for heading in ("tables", "budget MiB", "plan", "ms", "predicted", "MiB in use", "kernels"):
        out.add_column(heading, justify="left" if heading in ("plan", "kernels") else "right")
    for row in rows:
        cells = [str(row["tables"]), f"{row['hbm_budget_bytes'] / 2**20:,.0f}", row["plan"]]
        if "failed" in row:
            out.add_row(*cells, "", "", "", row["failed"][:60])
            continue
        cells += [f"{row['in_a_row_ms']:.2f}", f"{row.get('predicted_ms', 0):.2f}", f"{row['hbm_bytes'] / 2**20:,.0f}"]
        out.add_row(*cells, ", ".join(f"{count} {kernel}" for kernel, count in row["kernels"].items()))
    Console(width=140).print(out)


def main(
    json_path: Annotated[Path, typer.Option("--json", help="Write the figures to this file.")],
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the way without GPUs.")] = "cuda",
    keys: Annotated[Path | None, typer.Option(help="A .npy file of integer keys in their order.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Hardware profile written by `evenkeel calibrate`.")] = None,
    gib: Annotated[float, typer.Option(help="Weights of all tables.")] = 6.0,
    samples: Annotated[int, typer.Option(help="Samples of a batch.")] = 8192,
    tables: Annotated[list[int] | None, typer.Option("--tables", help="Numbers of tables.")] = None,
    share: Annotated[list[float] | None, typer.Option("--share", help="HBM over what all tables take.")] = None,
    warmup: Annotated[int, typer.Option(help="Steps before the timed ones.")] = 120,
    seconds: Annotated[float, typer.Option(help="Begin no plan's steps after this time.")] = 230.0,
) -> None:
    """Plan and train every job under every budget."""
    begin = time.perf_counter()
    place = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    trace = None if keys is None else torch.from_numpy(np.load(keys).astype(np.int64)).to(place)
    hardware = "h200" if profile is None else parse_profile(json.loads(profile.read_text("utf-8")))
    rows: list[dict[str, Any]] = []
    for part in share or [0.5, 0.2]:
        for count in tables or [26, 60, 100]:
            if time.perf_counter() - begin > seconds:
                break
            try:
                for row in compare(job_of(count, gib, samples), part, place, trace, warmup, hardware):
                    rows.append(row)
                    json_path.write_text(json.dumps({"command": _COMMAND, "rows": rows}, indent=1) + "\n")
                    print(
                        f"{time.perf_counter() - begin:6.1f} s", {k: row[k] for k in row if k != "kernels"}, flush=True
                    )
                    gc.collect()
                    if device == "cuda":
                        torch.cuda.empty_cache()
                    if time.perf_counter() - begin > seconds:
                        break
            except Exception:  # the others are worth having
                traceback.print_exc()
    show(rows)
    dist.destroy_process_group()


_COMMAND = "torchrun --nproc-per-node 1 -m benchmarks.placement_gpu_plans --json FILE"

if __name__ == "__main__":
    typer.run(main)
