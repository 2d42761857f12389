"""Measures whole steps of TorchRec's tables on the GPUs of a host, exchange of keys and rows included.

`measure_on_ranks` starts the ranks; each runs this module:

    torchrun --nproc-per-node 2 -m trainer_client.planning.whole_steps --json steps.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evenkeel.placement import Mode, Optimizer, Sharding, plan
from evenkeel.placement.codec import encode
from evenkeel.placement.step_samples import EXPONENT, StepSample, TablePart, request_of, table_name

_K, _M = 1 << 10, 1 << 20
_CACHED, _HOST, _SINGLE = Mode.CACHING, Mode.HOST_ONLY, Sharding.TABLE_WISE
_BAGS = TablePart(count=4, rows=256 * _K, dim=64)
_ROWS = TablePart(count=2, rows=256 * _K, dim=64, ids=10, pooled=False)

SAMPLES = (
    StepSample(name="small", samples=1024, parts=(_BAGS,)),
    StepSample(name="many tables", samples=1024, parts=(replace(_BAGS, count=120, rows=16 * _K),)),
    StepSample(name="cached", samples=4096, parts=(replace(_BAGS, rows=_M, mode=_CACHED, ratio=0.3, ids=2),)),
    StepSample(name="in host memory", samples=2048, parts=(replace(_BAGS, rows=_M, mode=_HOST),)),
    StepSample(name="two exchanges", samples=1024, parts=(_BAGS, _ROWS)),
    StepSample(name="three exchanges", samples=1024, parts=(_BAGS, replace(_BAGS, count=6, sharding=_SINGLE), _ROWS)),
    StepSample(
        name="two cached exchanges",
        samples=2048,
        parts=(
            replace(_BAGS, rows=_M, mode=_CACHED, ratio=0.3),
            replace(_ROWS, rows=_M, mode=_CACHED, ratio=0.3),
        ),
    ),
    StepSample(name="many samples", samples=65_536, parts=(replace(_BAGS, count=20),)),
    StepSample(name="long sequences", samples=4096, parts=(replace(_ROWS, dim=128, ids=100),)),
    StepSample(name="many lookups", samples=16_384, parts=(replace(_BAGS, rows=2 * _M, dim=128, ids=40),)),
    StepSample(
        name="much host memory", samples=16_384, parts=(replace(_BAGS, count=2, rows=2 * _M, mode=_HOST, ids=24),)
    ),
    StepSample(
        name="many samples of single tables",
        samples=49_152,
        parts=(replace(_BAGS, count=16, sharding=_SINGLE, dim=128),),
    ),
)
"""What tells host, exchange, tables, caches and copies apart."""


class StepModel(torch.nn.Module):
    """The tables of a sample: bags and sequences, and a loss over all of what they give."""

    def __init__(self, sample: StepSample) -> None:
        from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

        super().__init__()
        meta = torch.device("meta")
        bags: list[EmbeddingBagConfig] = []
        rows: list[EmbeddingConfig] = []
        for number, part in enumerate(sample.parts):
            kind: Any = EmbeddingBagConfig if part.pooled else EmbeddingConfig
            own: Any = bags if part.pooled else rows
            for index in range(part.count):
                name = table_name(number, index)
                own.append(
                    kind(name=name, embedding_dim=part.dim, num_embeddings=part.rows, feature_names=[f"f_{name}"])
                )
        self.bags = EmbeddingBagCollection(tables=bags, device=meta) if bags else None
        self.rows = EmbeddingCollection(tables=rows, device=meta) if rows else None

    def forward(self, bags: Any, rows: Any) -> torch.Tensor:
        """The mean of all embeddings."""
        found = []
        if self.bags is not None:
            found.append(self.bags(bags).values().mean())
        if self.rows is not None:
            found += [sequence.values().mean() for sequence in self.rows(rows).values()]
        return torch.stack(found).sum()


def batches(sample: StepSample, device: torch.device, seed: int) -> Iterator[tuple[Any, Any]]:
    """Fresh keys in every step: integer parts of a power law, permuted over the rows."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    generator = torch.Generator(device).manual_seed(seed)
    while True:
        halves: list[Any] = []
        for pooled in (True, False):
            values, lengths, keys = [], [], []
            for number, part in enumerate(sample.parts):
                if part.pooled is pooled:
                    count = part.count * sample.samples
                    values.append(_keys(part.rows, count * part.ids, generator))
                    lengths.append(torch.full((count,), part.ids, device=device, dtype=torch.int32))
                    keys += [f"f_{table_name(number, index)}" for index in range(part.count)]
            joined = None
            if keys:
                joined = KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=torch.cat(lengths))
            halves.append(joined)
        yield halves[0], halves[1]


