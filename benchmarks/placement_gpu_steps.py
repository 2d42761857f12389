"""Whole steps through DistributedModelParallel in many configurations, none of which `evenkeel calibrate` measures.

torchrun --nproc-per-node 2 -m benchmarks.placement_gpu_steps --json steps.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torchrec
import typer

from evenkeel.placement import Mode, Optimizer, Sharding
from evenkeel.placement.step_samples import StepSample, TablePart
from trainer_client.planning.whole_steps import join_group, measure_samples, scaled


def _one(name: str, samples: int, optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD, **part: Any) -> StepSample:
    return StepSample(name=name, samples=samples, parts=(TablePart(**part),), optimizer=optimizer)


_M = 1 << 20
_K = 1 << 10
_CACHED, _HOST, _SINGLE = Mode.CACHING, Mode.HOST_ONLY, Sharding.TABLE_WISE
_MIXED = (
    TablePart(count=4, rows=_M, ids=4),
    TablePart(count=4, rows=_M, mode=_CACHED, ratio=0.2, ids=4),
    TablePart(count=4, rows=_M, mode=_HOST, ids=1),
)
_SEQUENCES = TablePart(count=2, rows=2 * _M, mode=_CACHED, ratio=0.2, ids=20, pooled=False)
_MODEL = (
    TablePart(count=20, rows=128 * _K, dim=64),
    TablePart(count=6, rows=2 * _M, dim=64, ids=4, mode=_CACHED, ratio=0.2),
    TablePart(count=8, rows=64 * _K, dim=64, sharding=_SINGLE),
)

CONFIGURATIONS = (
    _one("hbm 4x1M", 8192, count=4, rows=_M, ids=1),
    _one("cached 4x2M 0.2", 4096, count=4, rows=2 * _M, mode=_CACHED, ratio=0.2, ids=8),
    _one("host 4x2M few", 2048, count=4, rows=2 * _M, mode=_HOST, ids=1),
    _one("hbm 4x1M 16", 8192, count=4, rows=_M, ids=16),
    _one("cached 4x2M 0.05", 16_384, count=4, rows=2 * _M, mode=_CACHED, ratio=0.05, ids=8),
    _one("host 4x2M 8", 4096, count=4, rows=2 * _M, mode=_HOST, ids=8),
    _one("hbm 26x512k", 4096, count=26, rows=512 * _K, dim=64),
    _one("cached 26x256k 0.3", 8192, count=26, rows=256 * _K, mode=_CACHED, ratio=0.3, dim=64),
    _one("host 26x256k", 4096, count=26, rows=256 * _K, mode=_HOST, dim=64),
    StepSample(name="mixed", samples=8192, parts=_MIXED),
    _one("hbm 26x512k large", 32_768, count=26, rows=512 * _K, dim=64),
    _one("cached 2x4M 0.25 32", 4096, count=2, rows=4 * _M, mode=_CACHED, ratio=0.25, ids=32),
    _one("host 2x4M 32", 4096, count=2, rows=4 * _M, mode=_HOST, ids=32),
    _one("hbm single 8x1M", 8192, count=8, rows=_M, ids=4, sharding=_SINGLE),
    _one("host 1x1M few", 1024, count=1, rows=_M, mode=_HOST),
    _one("hbm sequence 2x2M", 1024, count=2, rows=2 * _M, ids=50, pooled=False),
    _one("cached sequence 2x2M 0.3", 4096, count=2, rows=2 * _M, mode=_CACHED, ratio=0.3, ids=50, pooled=False),
    _one("host sequence 2x2M", 4096, count=2, rows=2 * _M, mode=_HOST, ids=50, pooled=False),
    _one("cached single 8x1M 0.3", 8192, count=8, rows=_M, mode=_CACHED, ratio=0.3, ids=4, sharding=_SINGLE),
    _one("host single 8x1M", 16_384, count=8, rows=_M, mode=_HOST, ids=4, sharding=_SINGLE),
    _one("hbm 100x64k", 16_384, count=100, rows=64 * _K, dim=64),
    _one("hbm 4x1M adam", 8192, Optimizer.ADAM, count=4, rows=_M, ids=8),
    _one("cached 4x1M 0.9", 4096, count=4, rows=_M, mode=_CACHED, ratio=0.9, ids=2),
    StepSample(name="mixed sequence", samples=2048, parts=(*_MIXED, _SEQUENCES)),
    StepSample(name="mixed sequence large", samples=12_288, parts=(*_MIXED, _SEQUENCES)),
    _one("hbm 2x4M 64", 8192, count=2, rows=4 * _M, ids=64),
    _one("hbm 2x4M 64 large", 49_152, count=2, rows=4 * _M, ids=64),
    _one("host 2x4M 4", 16_384, count=2, rows=4 * _M, mode=_HOST, ids=4),
    _one("host 4x2M 32", 16_384, count=4, rows=2 * _M, mode=_HOST, ids=32),
    _one("host 26x256k large", 49_152, count=26, rows=256 * _K, mode=_HOST, dim=64),
    _one("cached 26x256k 0.1 large", 49_152, count=26, rows=256 * _K, mode=_CACHED, ratio=0.1, dim=64),
    StepSample(name="model", samples=4096, parts=_MODEL),
    StepSample(name="model large", samples=32_768, parts=_MODEL),
    StepSample(
        name="hbm pooled and sequence",
        samples=8192,
        parts=(TablePart(count=16, rows=256 * _K), TablePart(count=4, rows=_M, dim=64, ids=40, pooled=False)),
    ),
)
"""From a step that the host bounds to tens of milliseconds of GPU work."""

_NARROW = (
    TablePart(count=8, rows=512 * _K, dim=32),
    TablePart(count=8, rows=_M, mode=_CACHED, ratio=0.2, dim=32),
    TablePart(count=8, rows=_M, mode=_HOST, ids=2, dim=32),
)
_TWO_WIDTHS = (TablePart(count=4, rows=_M, ids=8), TablePart(count=12, rows=256 * _K, mode=_HOST, ids=2, dim=32))

WIDTHS = (
    _one("host 26x256k 32 wide", 49_152, count=26, rows=256 * _K, mode=_HOST, dim=32),
    _one("host 8x1M 16 wide", 16_384, count=8, rows=_M, mode=_HOST, ids=8, dim=16),
    _one("host 4x1M 256 wide", 8192, count=4, rows=_M, mode=_HOST, ids=8, dim=256),
    _one("host 2x8M 32 wide", 16_384, count=2, rows=8 * _M, mode=_HOST, ids=32, dim=32),
    _one("host 10x64k", 32_768, count=10, rows=64 * _K, mode=_HOST, ids=4, dim=64),
    _one("host 4x4M 64 wide", 16_384, count=4, rows=4 * _M, mode=_HOST, ids=16, dim=64),
    _one("host single 8x1M 64 wide", 16_384, count=8, rows=_M, mode=_HOST, ids=8, dim=64, sharding=_SINGLE),
    _one("host sequence 2x1M 64 wide", 8192, count=2, rows=_M, mode=_HOST, ids=50, dim=64, pooled=False),
    _one("cached 26x256k 0.1 32 wide", 49_152, count=26, rows=256 * _K, mode=_CACHED, ratio=0.1, dim=32),
    _one("cached 4x1M 0.2 256 wide", 8192, count=4, rows=_M, mode=_CACHED, ratio=0.2, ids=8, dim=256),
    _one("cached 8x512k 0.15", 16_384, count=8, rows=512 * _K, mode=_CACHED, ratio=0.15, ids=8, dim=64),
    _one("hbm 2x4M 64 32 wide", 49_152, count=2, rows=4 * _M, ids=64, dim=32),
    _one("hbm 4x1M 256 wide", 16_384, count=4, rows=_M, ids=32, dim=256),
    _one("hbm sequence 4x1M 32 wide", 16_384, count=4, rows=_M, ids=40, dim=32, pooled=False),
    StepSample(name="mixed narrow", samples=16_384, parts=_NARROW),
    StepSample(name="two widths", samples=16_384, parts=_TWO_WIDTHS),
)
"""Other widths and more repeats, chosen after the others had been measured and before the costs of rows by width."""


def main(
    json_path: Annotated[Path, typer.Option("--json", help="Write the figures to this file.")],
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the way without GPUs.")] = "cuda",
    warmup: Annotated[int, typer.Option(help="Steps before the timed ones, where there are caches to fill.")] = 120,
    repeats: Annotated[int, typer.Option(help="Timed steps of a block.")] = 12,
    blocks: Annotated[int, typer.Option(help="Blocks of each configuration, which take turns.")] = 7,
    scale: Annotated[float, typer.Option(help="Rows and samples over those of the configurations.")] = 1.0,
    seconds: Annotated[float, typer.Option(help="Begin no round of blocks after this time.")] = 150.0,
    only: Annotated[list[str] | None, typer.Option("--only", help="Configurations whose name contains this.")] = None,
) -> None:
    """Measure configurations, in turns."""
    place = join_group(device)
    chosen = [c for c in (*WIDTHS, *CONFIGURATIONS) if not only or any(part in c.name for part in only)]

    def keep(records: list[dict[str, Any]]) -> None:
        if dist.get_rank() == 0:
            json_path.write_text(json.dumps(_about(device) | {"rows": records}, indent=1) + "\n")

    records = measure_samples(
        scaled(chosen, scale), place, warmup=warmup, repeats=repeats, blocks=blocks, seconds=seconds, told=keep
    )
    if dist.get_rank() == 0:
        for record in records:
            print(
                f"{record['name']:28} {record['seconds'] * 1e3:7.2f} ms, alone {record['alone_s'] * 1e3:7.2f}, "
                f"launched in {record['launched_s'] * 1e3:7.2f}"
            )
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
