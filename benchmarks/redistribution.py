"""Time of redistribution against the backend's own All2All of the same bytes.

    python -m benchmarks.redistribution --ranks 8 --json benchmarks/results/redistribution_8xh200.json
    python -m benchmarks.redistribution --check            # results compared with the reference gather, bit by bit
    python -m benchmarks.redistribution --quick

It starts its ranks itself, with NCCL where there are GPUs enough and Gloo otherwise.
Columns, medians over repeats of the slowest rank, in ms: `ours` its All2All with packing and unpacking; `All2All` one
All2All of the packed bytes from and into buffers at hand, the floor; `host` how long the host is busy to start ours. On
GPUs the device's work is queued behind a wait, so that `ours` and `All2All` are times of the device; `call` is host and
device together, from an idle device. `bare host` and `bare call` are those of the bare All2All.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.gpus import own_gpu
from benchmarks.harness.results import write
from benchmarks.redistribution_check import check
from evenkeel.partitioning import Slice, partition, slice_plan
from trainer_client.balancing.batches import BatchSpec, FlatBatch, flatten
from trainer_client.balancing.redistribution import start, warm_up
from trainer_client.balancing.redistribution.copies import WHOLE, FieldTable
from trainer_client.balancing.redistribution.layout import measure

WAIT_CYCLES = 20_000_000  # about 10 ms: longer than the host takes to queue one redistribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Samples per rank, jagged features and their mean length; every case has four dense fields besides."""

    samples: int
    features: int
    mean_length: int = 600


CASES = [
    Case(samples=8, features=1),
    Case(samples=32, features=1),
    Case(samples=32, features=5),
    Case(samples=128, features=5),
    Case(samples=128, features=20),
    Case(samples=512, features=20),
    Case(samples=512, features=20, mean_length=2400),
]
QUICK = [Case(samples=32, features=1), Case(samples=128, features=5), Case(samples=128, features=20)]


def make_batch(case: Case, rank: int, seed: int = 0) -> FlatBatch:
    """Log-normal histories of item ids, and dense fields of four dtypes."""
    rng = np.random.default_rng(1000 * seed + rank)
    n = case.samples
    lengths = np.clip(rng.lognormal(np.log(case.mean_length) - 0.5, 1.0, n), 1, 8 * case.mean_length).astype(np.int64)
    total = int(lengths.sum())
    batch: dict[str, Any] = {"length": torch.from_numpy(lengths)}
    for feature in range(case.features):
        batch[f"history{feature}"] = torch.from_numpy(rng.integers(0, 2**40, total))
    batch["label"] = torch.from_numpy(rng.random((n, 8), dtype=np.float32)).bfloat16()
    batch["embedding"] = torch.from_numpy(rng.random((n, 64), dtype=np.float32))
    batch["flag"] = torch.from_numpy(rng.integers(0, 2, n).astype(bool))
    return flatten(batch, BatchSpec(rows_per_sample={"history*": "length"}))


def plan(batches: list[FlatBatch], strategy: str) -> tuple[NDArray[np.int32], list[Slice]]:
    """Destinations of all samples and all ranks' slices."""
    counts = [batch.num_samples for batch in batches]
    homes = np.repeat(np.arange(len(batches), dtype=np.int32), counts)
    if strategy == "shuffle":
        destinations = np.random.default_rng(7).permutation(homes)
    else:
        length = np.concatenate([batch.lengths[:, 0] for batch in batches]).astype(np.float64)
        destinations = partition(length + length**2 / 5120, homes, len(batches), strategy=strategy).destinations
    slices = slice_plan(destinations, counts, np.concatenate([batch.lengths for batch in batches]))
    return destinations, [slices[rank] for rank in range(len(slices))]


class Clock:
    """Measures on whatever device the ranks use; results are those of the slowest rank."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device = device
        self._repeats = repeats

    def total(self, call: Callable[[], object]) -> float:
        """Milliseconds from an idle start to the end of the work."""
        times = []
        for _ in range(self._repeats + 2):
            self.meet()
            began = time.perf_counter()
            call()
            self._finish()
            times.append(1000 * (time.perf_counter() - began))
        return self._slowest(times[2:])

    def device_and_host(self, call: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds of the device's work, and for which the host was busy to queue it."""
        if self._device.type == "cpu":
            return self.total(call), float("nan")
        times, hosts = [], []
        for _ in range(self._repeats + 2):
            self.meet()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(WAIT_CYCLES)  # type: ignore[no-untyped-call]
            first.record()
            began = time.perf_counter()
            call()
            hosts.append(1000 * (time.perf_counter() - began))
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last))
        return self._slowest(times[2:]), self._slowest(hosts[2:])

    def meet(self) -> None:
        """Waits until all ranks and their devices are idle."""
        self._finish()
        dist.barrier()
        self._finish()

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _slowest(self, times: list[float]) -> float:
        value = torch.tensor([statistics.median(times)], dtype=torch.float64, device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value.item())


