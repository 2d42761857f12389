"""What the ranks of a group do together, all of them or none; and ranks that are started for it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from evenkeel.placement import InvalidInputError

T = TypeVar("T")


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks of the group; 1 where there is none."""
    return dist.get_world_size(group) if in_group() else 1


def in_group() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def on_all(make: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """What `make` gives on each rank, on all of them; where it fails on some, all raise what the first of them did."""
    if not in_group():
        return [make()]
    failure: Exception | None = None
    made: Any = None
    try:
        made = make()
    except Exception as error:
        failure = error
    every: list[Any] = [None] * dist.get_world_size(group)
    told = (
        failure if failure is None or isinstance(failure, InvalidInputError) else f"{type(failure).__name__}: {failure}"
    )
    dist.all_gather_object(every, (made, told), group=group)
    for rank, (_, what) in enumerate(every):
        if failure is not None and rank == dist.get_rank(group):
            raise failure
        if isinstance(what, InvalidInputError):
            raise what from failure
        if what is not None:
            raise RuntimeError(f"planning failed on rank {rank}: {what}") from failure
    return [one for one, _ in every]


def all_or_none(make: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What `make` gives on this rank; where it fails on some, all raise."""
    made: list[T] = []
    on_all(lambda: made.append(make()), group)
    return made[0]


def from_first(make: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What rank 0 makes, or its error, on all ranks."""
    if not in_group():
        return make()
    box: list[Any] = [all_or_none(make if dist.get_rank(group) == 0 else lambda: None, group)]
    dist.broadcast_object_list(box, group=group, group_src=0)
    made: T = box[0]
    return made


def run_on_ranks(work: Callable[..., T], ranks: int, kind: str, *arguments: object, limit_s: float | None = None) -> T:
    """What `work(device, *arguments)` gives on the first of ranks of this host that torchrun starts for it.

    Args:
        work: A function of a module.
        ranks: How many.
        kind: Of the devices, `cuda` or `cpu`.
        arguments: What it is given besides.
        limit_s: Seconds that it may take.

    Raises:
        RuntimeError: If it fails or takes longer.
    """
    module = work.__module__
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(pickle.dumps((work, kind, arguments)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", __spec__.name, file.name]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{module} did not end on {ranks} ranks within {limit_s:g} s") from None
        if ended.returncode:
            lines = (ended.stdout + ended.stderr).strip().splitlines() or ["it said nothing"]
            shown = next((line for line in lines if line.startswith("[rank") and "Error: " in line), lines[-1])
            raise RuntimeError(f"{module} failed on {ranks} ranks (exit {ended.returncode}): {shown[:300]}")
        result: T = pickle.loads(Path(file.name).read_bytes())
    return result


def main() -> None:
    """Does on a rank of torchrun what `run_on_ranks` wrote into a file, and puts there what came of it."""
    file = Path(sys.argv[1])
    work, kind, arguments = pickle.loads(file.read_bytes())
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=device if kind == "cuda" else None)
    result = work(device, *arguments)
    if dist.get_rank() == 0:
        file.write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The process group that there is, or one of this process alone."""
    if dist.is_initialized():
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    store: Any = dist.HashStore  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
