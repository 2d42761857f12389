"""Whole steps through DistributedModelParallel in many configurations, held against the planner's model.

torchrun --nproc-per-node 2 -m benchmarks.placement_gpu_steps --json steps.json
"""

from __future__ import annotations

import gc
import json
import statistics
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torchrec
import typer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.placement_gpu_model import EXPONENT, join_group, keys_of, sharders
from evenkeel.placement import Mode, Optimizer, PlanRequest, Runtime, Sharding, Step, Table, Topology, plan
from evenkeel.placement.access import power_law
from trainer_client.planning import describe_model, sharding_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Equal tables of a configuration.

    Attributes:
        count: Number of tables.
        rows: Rows of each.
        mode: Their mode.
        ratio: Fraction of the rows in HBM, of a cached table.
        dim: Width of an embedding.
        ids: Lookups of a sample and table.
        pooled: Whether lookups of a sample are added up.
        sharding: How they are spread over the ranks.
    """

    count: int
    rows: int
    mode: Mode = Mode.HBM_ONLY
    ratio: float = 0.0
    dim: int = 128
    ids: int = 1
    pooled: bool = True
    sharding: Sharding = Sharding.ROW_WISE


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What one step is made of.

    Attributes:
        name: What it is called.
        samples: Samples of a batch on a rank.
        parts: Its tables.
        optimizer: Fused optimizer of all tables.
    """

    name: str
    samples: int
    parts: tuple[Part, ...]
    optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD


def _one(name: str, samples: int, optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD, **part: Any) -> Configuration:
    return Configuration(name=name, samples=samples, parts=(Part(**part),), optimizer=optimizer)


_M = 1 << 20
_K = 1 << 10
_CACHED, _HOST, _SINGLE = Mode.CACHING, Mode.HOST_ONLY, Sharding.TABLE_WISE
_MIXED = (
    Part(count=4, rows=_M, ids=4),
    Part(count=4, rows=_M, mode=_CACHED, ratio=0.2, ids=4),
    Part(count=4, rows=_M, mode=_HOST, ids=1),
)

CONFIGURATIONS = (
    _one("hbm 4x1M", 8192, count=4, rows=_M, ids=1),
    _one("cached 4x2M 0.2", 4096, count=4, rows=2 * _M, mode=_CACHED, ratio=0.2, ids=8),
    _one("host 4x2M few", 2048, count=4, rows=2 * _M, mode=_HOST, ids=1),
    _one("hbm 4x1M 16", 8192, count=4, rows=_M, ids=16),
    _one("cached 4x2M 0.05", 4096, count=4, rows=2 * _M, mode=_CACHED, ratio=0.05, ids=8),
    _one("host 4x2M 8", 4096, count=4, rows=2 * _M, mode=_HOST, ids=8),
    _one("hbm 26x512k", 4096, count=26, rows=512 * _K, dim=64),
    _one("cached 26x256k 0.3", 8192, count=26, rows=256 * _K, mode=_CACHED, ratio=0.3, dim=64),
    _one("host 26x256k", 4096, count=26, rows=256 * _K, mode=_HOST, dim=64),
    Configuration(name="mixed", samples=8192, parts=_MIXED),
    _one("hbm 26x512k large", 32768, count=26, rows=512 * _K, dim=64),
    _one("cached 2x4M 0.25 32", 4096, count=2, rows=4 * _M, mode=_CACHED, ratio=0.25, ids=32),
    _one("host 2x4M 32", 4096, count=2, rows=4 * _M, mode=_HOST, ids=32),
    _one("hbm single 8x1M", 8192, count=8, rows=_M, ids=4, sharding=_SINGLE),
    _one("cached 4x2M 0.5", 4096, count=4, rows=2 * _M, mode=_CACHED, ratio=0.5, ids=8),
    _one("host 1x1M few", 1024, count=1, rows=_M, mode=_HOST),
    _one("hbm sequence 2x2M", 1024, count=2, rows=2 * _M, ids=50, pooled=False),
    _one("cached sequence 2x2M 0.3", 1024, count=2, rows=2 * _M, mode=_CACHED, ratio=0.3, ids=50, pooled=False),
    _one("host sequence 2x2M", 1024, count=2, rows=2 * _M, mode=_HOST, ids=50, pooled=False),
    _one("hbm 10x1M narrow", 4096, count=10, rows=_M, dim=32, ids=8),
    _one("cached single 8x1M 0.3", 8192, count=8, rows=_M, mode=_CACHED, ratio=0.3, ids=4, sharding=_SINGLE),
    _one("host single 8x1M", 4096, count=8, rows=_M, mode=_HOST, ids=2, sharding=_SINGLE),
    _one("hbm 100x64k", 4096, count=100, rows=64 * _K, dim=64),
    _one("cached 2x4M 0.05 32", 4096, count=2, rows=4 * _M, mode=_CACHED, ratio=0.05, ids=32),
    _one("host 4x1M narrow", 4096, count=4, rows=_M, mode=_HOST, dim=32, ids=4),
    _one("hbm 4x1M adam", 8192, Optimizer.ADAM, count=4, rows=_M, ids=8),
    _one("cached 26x256k 0.1", 4096, count=26, rows=256 * _K, mode=_CACHED, ratio=0.1, dim=64),
    _one("cached 4x1M 0.9", 4096, count=4, rows=_M, mode=_CACHED, ratio=0.9, ids=2),
    Configuration(
        name="mixed sequence",
        samples=2048,
        parts=(*_MIXED, Part(count=2, rows=2 * _M, mode=_CACHED, ratio=0.2, ids=20, pooled=False)),
    ),
    _one("cached 4x2M 0.02", 4096, count=4, rows=2 * _M, mode=_CACHED, ratio=0.02, ids=8),
    _one("hbm 2x4M 64", 8192, count=2, rows=4 * _M, ids=64),
    _one("host 2x4M 4", 16384, count=2, rows=4 * _M, mode=_HOST, ids=4),
)
"""In an order in which a first part tells something of everything; every other one is left out of a fit."""


