"""TorchRec's two-phase All2All of nested batches beside our redistribution, of the same samples by the same plan.

It moves one batch for each rank, so samples have to be taken apart by rank before and put together after; that part is
ours, in torch's operations, and told apart. Each result is compared with that of our redistribution, byte by byte.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from benchmarks.gpus import own_gpu
from benchmarks.peers.checkouts import load_torchrec, try_out
from benchmarks.redistribution import CASES, QUICK, Case, Clock, make_batch, plan
from benchmarks.redistribution_check import bytes_of
from benchmarks.redistribution_peers import FieldByField
from evenkeel.partitioning import Slice
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.redistribution import start, warm_up

REPEATS = 20


class ByInputDist(FieldByField):
    """Samples taken apart by rank, moved by TorchRec's `input_dist`, and put together."""

    def __init__(self, input_dist: Any, flat: FlatBatch, piece: Slice, gloo: Any, group: Any) -> None:
        super().__init__(flat, piece, group)
        self._input_dist, self._gloo = input_dist, gloo
        self._example = [self._flat_lengths[:0], *(tensor[:0] for tensor in flat.tensors)]

    def apart(self) -> list[list[torch.Tensor]]:
        """For each rank the lengths and the fields of its samples."""
        order = torch.from_numpy(self._order_host).to(self._flat.device, non_blocking=True)
        counts = self._out_counts.tolist()
        parts = [self._flat_lengths[order].split(counts)]  # type: ignore[no-untyped-call]
        rows: dict[int, torch.Tensor] = {}
        for leaf, tensor in zip(self._flat.structure.leaves, self._flat.tensors, strict=True):
            if leaf.rows:
                parts.append(tensor[order].split(counts))  # type: ignore[no-untyped-call]
                continue
            (column,) = leaf.columns
            if column not in rows:
                rows[column] = self._rows_of(column, order)
            parts.append(tensor[rows[column]].split(self._out_totals[:, column].tolist()))  # type: ignore[no-untyped-call]
        return [list(part) for part in zip(*parts, strict=True)]

    def move(self, batches: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Theirs: one batch for each rank, and one of each rank."""
        moved: list[list[torch.Tensor]] = self._input_dist(batches, self._example, self._gloo, self._group).wait()
        return moved

    def run(self) -> list[torch.Tensor]:
        """The tensors that this rank trains."""
        return [torch.cat(parts) for parts in list(zip(*self.move(self.apart()), strict=True))[1:]]


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Starts the ranks; a row for each case."""
    try_out(load_torchrec, options.torchrec)
    on_gpu = torch.cuda.device_count() >= options.ranks and options.device != "cpu"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder) / "result.json")
        arguments = (options.ranks, port, on_gpu, str(options.torchrec), options.quick, result)
        mp.spawn(_run_rank, arguments, nprocs=options.ranks)  # type: ignore[attr-defined,no-untyped-call]
        found: dict[str, Any] = json.loads(Path(result).read_text())
    _show(found, console)
    return found


def _run_rank(rank: int, world_size: int, port: int, on_gpu: bool, path: str, quick: bool, result: str) -> None:
    import os

    torch.set_num_threads(1)
    local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size, "WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in local.items()}
    device = own_gpu() if on_gpu else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    peer = load_torchrec(Path(path))
    gloo = dist.new_group(backend="gloo")
    warm_up(device)
    rows = []
    for case in QUICK if quick else CASES:
        for strategy in ("shuffle", "minimal_move"):
            rows.append(_measure(case, strategy, device, peer.input_dist.input_dist, gloo))
    if rank == 0:
        found = {
            "peer": peer.checkout.describe(),
            "machine": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
            "ranks": world_size,
            "rows": rows,
        }
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _measure(case: Case, strategy: str, device: torch.device, input_dist: Any, gloo: Any) -> dict[str, Any]:
    rank, group = dist.get_rank(), dist.group.WORLD
    batches = [make_batch(case, home) for home in range(dist.get_world_size())]
    piece = plan(batches, strategy)[1][rank]
    own = batches[rank].to(device)
    theirs = ByInputDist(input_dist, own, piece, gloo, group)

    def ours() -> FlatBatch:
        return start(own, piece, group=group).wait()

    expected = [bytes_of(tensor) for tensor in ours().tensors]
    assert [bytes_of(tensor) for tensor in theirs.run()] == expected, "the peer's batch is another one"
    apart = theirs.apart()
    clock = Clock(device, REPEATS)
    return {
        **asdict(case),
        "strategy": strategy,
        "mib_held": sum(float(batch.sizes.sum()) for batch in batches) / len(batches) / 2**20,
        "ours_call_ms": clock.total(ours),
        "theirs_call_ms": clock.total(theirs.run),
        "theirs_move_call_ms": clock.total(lambda: theirs.move(apart)),
    }


def _show(found: dict[str, Any], console: Console) -> None:
    peer = found["peer"]
    table = Table(title=f"{found['ranks']} × {found['machine']}; theirs: {peer['name']} at {peer['commit']}; ms")
    names = (
        "samples x features",
        "plan",
        "MiB held",
        "ours",
        "theirs, apart and together",
        "theirs, move only",
        "ratio",
    )
    for name in names:
        table.add_column(name, justify="left" if name in names[:2] else "right")
    for row in found["rows"]:
        table.add_row(
            f"{row['samples']} x {row['features']} (mean {row['mean_length']})", row["strategy"],
            f"{row['mib_held']:.2f}", f"{row['ours_call_ms']:.3f}", f"{row['theirs_call_ms']:.3f}",
            f"{row['theirs_move_call_ms']:.3f}", f"{row['theirs_call_ms'] / row['ours_call_ms']:.2f}",
        )  # fmt: skip
    console.print(table)
