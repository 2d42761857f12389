"""What a machine takes for embedding tables: random gathers, kernels by themselves, and the host's part."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from evenkeel.placement import Mode, Sharding, plan
from evenkeel.placement.calibration import StepSample, TablePart, request_of
from evenkeel.placement.fields import encode
from trainer_client.planning.collective import process_group
from trainer_client.planning.machine import hbm_bytes
from trainer_client.planning.trial import DenseWork, Trial, drawn_batches, wait

ROW_BYTES = (128, 512, 2048)
_K, _M = 1 << 10, 1 << 20
_BLOCKS = 5
_GATHER_S = 0.2
_TWO = TablePart(count=2, rows=4 * _M, dim=128, ids=32, pooled=False)
_BAGS = TablePart(count=4, rows=256 * _K, dim=64)
_ROWS = TablePart(count=2, rows=256 * _K, dim=64, ids=10, pooled=False)


def _cached(part: TablePart) -> TablePart:
    return replace(part, rows=_M, mode=Mode.CACHING, ratio=0.3)


def _sample(name: str, samples: int, *parts: TablePart) -> StepSample:
    return StepSample(name=name, samples=samples, parts=parts)


KERNELS = tuple(
    _sample(f"{mode.value} {ratio:g}", 8192, replace(_TWO, mode=mode, ratio=ratio))
    for mode, ratio in (
        (Mode.HBM_ONLY, 1.0),
        (Mode.HOST_ONLY, 0.0),
        *((Mode.CACHING, ratio) for ratio in (0.5, 0.25, 0.1, 0.05, 0.02)),
    )
)
"""Two tables each way on one GPU: their kernels tell rows, misses and rows of host memory apart."""
STEPS = (
    _sample("small", 1024, _BAGS),
    _sample("many tables", 1024, replace(_BAGS, count=120, rows=16 * _K)),
    _sample("cached", 4096, replace(_cached(_BAGS), ids=2)),
    _sample("in host memory", 2048, replace(_BAGS, rows=_M, mode=Mode.HOST_ONLY)),
    _sample("two pooled exchanges", 1024, _BAGS, replace(_BAGS, count=6, sharding=Sharding.TABLE_WISE)),
    _sample("two exchanges", 1024, _BAGS, _ROWS),
    _sample("three exchanges", 1024, _BAGS, replace(_BAGS, count=6, sharding=Sharding.TABLE_WISE), _ROWS),
    _sample("two cached exchanges", 2048, _cached(_BAGS), _cached(_ROWS)),
    _sample("many samples", 65_536, replace(_BAGS, count=20)),
    _sample("long sequences", 4096, replace(_ROWS, dim=128, ids=100)),
    _sample("many lookups", 16_384, replace(_BAGS, rows=2 * _M, dim=128, ids=40)),
)
"""Whole steps, whose launches and exchanges differ: they tell the host's part and that of exchanges."""


class _HostRows:
    """Pinned host memory seen as memory of the device, for a kernel to gather from."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self._pinned = pinned
        data = (pinned.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": tuple(pinned.shape), "typestr": "<f4", "data": data, "version": 3}


def gather_rates(device: torch.device, *, from_host: bool, table_bytes: int) -> Iterator[tuple[int, float]]:
    """Row bytes and bytes per second of random-row gathers, for each row width."""
    count = min(_M, max(256, table_bytes >> 13))
    for row_bytes in ROW_BYTES:
        rows, width = table_bytes // row_bytes, row_bytes // 4
        pinned = from_host and device.type == "cuda"
        source = torch.zeros(rows, width, device="cpu" if pinned else device, pin_memory=pinned)
        source = torch.as_tensor(_HostRows(source), device=device) if pinned else source
        chosen = cycle([torch.randint(0, rows, (count,), device=device) for _ in range(4)])
        given = {"torch": torch, "source": source, "chosen": chosen, "out": torch.empty(count, width, device=device)}
        timer = Timer("torch.index_select(source, 0, next(chosen), out=out)", globals=given)
        yield row_bytes, count * row_bytes / timer.blocked_autorange(min_run_time=_GATHER_S).median


def measure(device: torch.device, *, table_bytes: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Gathers and, on a GPU with TorchRec, kernels by themselves, as plain values."""
    cuda = device.type == "cuda"
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU",
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hbm_bytes": hbm_bytes(device),
    }
    for name, from_host in (("hbm_gather", False), ("host_gather", True)):
        progress(f"random gathers, {name}")
        result[name] = list(gather_rates(device, from_host=from_host, table_bytes=table_bytes))
    result["kernels"] = {}
    if cuda and can_measure_steps():
        progress("kernels")
        with process_group(device):
            records = measure_steps(KERNELS, torch.device("cuda", torch.cuda.current_device()))
        result["kernels"]["torchrec"] = [_of_one(record) for record in records]
    if cuda:
        torch.cuda.empty_cache()
    return result


def _of_one(record: dict[str, Any]) -> dict[str, Any]:
    """A step of equal tables on one GPU, with the time of its kernels alone; lookups are those of a whole batch."""
    (part,) = record["parts"]
    seconds, ids = record["kernels_s"], part["ids"] * record["samples"]
    return {**part, "seconds": seconds, "optimizer": record["optimizer"], "tables": part["count"], "ids": ids}


def measure_steps(samples: Sequence[StepSample], device: torch.device, *, seconds: float = 6.0) -> list[dict[str, Any]]:
    """Trains and times each sample on the ranks of the process group: each rank gets the same records."""
    records = []
    for sample in (replace(each, ranks=dist.get_world_size()) for each in samples):
        request = request_of(sample)
        batches = drawn_batches(request, seed=dist.get_rank())
        trial = Trial(request, plan(request), batches, device, dense=DenseWork(0.0, device))
        cached = any(part.mode is Mode.CACHING for part in sample.parts)
        trial.run(seconds if cached else seconds / 10)
        for _ in range(_BLOCKS):
            trial.block()
        timing = trial.timing()
        record: dict[str, Any] = encode(replace(sample, seconds=timing.step_s, kernels_s=timing.kernels_s))
        records.append(record | {"host_s": timing.host_s})
        del trial
        gc.collect()
        wait(device)
    return records


def scaled(samples: Sequence[StepSample], scale: float) -> list[StepSample]:
    """The same with fewer rows and samples, to try the way."""

    def smaller(part: TablePart) -> TablePart:
        return replace(part, rows=max(512, int(part.rows * scale)))

    return [
        replace(s, samples=max(8, int(s.samples * scale)), parts=tuple(map(smaller, s.parts))) if scale < 1 else s
        for s in samples
    ]


def measure_whole_steps(device: torch.device, scale: float) -> list[dict[str, Any]]:
    """Records of `STEPS`, made smaller by a scale, on the ranks of the process group."""
    return measure_steps(scaled(STEPS, scale), device, seconds=6.0 if scale >= 1 else 0.2)


def can_measure_steps() -> bool:
    """Whether TorchRec is installed here."""
    try:
        import torchrec  # noqa: F401
    except (ImportError, OSError):
        return False
    return True
