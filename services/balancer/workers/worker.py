"""A worker: one process that computes one plan after another, until its balancer is gone."""

from __future__ import annotations

import socket
import struct
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace

from evenkeel.partitioning import ImpossiblePartitionError, PartitionError
from evenkeel.partitioning.rounds import RoundOptions, RoundPlan, digest_of, plan_round
from evenkeel.partitioning.samples import RoundSamples
from services.balancer.decisions import PlanFailure, Reason
from services.balancer.node_answers import Told, tell
from services.balancer.workers.arena import Arena, read_round, write_result
from services.operations.children import limit_memory

MESSAGE = struct.Struct("<qq")
"""Both ways: the length of a message in the arena. Then to the worker: whether its search is to be the cheapest; from
it: nanoseconds of the processor that it has used."""

_MAX_TRACEBACK = 4000


def run_worker(end: socket.socket, rounds: Arena, plans: Arena, *, memory_bytes: int) -> None:
    """Computes plans until the other end is closed.

    Args:
        end: Tells of a round, is told of its plan.
        rounds: Where rounds are written.
        plans: Where plans are to be written.
        memory_bytes: What the process may take in addition to what it has now.
    """
    limit_memory(memory_bytes)
    while message := end.recv(MESSAGE.size):
        nbytes, is_cheap = MESSAGE.unpack(message)
        began = time.process_time_ns()
        result, told = _plan(rounds, nbytes, is_cheap=bool(is_cheap), memory_bytes=memory_bytes)
        end.send(MESSAGE.pack(write_result(plans, result, told), time.process_time_ns() - began))


def _plan(
    rounds: Arena, nbytes: int, *, is_cheap: bool, memory_bytes: int
) -> tuple[RoundPlan | PlanFailure, Sequence[Told]]:
    """The outcome of a round, and what is told of its plan."""
    try:
        samples, options, together = read_round(rounds, nbytes)
        result = plan_or_failure(samples, options.cheapest() if is_cheap else options)
        return result, tell(result, together) if together and isinstance(result, RoundPlan) else ()
    except MemoryError as error:
        detail = f"a partition may take {memory_bytes} bytes of memory (worker_memory_bytes): {error}"
        return PlanFailure(reason=Reason.PARTITION_FAILED, detail=detail), ()
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        trace = traceback.format_exc()[-_MAX_TRACEBACK:]
        return PlanFailure(reason=Reason.PARTITION_FAILED, detail=detail, trace=trace), ()


def plan_or_failure(samples: RoundSamples, options: RoundOptions) -> RoundPlan | PlanFailure:
    """The plan of a round with its digest and the time it took, or why there is none."""
    started = time.perf_counter()
    try:
        plan = plan_round(samples, options)
    except ImpossiblePartitionError as error:
        return PlanFailure(reason=Reason.NOT_FOUND, detail=f"impossible, {error.shortfall:.6g} short: {error}")
    except PartitionError as error:
        return PlanFailure(reason=Reason.NOT_FOUND, detail=f"not found: {error}")
    except ValueError as error:
        return PlanFailure(reason=Reason.PARTITION_FAILED, detail=str(error))
    digest = digest_of(plan, samples)
    return replace(plan, digest=digest, seconds=time.perf_counter() - started)
