"""Attention over sequences of different lengths: how fast it is, and what balancing gains it.

    python -m benchmarks.attention --json benchmarks/results/attention.json

For each distribution of lengths and each of PyTorch's variable-length kernels: forward and backward TFLOP/s, beside the
device's peak and the rate of a large matrix product measured in the same run. Then the time of the slowest of `--ranks`
batches, as drawn and after balancing, as a share of the mean: what a data-parallel step waits for.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from evenkeel.partitioning import partition
from examples.datasets import DISTRIBUTIONS, lengths_named
from examples.hstu.attention import KERNELS, Kernel, attend
from examples.hstu.flops import AttentionWork, peak_tflops
from trainer_client.balancing.costs import HSTUCost

TOLERANCE = 2e-2  # relative error of bf16 against float64


def main() -> None:
    options = parse_arguments()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.set_num_threads(4)
    console = Console(width=120)
    default: tuple[Kernel, ...] = ("dense",) if device.type == "cpu" else ("varlen", "nested_cudnn", "flex")
    kernels: tuple[Kernel, ...] = tuple(options.kernels or default)
    results: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "options": vars(options) | {"json": str(options.json) if options.json else None},
        "peak_tflops": peak_tflops(device),
        "matmul_tflops": matmul_tflops(device),
        "errors": {kernel: check(kernel, device, options) for kernel in kernels},
        "kernels": [],
        "balancing": [],
    }
    wrong = {k: error for k, error in results["errors"].items() if not (isinstance(error, float) and error < TOLERANCE)}
    for kernel, error in wrong.items():
        console.print(f"{kernel} is left out, error against float64: {error}", highlight=False)
    kernels = tuple(kernel for kernel in kernels if kernel not in wrong)
    for name in DISTRIBUTIONS:
        for kernel in kernels:
            entry = {"lengths": name, "kernel": kernel} | measure(kernel, name, device, options)
            results["kernels"].append(entry)
            console.print(entry)
    if not kernels:
        raise SystemExit("none of these kernels computes attention here; choose others with --kernels")
    rates = {
        kernel: statistics.mean(e["tflops"] for e in results["kernels"] if e["kernel"] == kernel) for kernel in kernels
    }
    best = max(rates, key=lambda kernel: rates[kernel])
    results["best_kernel"] = best
    for name in DISTRIBUTIONS:
        entry = {"lengths": name} | measure_balancing(best, name, device, options)
        results["balancing"].append(entry)
        console.print(entry)
    show(results, console)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def tensors(lengths: NDArray[np.int64], device: torch.device, options: argparse.Namespace) -> list[torch.Tensor]:
    """Query, key, value (with gradients) and the gradient of the output; then offsets and candidates."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (int(lengths.sum()), options.heads, options.head_dim)
    parts = [torch.randn(shape, device=device, dtype=dtype) for _ in range(4)]
    for part in parts[:3]:
        part.requires_grad_()
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).int().to(device)
    return [*parts, offsets, torch.ones(len(lengths), dtype=torch.int32, device=device)]


def check(kernel: Kernel, device: torch.device, options: argparse.Namespace) -> float | str:
    """Relative error of output and gradients against attention in float64 on the CPU."""
    lengths = np.array([1, 7, 130, 300, 64], dtype=np.int64)
    query, key, value, grad, offsets, candidates = tensors(lengths, device, options)
    parts = (query, key, value)
    try:
        out = attend(query, key, value, offsets, candidates, max_length=options.max_length, kernel=kernel)
        found = [out, *torch.autograd.grad(out, parts, grad)]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    q, k, v = exact = [part.detach().cpu().double().requires_grad_() for part in parts]
    out = attend(q, k, v, offsets.cpu(), candidates.cpu(), max_length=options.max_length, kernel="dense")
    wanted = [out, *torch.autograd.grad(out, exact, grad.cpu().double())]
    return max(
        float((f.detach().cpu().double() - w.detach()).norm() / w.detach().norm())
        for f, w in zip(found, wanted, strict=True)
    )


def timed(run: Callable[[int], Any], repeats: int, device: torch.device) -> float:
    """Median milliseconds of `run(i)` after warming up."""
    for i in range(3 if device.type == "cuda" else 1):
        run(i)
    durations: list[float] = []
    if device.type == "cuda":
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]  # type: ignore[no-untyped-call]
        for i, (begin, end) in enumerate(events):
            begin.record()
            run(i)
            end.record()
        torch.cuda.synchronize(device)
        durations = [float(begin.elapsed_time(end)) for begin, end in events]
    else:
        for i in range(repeats):
            started = time.perf_counter()
            run(i)
            durations.append(1e3 * (time.perf_counter() - started))
    return statistics.median(durations)


def forward_and_backward(
    kernel: Kernel, sets: list[list[torch.Tensor]], device: torch.device, options: argparse.Namespace
) -> tuple[float, float]:
    """Milliseconds of the forward pass, and of both."""

    def forward(i: int) -> torch.Tensor:
        query, key, value, _, offsets, candidates = sets[i % len(sets)]
        return attend(query, key, value, offsets, candidates, max_length=options.max_length, kernel=kernel)

    def both(i: int) -> None:
        chosen = sets[i % len(sets)]
        torch.autograd.grad(forward(i), chosen[:3], chosen[3])

    with torch.no_grad():
        alone = timed(forward, options.repeats, device)
    return alone, timed(both, options.repeats, device)


