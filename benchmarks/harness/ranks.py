"""Real ranks: processes with a Gloo process group."""

from __future__ import annotations

import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import zygote

TIMEOUT_SECONDS = 90.0


class RankFailedError(AssertionError):
    """A rank raised; the message holds its traceback."""


def run_ranks(
    world_size: int, target: Callable[..., Any], *args: Any, check: bool = True, seconds: float = TIMEOUT_SECONDS
) -> list[Any]:
    """Runs `target(rank, *args)` in each rank of a new Gloo world.

    Args:
        world_size: Number of processes.
        target: A module-level function.
        args: What else it gets; pickled.
        check: Raise if any rank raised; otherwise its exception is its result.
        seconds: For which a rank is waited for.

    Returns:
        The results by rank.

    Raises:
        RankFailedError: If a rank raised, or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world_size):
            ours, theirs = zygote.context.Pipe(duplex=False)
            processes.append(zygote.process(run_rank, rank, world_size, f"{folder}/store", theirs, target, args))
            theirs.close()
            ends.append(ours)
        results: list[Any] = []
        try:
            for rank, end in enumerate(ends):
                try:
                    answered = end.poll(seconds)
                    results.append(pickle.loads(end.recv_bytes()) if answered else (None, None, "did not end in time"))
                except EOFError:
                    processes[rank].join(5)
                    results.append((None, None, f"died with exit code {processes[rank].exitcode}"))
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
    if check:
        failures = [f"rank {rank}: {trace}" for rank, (_, _, trace) in enumerate(results) if trace]
        if failures:
            raise RankFailedError("\n".join(failures))
    return [error if trace and error is not None else value for value, error, trace in results]


def run_rank(
    rank: int, world_size: int, store: str, end: Connection, target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """What a rank does: joins the process group, calls `target` and sends what came of it."""
    torch.set_num_threads(1)
    answer: tuple[Any, BaseException | None, str]
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        dist.barrier()  # where all are connected, one that ends at once fails nobody's start
        answer = (target(rank, *args), None, "")
    except BaseException as error:
        answer = (None, error, traceback.format_exc())
    # Plain pickles: `Connection.send` passes tensors as handles of shared memory, which end with this process.
    try:
        end.send_bytes(pickle.dumps(answer))
    except Exception as error:
        end.send_bytes(pickle.dumps((None, None, f"{answer[2]}\nresult cannot be sent: {error}")))
    end.close()
    if dist.is_initialized():
        dist.destroy_process_group()