class PackedBytes:
    """One All2All of as many bytes as a redistribution sends, between buffers that are there: what no way can beat."""

    def __init__(self, flat: FlatBatch, piece: Slice, group: dist.ProcessGroup | None) -> None:
        fields = FieldTable.of(flat.structure.leaves, 4 * flat.num_jagged)
        amounts = measure(piece, flat.lengths, fields, dist.get_world_size(group), WHOLE)
        self._in, self._out = amounts.received_bytes.tolist(), amounts.sent_bytes.tolist()
        self._group = group
        self._sent = torch.ones(sum(self._out), dtype=torch.uint8, device=flat.device)
        self._received = torch.empty(sum(self._in), dtype=torch.uint8, device=flat.device)

    def run(self) -> None:
        """Sends and receives once."""
        dist.all_to_all_single(self._received, self._sent, self._in, self._out, group=self._group)


def measure_case(case: Case, strategy: str, device: torch.device, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    batches = [make_batch(case, home) for home in range(world_size)]
    destinations, pieces = plan(batches, strategy)
    homes = np.repeat(np.arange(world_size), case.samples)
    sizes = np.concatenate([batch.sizes for batch in batches])
    moved = np.bincount(homes, weights=sizes * (destinations != homes), minlength=world_size)
    own, piece = batches[rank].to(device), pieces[rank]
    clock = Clock(device, repeats)

    def ours() -> FlatBatch:
        return start(own, piece, group=group).wait()

    raw = PackedBytes(own, piece, group)
    ours_ms, host_ms = clock.device_and_host(ours)
    raw_ms, raw_host_ms = clock.device_and_host(raw.run)
    return asdict(case) | {
        "strategy": strategy, "mib_held": float(sizes.sum()) / world_size / 2**20,
        "mib_sent": float(moved.max()) / 2**20, "ours_ms": ours_ms, "all_to_all_ms": raw_ms, "ratio": ours_ms / raw_ms,
        "host_ms": host_ms, "all_to_all_host_ms": raw_host_ms, "call_ms": clock.total(ours),
        "all_to_all_call_ms": clock.total(raw.run),
    }  # fmt: skip


def run_rank(rank: int, world_size: int, port: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size, "WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in local.items()}
    device = own_gpu() if options.device == "cuda" else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    console = Console(quiet=rank != 0, width=150 if not sys.stdout.isatty() else None)
    warm_up(device)
    compared = check(device, 6 if options.quick else 30)
    console.print(f"{compared} tensors a rank equal the reference gather on {world_size} ranks, {backend}")
    if not options.check:
        rows = []
        for case in QUICK if options.quick else CASES:
            for strategy in ("shuffle", "minimal_move"):
                rows.append(measure_case(case, strategy, device, options.repeats))
                console.print(f"  {case}: {strategy} {rows[-1]['ours_ms']:.3f} ms")
        show(console, rows, world_size, backend)
        if options.json is not None and rank == 0:
            write(options.json, {"backend": backend, "ranks": world_size, "repeats": options.repeats, "rows": rows})
    dist.destroy_process_group()


COLUMNS = (
    "ours_ms", "all_to_all_ms", "ratio", "host_ms", "all_to_all_host_ms", "call_ms", "all_to_all_call_ms",
)  # fmt: skip


def show(console: Console, rows: list[dict[str, Any]], world_size: int, backend: str) -> None:
    table = Table(title=f"Redistribution on {world_size} ranks, {backend}, ms")
    names = ("samples x features", "plan", "MiB held", "MiB sent", "ours", "All2All", "ratio")
    for name in (*names, "host", "bare host", "call", "bare call"):
        table.add_column(name, justify="left" if name in names[:2] else "right", no_wrap=True)
    for row in rows:
        figures = [f"{row[key]:.2f}" if key == "ratio" else f"{row[key]:.3f}" for key in COLUMNS]
        figures = ["" if figure == "nan" else figure for figure in figures]  # the host has no part of its own on CPUs
        label = f"{row['samples']} x {row['features']} (mean {row['mean_length']})"
        table.add_row(label, row["strategy"], f"{row['mib_held']:.2f}", f"{row['mib_sent']:.2f}", *figures)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=0, help="ranks to start; default: one per GPU, or 2 without GPUs")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--check", action="store_true", help="only compare results with the reference")
    parser.add_argument("--quick", action="store_true", help="three cases and fewer repeats")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    on_gpu = options.device == "cuda" or (
        options.device == "auto" and torch.cuda.device_count() >= max(options.ranks, 1)
    )
    options.device, options.repeats = "cuda" if on_gpu else "cpu", 10 if options.quick else 30
    ranks = options.ranks or (torch.cuda.device_count() if on_gpu else 2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, (ranks, port, options), nprocs=ranks)  # type: ignore[attr-defined,no-untyped-call]


if __name__ == "__main__":
    main()
