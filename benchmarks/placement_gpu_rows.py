"""What FBGEMM's kernels take for rows in HBM and in host memory: read once, read again in the same step, updated.

    python -m benchmarks.placement_gpu_rows --seconds 100 --json benchmarks/results/placement_gpu_rows_h200.json

One module and one step at a time, forward and backward apart. A step looks `unique` rows up, each of them equally
often or as a power law has it; what else it reads is repeats. Widths, repeats, lookups, rows of the table and bags are
varied one after another. Keys are others in every step, and L2 is overwritten before each, so that only what a step
itself reads can be there. What a row costs is fitted to all cases of a width: nanoseconds of a row's first read, of
each further one, and of its update.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import fbgemm_gpu
import numpy as np
import torch
import typer
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from scipy.optimize import nnls

from trainer_client.planning.measuring import copy_rate, gather_rates, power_law_keys

K, M = 1 << 10, 1 << 20
TABLE_BYTES = 2 << 30
POWER_LAW = 0.0
KEYS, TURNS, WARMUP = 3, 7, 2


@dataclass(frozen=True, slots=True)
class Case:
    """A step of one module.

    Attributes:
        place: `hbm`, `host` (managed memory that the GPU reads where it is) or `mapped` (pinned host memory).
        dim: Width of an embedding, of four bytes each.
        lookups: Of a table in a step.
        repeats: Lookups of each looked-up row, or `POWER_LAW`.
        rows: Of a table, among which keys are drawn.
        bag: Lookups that are added up; 0 where every lookup is an output.
        tables: Equal tables.
    """

    place: str = "host"
    dim: int = 64
    lookups: int = 256 * K
    repeats: float = 1.0
    rows: int = 4 * M
    bag: int = 0
    tables: int = 1


def cases() -> list[Case]:
    """What is measured, those with one table in common next to each other."""
    found = []
    for place in ("host", "hbm"):
        for dim in (16, 32, 64, 128, 256):
            base = Case(place=place, dim=dim, rows=min(4 * M, TABLE_BYTES // (4 * dim)))
            found += [replace(base, repeats=repeats) for repeats in (1.0, 2.0, 4.0, 16.0, 64.0, POWER_LAW)]
        for dim in (64, 128):
            base = Case(place=place, dim=dim)
            found += [
                replace(base, lookups=lookups, repeats=repeats)
                for lookups in (4 * K, 16 * K, 64 * K, M)
                for repeats in (1.0, 4.0, POWER_LAW)
            ]
            found += [replace(base, rows=rows, repeats=POWER_LAW) for rows in (16 * K, 64 * K, 256 * K, M, 8 * M)]
            found += [replace(base, bag=bag, repeats=repeats) for bag in (1, 8, 32) for repeats in (1.0, POWER_LAW)]
        found.append(Case(place=place, dim=128, lookups=3 * M, repeats=POWER_LAW, bag=64))
        found.append(Case(place=place, dim=32, rows=64 * M, repeats=1.0))
        for dim in (32, 64, 128):
            found.append(Case(place=place, dim=dim, lookups=48 * K, rows=256 * K, bag=1, tables=26, repeats=POWER_LAW))
    found += [Case(place="mapped", dim=dim, repeats=repeats) for dim in (64, 128) for repeats in (1.0, 4.0, POWER_LAW)]
    return sorted(found, key=lambda case: (case.place, case.dim, case.tables, case.rows > 8 * M, case.bag > 0))


def keys_of(case: Case, seed: int, device: torch.device) -> torch.Tensor:
    """(tables * lookups,) int64."""
    generator = np.random.default_rng(seed)
    parts = []
    for table in range(case.tables):
        if case.repeats == POWER_LAW:
            parts.append(power_law_keys(case.rows, case.lookups, 100 * seed + table, device))
            continue
        unique = min(case.rows, max(1, round(case.lookups / case.repeats)))
        first = int(generator.integers(0, case.rows))
        # distinct rows all over the table: multiples of an odd number, modulo the rows, a power of two
        rows = (first + np.arange(unique, dtype=np.int64)) * 2_654_435_761 % case.rows
        keys = np.resize(rows, case.lookups)
        generator.shuffle(keys)
        parts.append(torch.from_numpy(keys).to(device))
    return torch.cat(parts)


def module_of(case: Case, device: torch.device, table_bytes: int) -> Any:
    """FBGEMM's module for all cases of one place, width, number of tables and way of pooling."""
    cuda = device.type == "cuda"
    place = EmbeddingLocation.DEVICE if case.place == "hbm" else EmbeddingLocation.MANAGED
    most = case.rows if case.tables > 1 or case.rows > 8 * M else max(case.rows, table_bytes // (4 * case.dim))
    module: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [
            (most, case.dim, place, ComputeDevice.CUDA)
            if cuda
            else (most, case.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
        ]
        * case.tables,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=PoolingMode.SUM if case.bag else PoolingMode.NONE,
        learning_rate=0.01,
        device=device,
        uvm_host_mapped=case.place == "mapped",
    )
    module.init_embedding_weights_uniform(-0.1, 0.1)
    return module


class Clock:
    """Times of what a device does."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._noise = torch.empty((256 * M if self._cuda else M), dtype=torch.uint8, device=device)

    def settle(self) -> None:
        """Overwrites L2, and lets the host run ahead of what is timed."""
        self._noise.add_(1)
        if self._cuda:
            pause: Any = torch.cuda._sleep
            pause(4_000_000)  # some 2 ms, in which the host launches what is timed

    def now(self) -> Any:
        """A point in the device's time."""
        if not self._cuda:
            return time.perf_counter()
        make: Any = torch.cuda.Event
        event = make(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        """Seconds."""
        if not self._cuda:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def measured(case: Case, module: Any, device: torch.device, clock: Clock) -> dict[str, Any]:
    """Medians of the forward and of the backward pass, in seconds."""
    batches = [keys_of(case, seed, device) for seed in range(KEYS)]
    bags = case.tables * case.lookups // (case.bag or 1)
    offsets = torch.arange(bags + 1, device=device) * (case.bag or 1)
    gradient = torch.randn(
        bags // (case.tables if case.bag else 1), case.dim * (case.tables if case.bag else 1), device=device
    )
    forward, backward = [], []
    for turn in range(WARMUP + TURNS):
        keys = batches[turn % KEYS]
        clock.settle()
        begin = clock.now()
        out = module(keys, offsets)
        middle = clock.now()
        clock.between(begin, middle)
        clock.settle()
        start = clock.now()
        out.backward(gradient)
        end = clock.now()
        if turn >= WARMUP:
            forward.append(clock.between(begin, middle))
            backward.append(clock.between(start, end))
    parts = [int(torch.unique(part).numel()) for part in batches[0].view(case.tables, -1)]
    return asdict(case) | {
        "all_lookups": case.tables * case.lookups,
        "unique": sum(parts),
        "forward_s": statistics.median(forward),
        "backward_s": statistics.median(backward),
    }


def fitted(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By place and width: seconds without rows, of a row's first read, of a repeated read, and of an update."""
    found = []
    for place, dim in sorted({(r["place"], r["dim"]) for r in records}):
        own = [r for r in records if (r["place"], r["dim"]) == (place, dim)]
        if len(own) < 5:
            continue
        unique = np.array([r["unique"] for r in own], dtype=np.float64)
        again = np.array([r["all_lookups"] for r in own]) - unique
        line: dict[str, Any] = {"place": place, "row_bytes": 4 * dim, "cases": len(own)}
        for what in ("forward", "backward"):
            seconds = np.array([r[f"{what}_s"] for r in own])
            parts = np.stack([np.ones(len(own)), unique, again], axis=1) / seconds[:, None]
            scale = parts.max(axis=0)  # by relative error, and no part less than nothing
            fit = nnls(parts / scale, np.ones(len(own)))[0] / scale
            line |= {f"{what}_fixed_us": fit[0] * 1e6, f"{what}_unique_ns": fit[1] * 1e9}
            line |= {f"{what}_repeat_ns": fit[2] * 1e9, f"{what}_worst": float(np.abs(parts @ fit - 1).max())}
        line["unique_read_bytes_per_s"] = 4e9 * dim / max(line["forward_unique_ns"], 1e-6)
        found.append(line)
    return found


def _groups(chosen: list[Case]) -> Iterator[list[Case]]:
    """Cases that one module serves."""
    group: list[Case] = []
    for case in chosen:
        same = group and all(
            getattr(group[0], name) == getattr(case, name) for name in ("place", "dim", "tables")
        ) and (group[0].bag > 0, group[0].rows > 8 * M) == (case.bag > 0, case.rows > 8 * M)  # fmt: skip
        if group and not same:
            yield group
            group = []
        group.append(case)
    yield group


def main(
    json_path: Annotated[Path, typer.Option("--json", help="Write the figures to this file.")],
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the way without GPUs.")] = "cuda",
    seconds: Annotated[float, typer.Option(help="Build no module after this time.")] = 100.0,
    scale: Annotated[float, typer.Option(help="Rows and lookups over those of the cases.")] = 1.0,
) -> None:
    """Measure all cases, fit what a row costs, and print it."""
    begin, place = time.perf_counter(), torch.device(device)
    clock, records, skipped = Clock(place), [], 0
    chosen = cases()
    if scale < 1:  # bags stay whole, and rows a power of two
        chosen = [
            replace(
                c,
                rows=1 << max(9, int(c.rows * scale).bit_length() - 1),
                lookups=max(256, int(c.lookups * scale) // 64 * 64),
            )
            for c in chosen
        ]
    about: dict[str, Any] = {
        "command": "python -m benchmarks.placement_gpu_rows --json FILE",
        "device": torch.cuda.get_device_name() if place.type == "cuda" else "cpu: times mean nothing",
        "torch": torch.__version__,
        "fbgemm": fbgemm_gpu.__version__,
        "link_bytes_per_s": copy_rate(place, int((1 << 30) * min(1.0, scale)), 5),
    }
    rates = gather_rates(
        place, from_host=True, table_bytes=int(TABLE_BYTES * min(1.0, scale)), gathered_rows=int(M * scale), repeats=5
    )
    about["torch_host_gather"] = [list(pair) for pair in rates]
    for group in _groups(chosen):
        if time.perf_counter() - begin > seconds:
            skipped += len(group)
            continue
        module = module_of(replace(group[0], rows=max(c.rows for c in group)), place, int(TABLE_BYTES * scale))
        records += [measured(case, module, place, clock) for case in group]
        del module
        if place.type == "cuda":
            torch.cuda.empty_cache()
        payload = about | {"skipped": skipped, "fits": fitted(records), "rows": records}
        json_path.write_text(json.dumps(payload, indent=1) + "\n")
    for record in records:
        print(
            f"{record['place']:6} dim {record['dim']:3} {record['tables']:2}x{record['rows'] / K:7.0f}k rows "
            f"{record['all_lookups'] / K:6.0f}k lookups, {record['unique'] / K:6.1f}k rows, bag {record['bag']:2}: "
            f"forward {record['forward_s'] * 1e3:7.3f} ms, backward {record['backward_s'] * 1e3:7.3f}"
        )
    print(f"link {about['link_bytes_per_s'] / 1e9:.1f} GB/s; {skipped} cases left out for time")
    for line in fitted(records):
        print(
            f"{line['place']:6} {line['row_bytes']:5} B: first read {line['forward_unique_ns']:6.2f} ns "
            f"({line['unique_read_bytes_per_s'] / 1e9:6.1f} GB/s), again {line['forward_repeat_ns']:6.2f}, backward "
            f"{line['backward_unique_ns']:6.2f} and {line['backward_repeat_ns']:5.2f}; worst "
            f"{line['forward_worst']:.0%} and {line['backward_worst']:.0%}"
        )


if __name__ == "__main__":
    typer.run(main)