def _keys(rows: int, count: int, generator: torch.Generator) -> torch.Tensor:
    uniform = torch.rand(count, generator=generator, dtype=torch.float64, device=generator.device)
    last = float(rows + 1) ** (1 - EXPONENT)
    ranks = (((last - 1) * uniform + 1) ** (1 / (1 - EXPONENT))).to(torch.int64).clamp_(1, rows) - 1
    keys: torch.Tensor = ranks * 2_654_435_761 % rows
    return keys


@dataclass(slots=True)
class _Run:
    """A sharded model in training, and its times by block: back to back, one by one, and of the host alone."""

    sample: StepSample
    parallel: Any
    source: Iterator[tuple[Any, Any]]
    in_a_row: list[float]
    alone: list[float]
    launched: list[float]


def measure_samples(
    samples: Sequence[StepSample],
    device: torch.device,
    *,
    warmup: int = 120,
    repeats: int = 12,
    blocks: int = 7,
    seconds: float = 240.0,
    told: Callable[[list[dict[str, Any]]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Trains and times every sample on the ranks of the process group; each rank gets the same records.

    All samples are built first and then take turns, block by block, so that a slow while of the machine is not taken
    for a slow step.

    Args:
        samples: What to measure.
        device: Of this rank.
        warmup: Steps of a sample with caches before it is timed; a tenth of it without.
        repeats: Steps of a block.
        blocks: Blocks of each sample, of whose times the median counts.
        seconds: Begin no round of blocks, and build no sample, after this time.
        told: Called with the records after every round of blocks.
    """
    begin = time.perf_counter()
    runs: list[_Run] = []
    for sample in samples:
        if _late(begin, seconds / 2, device):
            break
        runs.append(_built(replace(sample, ranks=dist.get_world_size()), device, warmup))
    records: list[dict[str, Any]] = []
    for _ in range(blocks):
        for run in runs:
            _block(run, device, repeats)
        records = [_record(run) for run in runs]
        told(records)
        if _late(begin, seconds, device):
            break
    return records


def _built(sample: StepSample, device: torch.device, warmup: int) -> _Run:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv

    from evenkeel.placement.application import FBGEMM_OPTIMIZERS
    from trainer_client.planning.applying import sharding_plan

    model, request = StepModel(sample), request_of(sample)
    optimizer = EmbOptimType[FBGEMM_OPTIMIZERS[Optimizer(sample.optimizer)]]
    fused = {"optimizer": optimizer, "learning_rate": 0.01}
    sharders: list[Any] = [
        EmbeddingBagCollectionSharder(fused_params=dict(fused)),
        EmbeddingCollectionSharder(fused_params=dict(fused)),
    ]
    assert dist.group.WORLD is not None
    parallel = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=sharding_plan(model, request, plan(request, split=False), device=device.type),
        sharders=sharders,
    )
    source = batches(sample, device, 17 + dist.get_rank())
    cached = any(part.mode is Mode.CACHING for part in sample.parts)
    for _ in range(warmup if cached else max(1, warmup // 10)):
        parallel(*next(source)).backward()
    gc.collect()
    return _Run(sample, parallel, source, [], [], [])


def _block(run: _Run, device: torch.device, repeats: int) -> None:
    """One block: steps back to back, then a few one by one."""
    kept = [next(run.source) for _ in range(repeats)]
    run.parallel(*next(run.source)).backward()
    _settle(device)
    begin = time.perf_counter()
    for batch in kept:
        run.parallel(*batch).backward()
    _wait(device)
    run.in_a_row.append((time.perf_counter() - begin) / repeats)
    for batch in kept[:2]:
        _settle(device)
        begin = time.perf_counter()
        run.parallel(*batch).backward()
        run.launched.append(time.perf_counter() - begin)
        _wait(device)
        run.alone.append(time.perf_counter() - begin)


def _record(run: _Run) -> dict[str, Any]:
    """The slowest rank's figures, the same on every rank."""
    own = [statistics.median(times) for times in (run.in_a_row, run.alone, run.launched)]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    seconds, alone, launched = (max(column) for column in zip(*every, strict=True))
    record: dict[str, Any] = encode(replace(run.sample, seconds=seconds))
    return record | {"alone_s": alone, "launched_s": launched, "blocks_s": run.in_a_row}


def _late(begin: float, seconds: float, device: torch.device) -> bool:
    """Whether any rank has run out of time; the same answer on all."""
    late = torch.tensor([float(time.perf_counter() - begin > seconds)], device=device)
    dist.all_reduce(late)
    return bool(late.item())


def _settle(device: torch.device) -> None:
    _wait(device)
    dist.barrier()
    _wait(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def scaled(samples: Sequence[StepSample], scale: float) -> list[StepSample]:
    """The same with fewer rows and samples, to try the way."""

    def smaller(part: TablePart) -> TablePart:
        return replace(part, rows=max(512, int(part.rows * scale)))

    return [
        replace(s, samples=max(8, int(s.samples * scale)), parts=tuple(map(smaller, s.parts))) if scale < 1 else s
        for s in samples
    ]


def measure_on_ranks(ranks: int, device: str, *, scale: float = 1.0, seconds: float = 120.0) -> list[dict[str, Any]]:
    """Starts ranks on this host, has them measure `SAMPLES`, and returns the records.

    Args:
        ranks: Ranks to start, one a GPU.
        device: `cuda`, or `cpu` to try the way without GPUs.
        scale: Rows and samples over those of `SAMPLES`.
        seconds: About how long they may measure; they are ended after three times as long.

    Raises:
        RuntimeError: If the ranks fail, or do not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "steps.json", Path(folder) / "log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "trainer_client.planning.whole_steps", "--json", str(out), "--device", device]
        command += ["--scale", str(scale), "--seconds", str(seconds)]
        with log.open("wb") as written:
            process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT, env={**os.environ})
            try:
                code = process.wait(timeout=3 * seconds + 60)
            except subprocess.TimeoutExpired:
                process.terminate()
                code = process.wait(timeout=60)
        if not out.exists():
            tail = log.read_text("utf-8", errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"whole steps on {ranks} ranks were not measured (exit {code}): {' '.join(tail)[:300]}")
        records: list[dict[str, Any]] = json.loads(out.read_text("utf-8"))["whole_steps"]
        return records


def can_measure() -> bool:
    """Whether what measures whole steps is installed here."""
    try:
        import torchrec  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


def join_group(device: str) -> torch.device:
    """Begins the process group of torchrun's ranks; returns this rank's device, of kind `cuda` or `cpu`."""
    if device != "cuda":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(place)
    dist.init_process_group("nccl", device_id=place)
    return place


def main() -> None:
    """Measure on the ranks of torchrun and write the records."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--json", required=True, help="file for the records")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    device = join_group(options.device)
    small = options.scale < 1
    records = measure_samples(
        scaled(SAMPLES, options.scale),
        device,
        warmup=10 if small else 120,
        repeats=2 if small else 12,
        blocks=2 if small else 7,
        seconds=options.seconds,
    )
    if dist.get_rank() == 0:
        Path(options.json).write_text(json.dumps({"whole_steps": records}, indent=1) + "\n", "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