class Model(torch.nn.Module):
    """The tables of a configuration: bags and sequences, and a loss over all of what they give."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        meta = torch.device("meta")
        bags: list[EmbeddingBagConfig] = []
        rows: list[EmbeddingConfig] = []
        for number, part in enumerate(configuration.parts):
            kind: Any = EmbeddingBagConfig if part.pooled else EmbeddingConfig
            own: Any = bags if part.pooled else rows
            for index in range(part.count):
                name = f"t{number}_{index}"
                own.append(
                    kind(name=name, embedding_dim=part.dim, num_embeddings=part.rows, feature_names=[f"f_{name}"])
                )
        self.bags = EmbeddingBagCollection(tables=bags, device=meta) if bags else None
        self.rows = EmbeddingCollection(tables=rows, device=meta) if rows else None

    def forward(self, bags: KeyedJaggedTensor | None, rows: KeyedJaggedTensor | None) -> torch.Tensor:
        """The mean of all embeddings."""
        found = []
        if self.bags is not None:
            found.append(self.bags(bags).values().mean())
        if self.rows is not None:
            found += [sequence.values().mean() for sequence in self.rows(rows).values()]
        return torch.stack(found).sum()


def request_of(configuration: Configuration, model: Model, ranks: int, hardware: Any = "h200") -> PlanRequest:
    """The request that describes the configuration, every table pinned to its mode."""
    parts = configuration.parts
    ids = {f"t{n}_{i}": float(part.ids) for n, part in enumerate(parts) for i in range(part.count)}
    tables = []
    for table in describe_model(model, optimizer=configuration.optimizer, ids_per_sample=ids):
        part = parts[int(table.name[1:].partition("_")[0])]
        tables.append(_placed(table, part))
    topology = Topology(ranks=ranks, hbm_bytes=1 << 45, host_bytes=None)
    step = Step(samples_per_rank=configuration.samples)
    return PlanRequest(tables=tuple(tables), topology=topology, hardware=hardware, runtime=Runtime.TORCHREC, step=step)


def _placed(table: Table, part: Part) -> Table:
    ratio = part.ratio if part.mode is Mode.CACHING else None
    access = power_law(EXPONENT, part.rows)
    return replace(table, modes=(part.mode,), ratio=ratio, sharding=part.sharding, access=access)


def batches(
    configuration: Configuration, device: torch.device
) -> Iterator[tuple[KeyedJaggedTensor | None, KeyedJaggedTensor | None]]:
    """Fresh keys in every step."""
    generator = torch.Generator(device).manual_seed(17 + dist.get_rank())
    samples = configuration.samples
    while True:
        halves: list[KeyedJaggedTensor | None] = []
        for pooled in (True, False):
            values, lengths, keys = [], [], []
            for number, part in enumerate(configuration.parts):
                if part.pooled is pooled:
                    count = part.count * samples * part.ids
                    values.append(keys_of(part.rows, count, generator))
                    lengths.append(torch.full((part.count * samples,), part.ids, device=device, dtype=torch.int32))
                    keys += [f"f_t{number}_{index}" for index in range(part.count)]
            joined = (
                KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=torch.cat(lengths)) if keys else None
            )
            halves.append(joined)
        yield halves[0], halves[1]


def measure(configuration: Configuration, device: torch.device, warmup: int, repeats: int) -> dict[str, Any]:
    """Train and time, steps one by one and back to back."""
    ranks = dist.get_world_size()
    model = Model(configuration)
    request = request_of(configuration, model, ranks)
    found = plan(request, split=False)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    begin = time.perf_counter()
    parallel = DistributedModelParallel(
        model,
        env=env,
        device=device,
        plan=sharding_plan(model, request, found, device=device.type),
        sharders=sharders(configuration.optimizer),
    )
    built = time.perf_counter() - begin
    cached = any(part.mode is Mode.CACHING for part in configuration.parts)
    own, peak = timed(parallel, batches(configuration, device), device, warmup if cached else 10, repeats)
    ranks_own: list[Any] = [None] * ranks
    dist.all_gather_object(ranks_own, own)
    return {
        "configuration": asdict(configuration),
        "predicted_ms": (found.seconds or 0.0) * 1e3,
        "measured_ms": max(each["in_a_row"] for each in ranks_own) * 1e3,
        **{f"{name}_ms": max(each[name] for each in ranks_own) * 1e3 for name in own if name != "in_a_row"},
        "peak_bytes": peak,
        "built_s": built,
    }


def timed(
    parallel: torch.nn.Module, source: Iterator[Any], device: torch.device, warmup: int, repeats: int
) -> tuple[dict[str, float], int]:
    """Seconds of a step of this rank, back to back, by itself, and of the host alone; and HBM at the peak of one."""
    cuda = device.type == "cuda"
    for turn in range(warmup):
        if cuda and turn == warmup // 2:
            torch.cuda.reset_peak_memory_stats()
        parallel(*next(source)).backward()
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    kept = [next(source) for _ in range(repeats)]
    single: dict[str, list[float]] = {"step": [], "forward": [], "launched": []}
    for batch in kept:
        _settle(cuda)
        start = time.perf_counter()
        loss = parallel(*batch)
        launched = time.perf_counter()
        _settle(cuda, barrier=False)
        middle = time.perf_counter()
        loss.backward()
        single["launched"].append(launched - start + time.perf_counter() - middle)
        _settle(cuda, barrier=False)
        single["step"].append(time.perf_counter() - start)
        single["forward"].append(middle - start)
    kept = [next(source) for _ in range(repeats)]
    _settle(cuda)
    start = time.perf_counter()
    for batch in kept:
        parallel(*batch).backward()
    _settle(cuda, barrier=False)
    in_a_row = (time.perf_counter() - start) / repeats
    return {name: statistics.median(times) for name, times in single.items()} | {"in_a_row": in_a_row}, peak


def _settle(cuda: bool, barrier: bool = True) -> None:
    if cuda:
        torch.cuda.synchronize()
    if barrier:
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()


def main(
    json_path: Annotated[Path, typer.Option("--json", help="Write the figures to this file.")],
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the way without GPUs.")] = "cuda",
    warmup: Annotated[int, typer.Option(help="Steps before the timed ones, where there are caches to fill.")] = 120,
    repeats: Annotated[int, typer.Option(help="Timed steps.")] = 20,
    seconds: Annotated[float, typer.Option(help="Begin no configuration after this time.")] = 230.0,
    only: Annotated[list[str] | None, typer.Option("--only", help="Configurations whose name contains this.")] = None,
) -> None:
    """Measure configurations one after the other, as many as there is time for."""
    begin = time.perf_counter()
    place = join_group(device)
    rows: list[dict[str, Any]] = []
    for configuration in CONFIGURATIONS:
        if only and not any(part in configuration.name for part in only):
            continue
        late = torch.tensor([float(time.perf_counter() - begin > seconds)], device=place)
        dist.all_reduce(late)
        if late.item():
            break
        try:
            rows.append(measure(configuration, place, warmup, repeats))
        except Exception:  # the others are worth having
            if dist.get_world_size() > 1:
                raise
            traceback.print_exc()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            if rows:
                last = rows[-1]
                print(
                    f"{time.perf_counter() - begin:6.1f} s  {last['configuration']['name']:28} predicted "
                    f"{last['predicted_ms']:7.2f}  measured {last['measured_ms']:7.2f}  one by one "
                    f"{last['step_ms']:7.2f}  launched {last['launched_ms']:7.2f}",
                    flush=True,
                )
            json_path.write_text(json.dumps(_about(device) | {"rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def _about(device: str) -> dict[str, Any]:
    import fbgemm_gpu

    return {
        "command": "torchrun --nproc-per-node N -m benchmarks.placement_gpu_steps --json FILE",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu: times mean nothing",
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "torchrec": torchrec.__version__,
        "fbgemm": fbgemm_gpu.__version__,
    }


if __name__ == "__main__":
    typer.run(main)
