"""Loops as they begin, and ranks that leave them anywhere, with a ledger of every sample."""

import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import SPEC, STEPS, balancer_of, cost_of, source
from trainer_client import BalancedLoader
from trainer_client.balancing import kernels, stream


def long_steps(rank: int) -> tuple[int, float]:
    """Rank 0 leaves while rank 1 is busy for longer than a rank that leaves waits; both meet after their loops."""
    stream.LEAVE_SECONDS = 0.1  # of this process
    with balancer_of(None) as balancer:
        taken = 0
        for _ in BalancedLoader(source(rank, 0), balancer, cost=cost_of, spec=SPEC):
            taken += 1
            if rank == 0:
                break
            time.sleep(0.4)
        started = time.monotonic()
        dist.barrier()
        return taken, time.monotonic() - started


def test_a_rank_that_has_left_holds_nobody_up_from_where_it_waits() -> None:
    (first, waited), (second, _) = run_ranks(2, long_steps)
    assert first == 1
    assert 1 < second < STEPS
    assert waited > 0.1  # in the barrier, not in the loop


class TooLongError(Exception):
    """What a program raises from a signal."""


def interrupted(rank: int, where: str) -> tuple[int, list[list[int]]]:
    """Rank 0's loop is interrupted twice while its stream opens, for which the other rank or the compiler is waited."""

    def ring(*_: object) -> None:
        raise TooLongError

    compiled = threading.Event()
    if where == "compiling":
        kernels._moves = lambda: SimpleNamespace(ready=False, wait=compiled.wait)
    attempts, loops = 0, []
    with balancer_of(None) as balancer:
        loader = BalancedLoader(source(rank, 0), balancer, cost=cost_of, spec=SPEC)
        if rank == 0:
            signal.signal(signal.SIGALRM, ring)
            for _ in range(2):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.4)
                    next(iter(loader))
                except TooLongError:
                    attempts += 1
        if where == "others":
            dist.barrier()
        compiled.set()
        for _ in range(2 if rank == 0 else 4):
            loops.append([sample for batch in loader for sample in batch["id"].tolist()])
    return attempts, loops


@pytest.mark.parametrize("where", ["others", "compiling"])
def test_a_loop_that_is_interrupted_while_its_stream_opens_has_been_left(where: str) -> None:
    """Else the loops that a rank begins after it would meet those that others began before theirs."""
    (attempts, first), (_, second) = run_ranks(2, interrupted, where)
    assert attempts == 2
    assert second[:2] == [[], []]  # ended with rank 0's
    second = second[2:]
    everything = sorted(int(one) for rank in range(2) for batch in source(rank, 0) for one in batch["id"])
    assert [sorted(one + other) for one, other in zip(first, second, strict=True)] == [everything] * 2
