"""Time of bucketize against its memory floor, with FBGEMM's operator beside it in the same run.

    python -m benchmarks.bucketize --json benchmarks/results/bucketize_h100.json

The floor counts each index read once and written once, the permutation written once and all lengths once, at the copy
rate measured in the same run. Times are medians of CUDA events with the queue filled beforehand and the L2 cache
displaced; inputs rotate. Without a GPU the CPU kernels are timed on smaller batches, without a floor.
"""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness.results import write
from trainer_client.embedding.routing import DIST_TYPES, block_bucketize

CASES = ("long histories", "2 x 32 rows of 16,384", "multi-hot", "one-hot", "wide")


def make_case(name: str, *, device: torch.device, seed: int, shrink: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Lengths (features x rows), indices, and number of features of one of `CASES`."""
    generator = torch.Generator().manual_seed(seed)
    features, rows, limit = {
        "long histories": (3, 256, 0),
        "2 x 32 rows of 16,384": (2, 32, 0),
        "multi-hot": (26, 65_536, 20),
        "one-hot": (26, 65_536, 1),
        "wide": (400, 4_096, 60),
    }[name]
    rows = max(rows // shrink, 1)
    if name == "long histories":
        drawn = torch.exp(torch.randn(features * rows, generator=generator) * 0.9 + 7.26)
        lengths = drawn.clamp(1, 8192).to(torch.int64)
    elif name == "2 x 32 rows of 16,384":
        lengths = torch.full((features * rows,), 16_384)
    elif name == "one-hot":
        lengths = torch.ones(features * rows, dtype=torch.int64)
    else:
        lengths = torch.randint(0, limit + 1, (features * rows,), generator=generator)
    indices = torch.randint(0, 100_000_000, (int(lengths.sum()),), generator=generator)
    return lengths.to(device), indices.to(device), features


def copy_rate() -> float:
    """Bytes read and written per second by a large copy on the GPU."""
    source = torch.empty(1 << 29, dtype=torch.int64, device="cuda").fill_(3)
    target = torch.empty_like(source)
    return 2 * source.nbytes / gpu_median([lambda: target.copy_(source)], 20)


def gpu_median(calls: Sequence[Callable[[], Any]], repeats: int) -> float:
    """Median seconds of the calls, taken in turn, each queued behind a pass over 2 GiB."""
    displace = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    for call in calls:
        call()
    times: list[float] = []
    for i in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        displace.sum()
        start.record()
        calls[i % len(calls)]()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1000)
    return statistics.median(times)


def cpu_median(calls: Sequence[Callable[[], Any]], repeats: int) -> float:
    times = []
    for i in range(repeats + 1):
        start = time.perf_counter()
        calls[i % len(calls)]()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def measure(name: str, ranks: int, *, device: torch.device, rate: float, repeats: int, shrink: int) -> dict[str, Any]:
    batches = [make_case(name, device=device, seed=seed, shrink=shrink) for seed in range(3)]
    features = batches[0][2]
    blocks = torch.full((features,), -(-100_000_000 // ranks), dtype=torch.int64, device=device)
    median = gpu_median if device.type == "cuda" else cpu_median
    num_rows, num_keys = batches[0][0].numel(), statistics.median(b[1].numel() for b in batches)
    row: dict[str, Any] = {"case": name, "ranks": ranks, "indices": num_keys}
    if device.type == "cuda":
        row["floor_ms"] = (24 * num_keys + 8 * num_rows * (ranks + 1)) / rate * 1000
    for mode in DIST_TYPES:
        ours = [partial(block_bucketize, b[0], b[1], blocks, ranks, mode) for b in batches]
        row[f"{mode}_ms"] = median(ours, repeats) * 1000
    if device.type == "cuda":
        worst = max(row[f"{mode}_ms"] for mode in DIST_TYPES)
        row["over_floor"] = worst / row["floor_ms"]
        row["within_3_floors_and_30_us"] = worst <= 3 * row["floor_ms"] + 0.030
    with suppress(Exception):
        import fbgemm_gpu  # noqa: F401
    if hasattr(torch.ops.fbgemm, "block_bucketize_sparse_features"):
        operator = torch.ops.fbgemm.block_bucketize_sparse_features
        peers = [partial(operator, b[0], b[1], False, True, blocks, ranks) for b in batches]
        row["fbgemm_ms"] = median(peers, max(5, repeats // 4)) * 1000
        row["fbgemm_over_ours"] = row["fbgemm_ms"] / row["continuous_ms"]
        theirs = operator(batches[0][0], batches[0][1], False, True, blocks, ranks)
        mine = block_bucketize(*batches[0][:2], blocks, ranks, "continuous")
        row["equals_fbgemm"] = all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True) if a is not None)
    return row


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; the GPU if there is one.")] = "",
    case: Annotated[list[str] | None, typer.Option(help="Only these cases.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One number of ranks, few calls, small on a CPU.")] = False,
) -> None:
    """Measures every case and prints the table."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = place.type == "cuda"
    shrink = 1 if on_gpu else 1024 if quick else 16
    repeats, numbers = (3, [8]) if quick else (30, [8, 64, 256])
    rate = copy_rate() if on_gpu else 0.0
    rows = [
        measure(name, number, device=place, rate=rate, repeats=repeats, shrink=shrink)
        for name, number in track([(c, w) for c in case or CASES for w in numbers], "bucketize")
    ]
    shown = [name for name in rows[0] if not isinstance(rows[0][name], bool)]
    table = Table(*shown, title=f"bucketize on {torch.cuda.get_device_name() if on_gpu else platform.machine()}")
    for row in rows:
        table.add_row(*(f"{row[n]:.3f}" if isinstance(row[n], float) else str(row[n]) for n in shown))
    Console(width=180).print(table)
    write(json_path, {"rows_divided_by": shrink, "copy_rate_bytes_per_second": rate, "results": rows})


if __name__ == "__main__":
    typer.run(main)
