"""Tables in training, timed: those of a plan, on all ranks of a group, with keys like a job's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count, cycle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from evenkeel.key_statistics import KeyTrace
from evenkeel.key_statistics.trace import unhashed
from evenkeel.placement import DataType, MissCurve, Optimizer, Plan, PlanRequest, Table, Zipf
from evenkeel.placement.access import popularity
from trainer_client.planning.applying import sharding_plan
from trainer_client.planning.collective import is_true_anywhere, on_all

_LEARNING_RATE = 0.01
_DENSE_WIDTH = {"cuda": 2048, "cpu": 256}
_PROFILED_STEPS = 16
_BLOCK_STEPS = 4
_SPREAD = 2_654_435_761
"""A prime by which keys come to be all over a table."""

Batch = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By table, the values and the (features * samples,) lengths of its features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Median times on the slowest rank, the same on all ranks.

    Attributes:
        step_s: Of a step, back to back with others and beside the dense work.
        host_s: Until the host has launched a step of the tables.
        kernels_s: Of the kernels of a step of the tables, exchanges apart; None on a CPU.
    """

    step_s: float
    host_s: float
    kernels_s: float | None


class TableModel(nn.Module):
    """The tables of a request, in collections as they are grouped there, and a loss over all that they give."""

    def __init__(self, request: PlanRequest, device: torch.device) -> None:
        """Makes the tables, to be sharded over devices of a kind, on none; optimizers are applied in backward."""
        from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from torchrec.types import DataType as TorchRecType

        super().__init__()
        types = {DataType.FLOAT32: TorchRecType.FP32, DataType.FLOAT16: TorchRecType.FP16}
        self.tables: dict[str, list[Table]] = {}
        for table in request.tables:
            kind = ("bags" if table.pooled else "rows") + ("_weighted" if table.weighted else "")
            self.tables.setdefault(f"{kind}_{table.group}".replace(".", "_"), []).append(table)
        self.collections = nn.ModuleDict()
        for name, tables in self.tables.items():
            pooled = tables[0].pooled
            config: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
            configs = [
                config(
                    name=table.name,
                    embedding_dim=table.dim,
                    num_embeddings=table.rows,
                    feature_names=_features(table),
                    data_type=types[table.data_type],
                )
                for table in tables
            ]
            made: Any = EmbeddingBagCollection if pooled else EmbeddingCollection
            weighted = {"is_weighted": tables[0].weighted} if pooled else {}
            self.collections[name] = made(configs, device=torch.device("meta"), **weighted)
            held: Any = getattr(self.collections[name], "embedding_bags" if pooled else "embeddings")
            for table in tables:
                options = {"lr": _LEARNING_RATE}
                apply_optimizer_in_backward(_optimizer(table.optimizer, device), held[table.name].parameters(), options)

    def keys(self, batch: Batch, device: torch.device) -> dict[str, Any]:
        """The keys of each collection on a device."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        result = {}
        for name, tables in self.tables.items():
            values = torch.cat([batch[table.name][0] for table in tables]).to(device)
            lengths = torch.cat([batch[table.name][1] for table in tables]).to(device)
            result[name] = KeyedJaggedTensor(
                keys=[feature for table in tables for feature in _features(table)],
                values=values,
                lengths=lengths,
                weights=torch.ones(len(values), device=device) if tables[0].weighted else None,
            )
        return result

    def forward(self, keys: dict[str, Any]) -> torch.Tensor:
        """The sum of the means of all embeddings."""
        parts = []
        for name, module in self.collections.items():
            embeddings = module(keys[name])
            pooled = self.tables[name][0].pooled
            parts += [each.values().mean() for each in ([embeddings] if pooled else embeddings.values())]
        return torch.stack(parts).sum()


def _features(table: Table) -> list[str]:
    return [f"{table.name}/{number}" for number in range(table.features)]


def _optimizer(optimizer: Optimizer, device: torch.device) -> Any:
    from torchrec.optim import RowWiseAdagrad

    if device.type == "cpu" and optimizer is Optimizer.ADAM:  # which FBGEMM has for GPUs only
        return RowWiseAdagrad
    return {
        Optimizer.SGD: torch.optim.SGD,
        Optimizer.ADAM: torch.optim.Adam,
        Optimizer.ADAGRAD: torch.optim.Adagrad,
        Optimizer.ROWWISE_ADAGRAD: RowWiseAdagrad,
    }[optimizer]


class DenseWork:
    """Products of matrices that take so long on a device, in place of the rest of a model."""

    def __init__(self, milliseconds: float, device: torch.device) -> None:
        """Finds how many products take so many milliseconds."""
        width = _DENSE_WIDTH[device.type]
        self._factor = torch.ones(width, width, device=device)
        self._product = torch.empty_like(self._factor)
        self._count = 0
        if milliseconds > 0:
            self._count = 8
            self.run()
            wait(device)
            begin = time.perf_counter()
            self.run()
            wait(device)
            self._count = max(1, round(milliseconds / 1e3 / ((time.perf_counter() - begin) / self._count)))

    def run(self) -> None:
        """Launches the work."""
        for _ in range(self._count):
            torch.mm(self._factor, self._factor, out=self._product)


class Trial:
    """The tables of a plan in training on all ranks of a group, which call its methods together.

    Attributes:
        parallel: The tables, sharded by the plan.
        dense: Work of every step beside the tables.
        steps: Seconds of a step, by block.
        launches: Seconds in which the host launched a step.
    """

    def __init__(
        self,
        request: PlanRequest,
        plan: Plan | Callable[[nn.Module], Any],
        batches: Iterable[Batch],
        device: torch.device,
        *,
        dense: DenseWork,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Shards the tables of a request by a plan, or by TorchRec's plan of a model; batches are used again."""
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.types import ShardingEnv

        self._model, self._batches = TableModel(request, device), cycle(batches)
        self._device, self._group = device, group
        self.dense, self.steps, self.launches = dense, list[float](), list[float]()
        ranks = group or dist.group.WORLD
        assert ranks is not None, "there is a process group"
        sharded = plan(self._model) if callable(plan) else sharding_plan(self._model, request, plan, device=device.type)
        env = ShardingEnv.from_process_group(ranks)
        self.parallel = DistributedModelParallel(self._model, env=env, device=device, plan=sharded)

    def run(self, seconds: float) -> None:
        """Trains for so long, a step at least, untimed: caches fill. Collective."""
        begin = time.perf_counter()
        for number in count():
            self._step(self._next())
            is_over = time.perf_counter() - begin > seconds
            if number % _BLOCK_STEPS == 0 and is_true_anywhere(is_over, self._group):
                break
        wait(self._device)

    def block(self, steps: int = _BLOCK_STEPS) -> None:
        """Times steps back to back, and the launch of one. Collective."""
        kept = [self._next() for _ in range(steps + 1)]
        self._settle()
        begin = time.perf_counter()
        for keys in kept[1:]:
            self._step(keys)
        wait(self._device)
        self.steps.append((time.perf_counter() - begin) / steps)
        self._settle()
        begin = time.perf_counter()
        self.parallel(kept[0]).backward()
        self.launches.append(time.perf_counter() - begin)
        wait(self._device)

    def timing(self) -> Timing:
        """What was measured, and the time of kernels, which is measured now. Collective."""
        medians = statistics.median(self.steps), statistics.median(self.launches), self._kernels()
        step, host, kernels = (max(column) for column in zip(*on_all(lambda: medians, self._group), strict=True))
        return Timing(step_s=step, host_s=host, kernels_s=kernels or None)

    def _kernels(self) -> float:
        """Seconds of the kernels and copies of a step of the tables, but for exchanges, which wait for other ranks."""
        if self._device.type != "cuda":
            return 0.0
        from torch.profiler import ProfilerActivity, profile

        kept = [self._next() for _ in range(_PROFILED_STEPS)]
        self._settle()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for keys in kept:
                self.parallel(keys).backward()
            wait(self._device)
        events = [event for event in profiled.key_averages() if "nccl" not in event.key.lower()]
        return float(sum(event.self_device_time_total for event in events)) / 1e6 / _PROFILED_STEPS

    def _next(self) -> dict[str, Any]:
        return self._model.keys(next(self._batches), self._device)

    def _step(self, keys: dict[str, Any]) -> None:
        loss = self.parallel(keys)
        self.dense.run()
        loss.backward()

    def _settle(self) -> None:
        wait(self._device)
        dist.barrier(group=self._group)
        wait(self._device)


