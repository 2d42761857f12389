"""What a plan is worth: each planner's plan and a fixed one in the same real HBM, by the clock of one GPU.

torchrun --nproc-per-node 1 -m benchmarks.placement_gpu_plans --json plans.json
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table as RichTable
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.key_files import read_keys
from benchmarks.peers.checkouts import TorchEasyRec, load_torcheasyrec
from benchmarks.placement_gpu_keys import Job, batches, job_of, traced_job
from benchmarks.placement_gpu_model import sharders
from benchmarks.placement_gpu_planners import (
    Planner,
    Try,
    all_cached,
    fit_to_budget,
    kernels_of,
    ours,
    predicted_seconds,
    torcheasyrecs,
    torchrecs,
)
from evenkeel.placement import Mode, Optimizer, PlanRequest, Runtime, Step, Topology, plan
from evenkeel.placement.hardware import parse_profile
from trainer_client.planning import KeyStatistics, describe_model, with_statistics

OBSERVED, WARMUP, REPEATS, BLOCKS = 120, 120, 20, 3
HBM_STEPS = 6
"""Steps after which the HBM that a plan takes is read: its peak does not grow any more."""
STEPS = WARMUP + BLOCKS * (REPEATS + 2) + HBM_STEPS


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


@dataclass(slots=True)
class Running:
    """A plan's model in training.

    Attributes:
        parallel: The model.
        placed: Its `ShardingPlan`.
        pool: Batches, in their order; every plan trains the same ones.
        trained: Batches trained.
    """

    parallel: Any
    placed: Any
    pool: list[KeyedJaggedTensor]
    trained: int = 0

    def steps(self, count: int) -> None:
        """Trains the next batches."""
        for _ in range(count):
            self.parallel(self.pool[self.trained % len(self.pool)]).backward()
            self.trained += 1


def attempt(planner: Planner, job: Job, device: torch.device, pool: list[KeyedJaggedTensor], hbm: int) -> Try:
    """Asks for a plan, builds its model, and reads what a step of it takes."""
    cuda = device.type == "cuda"
    release(device)
    model = Model(job)
    placed = planner(Model(job), hbm)
    if placed is None:
        return Try(hbm, None)
    before = torch.cuda.memory_allocated() if cuda else 0
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    parallel = DistributedModelParallel(
        model, env=env, device=device, plan=placed, sharders=sharders(Optimizer.ROWWISE_ADAGRAD)
    )
    running = Running(parallel, placed, pool)
    running.steps(HBM_STEPS // 2)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    running.steps(HBM_STEPS // 2)
    if cuda:
        torch.cuda.synchronize()
    # Without a GPU there is nothing to read, and every plan counts as one that just fits.
    return Try(hbm, torch.cuda.max_memory_allocated() - before if cuda else hbm, running)


def release(device: torch.device) -> None:
    """Frees what nothing refers to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def clocked(running: dict[str, Running], device: torch.device) -> dict[str, list[float]]:
    """Milliseconds a step of each plan, by block; blocks of the plans take turns, so that a slow while hits all."""
    times: dict[str, list[float]] = {name: [] for name in running}
    for block in range(BLOCKS):
        for name, own in running.items():
            own.steps(WARMUP if block == 0 else 2)
            _wait(device)
            begin = time.perf_counter()
            own.steps(REPEATS)
            _wait(device)
            times[name].append((time.perf_counter() - begin) / REPEATS * 1e3)
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def observed_request(job: Job, pool: list[KeyedJaggedTensor], hardware: Any) -> tuple[PlanRequest, float]:
    """What all planners are told of the tables, and how far the curves in it are off at the worst."""
    model = Model(job)
    collector = KeyStatistics(model)
    for batch in pool[:OBSERVED]:
        collector.observe(batch)
    request = PlanRequest(
        tables=describe_model(model, optimizer=Optimizer.ROWWISE_ADAGRAD),
        topology=Topology(ranks=1, hbm_bytes=1 << 45, host_bytes=None),
        hardware=hardware,
        runtime=Runtime.TORCHREC,
        step=Step(samples_per_rank=job.samples),
    )
    request, curves = with_statistics(request, collector.gather())
    return request, max(curve.error for curve in curves.values())


