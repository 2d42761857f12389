"""Which of TorchRec's pipelines run over balanced batches, and whether they train what one process would.

    python -m benchmarks.pipelines --json benchmarks/results/pipelines_gloo.json             # Gloo ranks on CPUs
    python -m benchmarks.pipelines --cuda --json benchmarks/results/pipelines_2xh200.json    # one GPU a rank

Each pipeline runs twice in processes of its own, over the model of `benchmarks.harness.sharded`: "alone", over plain
batches of one size without Evenkeel, and "balanced". One that fails alone fails for reasons of its own. Of
the balanced run the losses of all ranks are compared with those of one process that holds the global batch.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import platform
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.harness.sharded import STEPS, data, features, in_one_process, make_model
from trainer_client import BalancedLoader, Balancer, TokenCost
from trainer_client.balancing.pipelines import balanced_batches

SECONDS = 60.0
COMPILING = {"TrainPipelinePT2": 200.0}  # takes that long for its first batch
Step = Callable[[Iterator[Any]], Any]


def _progress(name: str, **options: Any) -> Callable[..., Step]:
    def make(model: Any, optimizer: Any, device: torch.device) -> Step:
        step: Step = _class(name)(model, optimizer, device, **options).progress
        return step

    return make


def _class(name: str) -> Any:
    from torchrec.distributed import train_pipeline
    from torchrec.distributed.train_pipeline import experimental_pipelines, train_pipelines

    for module in (train_pipeline, train_pipelines, experimental_pipelines):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"this TorchRec has no {name}")


def _staged(model: Any, optimizer: Any, device: torch.device) -> Step:
    """The loop that `StagedTrainPipeline` documents."""
    from torchrec.distributed.train_pipeline import StagedTrainPipeline
    from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil

    def stream() -> Any:
        return torch.cuda.Stream() if device.type == "cuda" else torch.Stream(device="cpu")  # type: ignore[no-untyped-call]

    distribution: Any = SparseDataDistUtil(model=model, data_dist_stream=stream())
    pipeline: Any = StagedTrainPipeline(
        [
            PipelineStage("copy", runnable=lambda batch: batch.to(device, non_blocking=True), stream=stream()),
            PipelineStage(
                "keys",
                runnable=distribution.start_sparse_data_dist,
                stream=distribution.data_dist_stream,
                fill_callback=distribution.wait_sdd_fill_callback,
            ),
        ]
    )

    def step(batches: Iterator[Any]) -> Any:
        batch = pipeline.progress(batches)
        if batch is None:
            raise StopIteration
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        optimizer.step()
        return output

    return step


def _accumulating(model: Any, optimizer: Any, device: torch.device) -> Step:
    from torchrec.distributed.train_pipeline.gradient_accumulation import (
        GradientAccumulationConfig,
        GradientAccumulationWrapper,
    )

    inner = _class("TrainPipelineSparseDist")(model, optimizer, device)
    config = GradientAccumulationConfig(is_enabled=True, num_steps=2)
    wrapper = GradientAccumulationWrapper(inner, optimizer, model, config)
    step: Step = wrapper.progress
    return step


_SITE = {"site_fqn": "head.dense"}
PIPELINES: dict[str, Callable[..., Step]] = {
    "TrainPipelineBase": _progress("TrainPipelineBase"),
    "TrainPipelinePT2": _progress("TrainPipelinePT2"),
    "TrainPipelineSparseDist": _progress("TrainPipelineSparseDist"),
    "TrainPipelineSparseDistLite": _progress("TrainPipelineSparseDistLite"),
    "TrainPipelineFusedSparseDist": _progress("TrainPipelineFusedSparseDist"),
    "TrainPipelineSemiSync": _progress("TrainPipelineSemiSync", start_batch=0),
    "PrefetchTrainPipelineSparseDist": _progress("PrefetchTrainPipelineSparseDist"),
    "TrainPipelineSparseDistCompAutograd": _progress("TrainPipelineSparseDistCompAutograd"),
    "StagedTrainPipeline": _staged,
    "GradientAccumulationWrapper": _accumulating,
    "EvalPipelineSparseDist": _progress("EvalPipelineSparseDist"),
    "EvalPipelineFusedSparseDist": _progress("EvalPipelineFusedSparseDist"),
    "TrainEvalHybridPipelineBase": _progress("TrainEvalHybridPipelineBase"),
    "EvalPipelineCPUSparse": _progress("EvalPipelineCPUSparse"),
    "TrainPipelineSparseDistT": _progress("TrainPipelineSparseDistT"),
    "TrainPipelineSparseDistBwdOpt": _progress("TrainPipelineSparseDistBwdOpt", **_SITE),
    "TrainPipelineSparseDistOptStash": _progress("TrainPipelineSparseDistOptStash", **_SITE),
    "TrainPipelineSparseDistEmbStash": _progress("TrainPipelineSparseDistEmbStash", **_SITE),
    "TrainPipelinePrefetchEMS": _progress("TrainPipelinePrefetchEMS", **_SITE),
}
EVALUATE = ("EvalPipelineSparseDist", "EvalPipelineFusedSparseDist", "EvalPipelineCPUSparse")
CACHED = ("PrefetchTrainPipelineSparseDist", "TrainPipelinePrefetchEMS")
OTHER_NUMBERS = ("TrainPipelineSemiSync", "GradientAccumulationWrapper")  # by design: older rows, fewer steps


class _Plain:
    """What a user writes for TorchRec without Evenkeel: a batch that can be moved."""

    def __init__(self, batch: Any, scale: float) -> None:
        self.batch, self.loss_scale = batch, scale

    def to(self, device: torch.device, non_blocking: bool = False) -> _Plain:
        return _Plain(
            {key: value.to(device, non_blocking=non_blocking) for key, value in self.batch.items()}, self.loss_scale
        )

    def record_stream(self, stream: Any) -> None:
        for value in self.batch.values():
            value.record_stream(stream)

    def pin_memory(self) -> _Plain:
        return self


def _alone(rank: int) -> Iterator[Any]:
    from torchrec.streamable import Pipelineable

    Pipelineable.register(_Plain)
    for step, batch in enumerate(data(rank)):
        if step < STEPS - 1:  # which all ranks have
            yield _Plain(features(batch), 1 / 6)


def run(rank: int, name: str, balanced: bool, cuda: bool) -> list[tuple[float, float]]:
    """One rank of one pipeline: sum of the losses and scale of each step."""
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    model, _, optimizer = make_model(device, "fused_uvm_caching" if name in CACHED and cuda else None)
    model.train(name not in EVALUATE)
    balancer = Balancer.embedded()
    batches = _alone(rank)
    if balanced:
        source = [features(batch) for batch in data(rank)]
        loader = BalancedLoader(source, balancer, cost=TokenCost(tokens="features.history"), device=device)
        batches = balanced_batches(loader)
    steps = []
    step = PIPELINES[name](model, optimizer, device)
    try:
        while True:
            output = step(batches)
            if output is not None:
                steps.append((float(output[0]), float(output[1])))
    except StopIteration:
        balancer.close()
        return steps


def _rank(rank: int, world_size: int, store: str, end: Any, name: str, balanced: bool, cuda: bool) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    if cuda:
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(
            "cuda:nccl,cpu:gloo" if cuda else "gloo",
            init_method=f"file://{store}", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=COMPILING.get(name, SECONDS) / 2),
        )  # fmt: skip
        end.send((run(rank, name, balanced, cuda), ""))
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = "/".join(Path(where.filename).parts[-2:])
        message = " ".join(str(error).split()).replace(str(Path(torch.__file__).parents[1]), "…")
        end.send(([], f"{type(error).__name__} in {place}: {message[:300]}"))


def _run_ranks(world_size: int, name: str, balanced: bool, cuda: bool) -> tuple[list[Any], str]:
    """Steps of each rank, and the first error."""
    seconds = COMPILING.get(name, SECONDS)
    context: Any = multiprocessing.get_context("spawn" if cuda else "fork")
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            processes.append(
                context.Process(target=_rank, args=(rank, world_size, f"{folder}/store", theirs, name, balanced, cuda))
            )
            processes[-1].start()
            theirs.close()
            ends.append(ours)
        results, errors = [], []
        for end in ends:
            try:
                steps, error = end.recv() if end.poll(seconds) else ([], f"did not end in {seconds:.0f} s")
            except EOFError:
                steps, error = [], "died"
            results.append(steps)
            errors.append(error)
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    return results, next((error for error in errors if error and "Connection" not in error), "".join(errors[:1]))


def examine(name: str, world_size: int, cuda: bool) -> dict[str, Any]:
    """What one pipeline does."""
    plain, alone = _run_ranks(world_size, name, False, cuda)
    steps, error = _run_ranks(world_size, name, True, cuda)
    found: dict[str, Any] = {"alone": alone or "runs", "balanced": error or "runs"}
    losses, _ = in_one_process(world_size, train=name not in EVALUATE)
    if not alone:
        sums = [sum(rank[step][0] for rank in plain) for step in range(min(map(len, plain)))]
        found["alone_largest_difference"] = float(
            f"{max((abs(a / b - 1) for a, b in zip(sums, losses, strict=False)), default=float('nan')):.2g}"
        )
    if not error:
        found["steps"] = [len(rank) for rank in steps]
        together = [sum(rank[step][0] for rank in steps) for step in range(min(found["steps"]))]
        # the last global batch is smaller, and its scale must have travelled with it
        found["scales"] = [round(rank[-1][1] * 6, 6) for rank in steps]
        off = max(abs(a / b - 1) for a, b in zip(together, losses, strict=False)) if together else float("nan")
        found["largest_difference"] = float(f"{off:.2g}")
        found["trains_as_one_process"] = off < 1e-4 and found["steps"] == [STEPS] * world_size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cuda", action="store_true", help="one GPU a rank; default: Gloo on CPUs")
    parser.add_argument("--only", nargs="*", default=list(PIPELINES), metavar="PIPELINE", help="default: all")
    parser.add_argument("--skip", nargs="*", default=[], metavar="PIPELINE", help="leave these out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import torchrec
    from torchrec.distributed import train_pipeline  # noqa: F401 - before forking

    device = torch.cuda.get_device_name() if options.cuda else platform.processor() or platform.machine()
    content = {"ranks": options.ranks, "device": device, "torch": torch.__version__, "torchrec": torchrec.__version__}
    results: dict[str, Any] = {}
    for name in (name for name in options.only if name not in options.skip):
        results[name] = examine(name, options.ranks, options.cuda)
        print(name, json.dumps(results[name]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(content | {"pipelines": results}, indent=1) + "\n")
    table = Table("pipeline", "alone", "balanced", "as one process")
    for name, found in results.items():
        equal = found.get("trains_as_one_process")
        other = "other numbers by design" if name in OTHER_NUMBERS else "no"
        note = "" if equal is None else "yes" if equal else other
        table.add_row(name, found["alone"], found["balanced"], note)
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