def wait(device: torch.device) -> None:
    """Waits until a device has done all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def drawn_batches(
    request: PlanRequest, number: int = 64, *, traces: Mapping[str, KeyTrace] | None = None, seed: int = 0
) -> list[Batch]:
    """Keys of one rank: those that were traced, and of other tables drawn by their popularity.

    Of a traced step that is larger than a rank's, a part is taken; where a sample of the keys was followed, each stands
    for several. Keys of a table of which only a miss curve is known are drawn from a Zipf law.
    """
    draw = np.random.default_rng(seed)
    batches: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in range(number)]
    samples = request.step.samples_per_rank
    for table in request.tables:
        cells = samples * table.features
        trace = (traces or {}).get(table.name)
        for step, batch in enumerate(batches):
            wanted = round(table.ids_per_sample * samples)
            keys = _drawn(table, wanted, draw) if trace is None else _replayed(trace, table, wanted, step, draw)
            lengths = np.full(cells, len(keys) // cells)
            lengths[draw.permutation(cells)[: len(keys) % cells]] += 1
            batch[table.name] = torch.from_numpy(keys), torch.from_numpy(lengths)
    return list(batches)


def _drawn(table: Table, count: int, draw: np.random.Generator) -> Any:
    law = popularity(Zipf() if isinstance(table.access, MissCurve) else table.access, table.rows)
    ends = np.cumsum(law.keys)
    bins = draw.choice(len(law.keys), count, p=law.keys * law.probability / (law.keys @ law.probability))
    ranks = (ends[bins] - draw.random(count) * law.keys[bins]).astype(np.int64)
    return np.clip(ranks, 0, table.rows - 1) * _SPREAD % table.rows


def _replayed(trace: KeyTrace, table: Table, count: int, number: int, draw: np.random.Generator) -> Any:
    low, high = np.searchsorted(trace.step, [number % trace.steps, number % trace.steps + 1])
    keys = np.repeat(unhashed(trace.key[low:high]), trace.times[low:high])
    if not len(keys):
        return keys
    keys = draw.permutation(np.resize(keys, max(count, len(keys))))[:count]
    several = draw.integers(0, max(1, round(1 / trace.share)), len(keys))
    return (keys + several * _SPREAD) % table.rows