def compare(
    job: Job,
    request: PlanRequest,
    share: float,
    device: torch.device,
    pool: list[KeyedJaggedTensor],
    peer: TorchEasyRec | None,
) -> list[dict[str, Any]]:
    """All planners on one job, each with as much of the same HBM as its plans can be made to take."""
    pinned = tuple(replace(table, modes=(Mode.HBM_ONLY,)) for table in request.tables)
    budget = int(plan(replace(request, tables=pinned), split=False).hbm.used_bytes * share)
    planners = {"evenkeel": ours(request, device.type), "torchrec": torchrecs(request, device.type)}
    if peer is not None:
        planners["torcheasyrec"] = torcheasyrecs(request, peer, device.type)
    planners["all cached alike"] = all_cached(request, device.type)
    about = {"tables": len(job.rows), "hbm_budget_bytes": budget, "hbm_share": share}
    rows: dict[str, dict[str, Any]] = {}
    running: dict[str, Running] = {}
    for name, planner in planners.items():
        tried: list[dict[str, Any]] = []

        def ask(hbm: int, planner: Planner = planner, tried: list[dict[str, Any]] = tried) -> Try:
            begin = time.perf_counter()
            found = attempt(planner, job, device, pool, hbm)
            tried.append({"asked": hbm, "used": found.used, "seconds": time.perf_counter() - begin})
            return found

        try:
            best = fit_to_budget(ask, budget)
        except Exception as error:  # a planner whose plan does not run is a result; the others are worth having
            traceback.print_exc()
            rows[name] = about | {"plan": name, "failed": f"{type(error).__name__}: {error}"[:300], "tried": tried}
            continue
        if best is None:
            rows[name] = about | {"plan": name, "failed": "no plan within the budget", "tried": tried}
            continue
        running[name] = best.built
        seconds = predicted_seconds(request, best.built.placed)
        rows[name] = about | {
            "plan": name,
            "asked_bytes": best.asked,
            "hbm_bytes": best.used,
            "predicted_ms": None if seconds is None else seconds * 1e3,
            "kernels": kernels_of(best.built.placed),
            "tried": tried,
        }
    for name, times in clocked(running, device).items():
        rows[name] |= {"ms": statistics.median(times), "blocks_ms": times}
    running.clear()
    release(device)
    return list(rows.values())


def show(rows: list[dict[str, Any]]) -> None:
    """Print what was measured."""
    out = RichTable(title="ms a step on one GPU, in the same real HBM")
    for heading in ("tables", "budget MiB", "plan", "ms", "predicted", "MiB in use", "kernels"):
        out.add_column(heading, justify="left" if heading in ("plan", "kernels") else "right")
    for row in rows:
        cells = [str(row["tables"]), f"{row['hbm_budget_bytes'] / 2**20:,.0f}", row["plan"]]
        if "failed" in row:
            out.add_row(*cells, "", "", "", row["failed"][:60])
            continue
        cells += [f"{row['ms']:.2f}", f"{row['predicted_ms'] or 0:.2f}", f"{row['hbm_bytes'] / 2**20:,.0f}"]
        out.add_row(*cells, ", ".join(f"{count} {kernel}" for kernel, count in row["kernels"].items()))
    Console(width=140).print(out)


def main(
    json_path: Annotated[Path, typer.Option("--json", help="Write the figures to this file.")],
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the way without GPUs.")] = "cuda",
    keys: Annotated[
        list[Path] | None, typer.Option(help="Keys in their order, .npy or text; tables take turns.")
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Hardware profile written by `evenkeel calibrate`.")] = None,
    torcheasyrec: Annotated[Path | None, typer.Option(help="Checkout of TorchEasyRec, its protocol generated.")] = None,
    gib: Annotated[float, typer.Option(help="Weights of all tables, without --keys.")] = 6.0,
    samples: Annotated[int, typer.Option(help="Samples of a batch.")] = 8192,
    tables: Annotated[list[int] | None, typer.Option("--tables", help="Numbers of tables.")] = None,
    share: Annotated[list[float] | None, typer.Option("--share", help="HBM over what all tables take.")] = None,
    seconds: Annotated[float, typer.Option(help="Begin no budget after this time.")] = 230.0,
) -> None:
    """Plan and train every job under every budget."""
    begin = time.perf_counter()
    place = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    peer = None if torcheasyrec is None else load_torcheasyrec(torcheasyrec)
    traces = [read_keys(path) for path in keys or []]
    hardware = "h200" if profile is None else parse_profile(json.loads(profile.read_text("utf-8")))
    about = {
        "command": _COMMAND,
        "peer": None if peer is None else peer.checkout.describe(),
        "traces": [path.name for path in keys or []],
    }
    rows: list[dict[str, Any]] = []
    for count in tables or [100, 60, 26]:
        job = traced_job(count, samples, STEPS, traces) if traces else job_of(count, gib, samples)
        source = batches(job, place)
        pool = [next(source) for _ in range(STEPS)]
        request, error = observed_request(job, pool, hardware)
        for part in share or [0.2, 0.5]:
            if time.perf_counter() - begin > seconds:
                break
            rows += [row | {"worst_curve_error": error} for row in compare(job, request, part, place, pool, peer)]
            json_path.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
            print(f"{time.perf_counter() - begin:6.1f} s: {count} tables, {part:g} of their HBM", flush=True)
        del pool, source
        release(place)
    show(rows)
    dist.destroy_process_group()


_COMMAND = "torchrun --nproc-per-node 1 -m benchmarks.placement_gpu_plans --json FILE"

if __name__ == "__main__":
    typer.run(main)
