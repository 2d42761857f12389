"""What a machine takes for the work of embedding tables: random gathers, the link, launches, and FBGEMM's kernels.

Needs nothing but torch (and FBGEMM for its kernels), so that it also runs by itself where Evenkeel is not installed:

    python trainer_client/planning/measuring.py --json raw.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import torch

ROW_BYTES = (128, 512, 2048)
EXPONENT = 1.05


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int, warmup: int = 3) -> float:
    """Median time of `work`, in seconds, by events on CUDA and by the clock on the CPU."""
    times = []
    for turn in range(warmup + repeats):
        if device.type == "cuda":
            make: Any = torch.cuda.Event
            begin, end = make(enable_timing=True), make(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            elapsed = float(begin.elapsed_time(end)) / 1e3
        else:
            start = time.perf_counter()
            work()
            elapsed = time.perf_counter() - start
        if turn >= warmup:
            times.append(elapsed)
    return statistics.median(times)


class _HostRows:
    """Pinned host memory seen as memory of the device, for a kernel to gather from."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self._pinned = pinned
        shape = tuple(pinned.shape)
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (pinned.data_ptr(), False),
            "version": 3,
        }


def gather_rates(
    device: torch.device, *, from_host: bool, table_bytes: int, gathered_rows: int, repeats: int
) -> Iterator[tuple[int, float]]:
    """Row bytes and bytes per second of random-row gathers, for each row width."""
    for row_bytes in ROW_BYTES:
        width = row_bytes // 4
        rows = table_bytes // row_bytes
        if from_host and device.type == "cuda":
            pinned = torch.zeros((rows, width), dtype=torch.float32, device="cpu", pin_memory=True)
            source = torch.as_tensor(_HostRows(pinned), device=device)
        else:
            source = torch.zeros((rows, width), dtype=torch.float32, device=device)
        chosen = [torch.randint(0, rows, (gathered_rows,), device=device) for _ in range(4)]
        out = torch.empty((gathered_rows, width), dtype=torch.float32, device=device)
        turn = iter(range(10**9))

        def work(
            source: torch.Tensor = source,
            chosen: list[torch.Tensor] = chosen,
            out: torch.Tensor = out,
            turn: Iterator[int] = turn,
        ) -> None:
            torch.index_select(source, 0, chosen[next(turn) % 4], out=out)

        yield row_bytes, gathered_rows * row_bytes / median_seconds(work, device, repeats)
        del source, out, chosen


def copy_rate(device: torch.device, size: int, repeats: int) -> float:
    """Bytes per second of a copy from host memory."""
    host = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    return size / median_seconds(lambda: there.copy_(host, non_blocking=True), device, repeats)


def launch_seconds(device: torch.device) -> float:
    """Time of one small kernel among many."""
    cell = torch.zeros(1, device=device)

    def many() -> None:
        for _ in range(200):
            cell.add_(1)

    return median_seconds(many, device, 5) / 200


