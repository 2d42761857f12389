"""What the ranks of a group do together, all of them or none; and ranks that are started for it."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

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


def is_true_anywhere(value: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether a value is true on any rank; the same answer on all."""
    return any(on_all(lambda: value, group))


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


def run_on_ranks(work: Callable[..., T], ranks: int, kind: str, *arguments: object) -> T:
    """What `work(device, *arguments)` gives on the first of ranks that are started on this host for it.

    Args:
        work: A function of a module.
        ranks: How many.
        kind: Of the devices, `cuda` or `cpu`.
        arguments: What it is given besides.

    Raises:
        RuntimeError: If it fails on a rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_on_rank, (ranks, kind, folder, work, arguments), nprocs=ranks)  # type: ignore[no-untyped-call]
        except (ProcessRaisedException, ProcessExitedException) as error:
            last = str(error).strip().splitlines()[-1]  # of a traceback
            raise RuntimeError(f"{work.__name__} failed on {ranks} ranks: {last}") from None
        result: T = pickle.loads(Path(folder, "result").read_bytes())
    return result


def _on_rank(
    rank: int, ranks: int, kind: str, folder: str, work: Callable[..., T], arguments: tuple[object, ...]
) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):  # which are the command's
        os.dup2(nowhere, output)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    device, backend = torch.device("cpu"), "gloo"
    if kind == "cuda":
        device, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(device)
    store = f"file://{folder}/store"
    bound = device if kind == "cuda" else None
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, device_id=bound)
    result = work(device, *arguments)
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
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