def measure(kernel: Kernel, name: str, device: torch.device, options: argparse.Namespace) -> dict[str, float]:
    """Rates of one kernel on batches of one distribution; the inputs rotate."""
    rng = np.random.default_rng(options.seed)
    distribution = lengths_named(name, maximum=options.max_length)
    lengths = distribution.draw(rng, options.batch_size)
    sets = [tensors(rng.permutation(lengths), device, options) for _ in range(3)]
    work = AttentionWork(num_heads=options.heads, head_dim=options.head_dim)
    flops, backward_flops = work.flops({"offsets": sets[0][4]}).tolist()
    forward, both = forward_and_backward(kernel, sets, device, options)
    peak = peak_tflops(device)
    result = {
        "tokens": int(lengths.sum()),
        "forward_ms": forward,
        "backward_ms": both - forward,
        "forward_tflops": flops / forward / 1e9,
        "backward_tflops": backward_flops / max(both - forward, 1e-6) / 1e9,
        "tflops": (flops + backward_flops) / both / 1e9,
    }
    if peak:
        result["of_peak"] = result["tflops"] / peak
    return result


def measure_balancing(kernel: Kernel, name: str, device: torch.device, options: argparse.Namespace) -> dict[str, float]:
    """Attention time of each rank's batch, measured on this device one after the other, as drawn and balanced."""
    rng = np.random.default_rng(options.seed + 1)
    distribution = lengths_named(name, maximum=options.max_length)
    lengths = distribution.draw(rng, options.batch_size * options.ranks)
    homes = np.repeat(np.arange(options.ranks, dtype=np.int32), options.batch_size)
    # What is balanced here is attention alone: the square term of the cost.
    costs = HSTUCost(num_layers=1, width=1, num_heads=options.heads, head_dim=options.head_dim, history="-").flops(
        lengths.astype(np.float64)
    )
    plan = partition(costs, homes, options.ranks)
    milliseconds = {}
    for when, ranks in (("before", homes), ("after", plan.destinations)):
        times = []
        for rank in range(options.ranks):
            sets = [tensors(lengths[ranks == rank], device, options)]
            times.append(forward_and_backward(kernel, sets, device, options)[1])
        milliseconds[when] = times
    slowest = {when: max(times) for when, times in milliseconds.items()}
    return {
        "slowest_ms_before": slowest["before"],
        "slowest_ms_after": slowest["after"],
        "speedup": slowest["before"] / slowest["after"],
        "allowed_by_flops": float(plan.home_loads.max() / plan.lower_bound),
        "imbalance_before": slowest["before"] / statistics.mean(milliseconds["before"]),
        "imbalance_after": slowest["after"] / statistics.mean(milliseconds["after"]),
    }


def matmul_tflops(device: torch.device) -> float:
    """Rate of a large product of random matrices: the ceiling that can be reached."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    factors = [torch.randn(size, size, device=device, dtype=dtype) for _ in range(3)]
    milliseconds = timed(lambda i: factors[i % 3] @ factors[(i + 1) % 3], 10, device)
    return 2 * size**3 / milliseconds / 1e9


def show(results: dict[str, Any], console: Console) -> None:
    peak = f"{results['peak_tflops']:.0f}" if results["peak_tflops"] else "unknown"
    table = Table(title=f"{results['machine']}: peak {peak}, large product {results['matmul_tflops']:.3g} TFLOP/s")
    for column in ("lengths", "kernel", "forward TFLOP/s", "backward", "both", "of peak", "of product"):
        table.add_column(column, justify="right")
    for entry in results["kernels"]:
        table.add_row(
            entry["lengths"], entry["kernel"], f"{entry['forward_tflops']:.3g}", f"{entry['backward_tflops']:.3g}",
            f"{entry['tflops']:.3g}", f"{entry['of_peak']:.1%}" if "of_peak" in entry else "",
            f"{entry['tflops'] / results['matmul_tflops']:.1%}",
        )  # fmt: skip
    console.print(table)
    table = Table(title=f"Attention of the slowest rank ({results['best_kernel']}): what balancing gains")
    for column in ("lengths", "before ms", "after ms", "speed-up", "allowed by FLOPs", "max/mean before", "after"):
        table.add_column(column, justify="right")
    for entry in results["balancing"]:
        table.add_row(
            entry["lengths"], f"{entry['slowest_ms_before']:.2f}", f"{entry['slowest_ms_after']:.2f}",
            f"{entry['speedup']:.2f}", f"{entry['allowed_by_flops']:.2f}", f"{entry['imbalance_before']:.3f}",
            f"{entry['imbalance_after']:.3f}",
        )  # fmt: skip
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda or cpu; default: a GPU if there is one")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS[1:], help="which kernels")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32, help="sequences per rank")
    parser.add_argument("--max-length", type=int, default=4096, help="longest sequence")
    parser.add_argument("--ranks", type=int, default=8, help="batches to balance")
    parser.add_argument("--repeats", type=int, default=20, help="timed repetitions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