def power_law_keys(rows: int, count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Keys from the integer parts of a power law on [1, rows], permuted over the rows."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64, device=generator.device)
    last = float(rows + 1) ** (1 - EXPONENT)
    keys = ((last - 1) * uniform + 1) ** (1 / (1 - EXPONENT))
    ranks = keys.to(torch.int64).clamp_(1, rows) - 1
    permuted: torch.Tensor = ranks * 2_654_435_761 % rows
    return permuted.to(device)


def fbgemm_steps(device: torch.device, *, rows: int, dim: int, ids: int, warmup: int) -> list[dict[str, Any]]:
    """Time and memory of steps of FBGEMM's training kernels: FUSED, FUSED_UVM_CACHING, FUSED_UVM."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm, EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables, records, repeats = 2, [], 24
    # Fresh keys in every step: a few batches in turn would soon all be in the cache.
    batches = [
        torch.cat([power_law_keys(rows, ids, 2 * seed + table, device) for table in range(tables)])
        for seed in range(warmup + repeats)
    ]
    offsets = torch.arange(tables * ids + 1, device=device)
    gradient = torch.ones(tables * ids, dim, device=device)
    cases = [("HBM_ONLY", 1.0), ("HOST_ONLY", 0.0), *(("CACHING", r) for r in (0.5, 0.25, 0.1, 0.05, 0.02))]
    places = {
        "HBM_ONLY": EmbeddingLocation.DEVICE,
        "CACHING": EmbeddingLocation.MANAGED_CACHING,
        "HOST_ONLY": EmbeddingLocation.MANAGED,
    }
    for mode, ratio in cases:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, places[mode], ComputeDevice.CUDA)] * tables,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            pooling_mode=PoolingMode.NONE,
            cache_algorithm=CacheAlgorithm.LRU,
            cache_load_factor=ratio or 0.1,
            learning_rate=0.01,
            device=device,
        )
        held = torch.cuda.memory_allocated() - before
        turn = iter(range(10**9))

        def step(kernel: Any = kernel, turn: Iterator[int] = turn) -> None:
            keys = batches[next(turn) % len(batches)]
            kernel(keys, offsets).backward(gradient)

        torch.cuda.reset_peak_memory_stats()
        seconds = median_seconds(step, device, repeats, warmup if mode == "CACHING" else 10)
        records.append(
            {"mode": mode, "ratio": ratio, "seconds": seconds, "tables": tables, "rows": rows, "dim": dim, "ids": ids,
             "optimizer": "rowwise_adagrad", "table_bytes": held,
             "peak_bytes": torch.cuda.max_memory_allocated() - before}
        )  # fmt: skip
        print(f"{mode} {ratio:g}: {seconds * 1e3:.3f} ms, {held / 2**20:,.0f} MiB", flush=True)
        del kernel, step
    return records


def measure(
    device_name: str = "cuda",
    *,
    table_bytes: int = 4 << 30,
    gathered_rows: int = 1 << 20,
    repeats: int = 15,
    kernels: bool = True,
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """All measurements, as plain values.

    Args:
        device_name: `cuda`, or `cpu` to try the way without a GPU.
        table_bytes: Size of the table that gathers are from; well above the caches.
        gathered_rows: Rows of a gather.
        repeats: Timed repetitions, of which the median counts.
        kernels: Whether to measure FBGEMM's kernels where they are installed.
        progress: Told what is being measured.
    """
    device = torch.device(device_name)
    cuda = device.type == "cuda"
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU",
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hbm_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else 0,
    }
    for name, from_host in (("hbm_gather", False), ("host_gather", True)):
        progress(f"random gathers, {name}")
        rates = gather_rates(
            device, from_host=from_host, table_bytes=table_bytes, gathered_rows=gathered_rows, repeats=repeats
        )
        result[name] = [list(pair) for pair in rates]
    progress("copies and launches")
    result["link_bytes_per_s"] = copy_rate(device, table_bytes // 4, repeats)
    result["launch_s"] = launch_seconds(device)
    result["kernels"] = {}
    if cuda and kernels:
        try:
            import fbgemm_gpu  # noqa: F401
        except (ImportError, OSError) as error:
            progress(f"FBGEMM's kernels are left out: {error}")
        else:
            progress("FBGEMM's kernels")
            result["kernels"]["torchrec"] = fbgemm_steps(device, rows=4_000_000, dim=128, ids=262_144, warmup=120)
    return result


def main() -> None:
    """Measure and write the raw figures."""
    parser = argparse.ArgumentParser(description="Measure what embedding tables cost on this machine.")
    parser.add_argument("--json", required=True, help="file to write")
    parser.add_argument("--device", default="cuda")
    chosen = parser.parse_args()
    with open(chosen.json, "w") as file:
        json.dump(measure(chosen.device), file, indent=1)


if __name__ == "__main__":
    main()
