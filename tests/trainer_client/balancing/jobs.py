"""Jobs that the tests of the loader run in each rank."""

import logging
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.ranks import TIMEOUT_SECONDS, RankFailedError, run_ranks
from benchmarks.harness.steps import SPEC, cost_of, make_batch  # noqa: F401  # which all its users need
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing import asking


def connect(address: str, **arguments: Any) -> Balancer:
    """A balancer whose lead waits for the service, however starved the machine is: every round is served."""
    asking.GRACE = 60.0  # of this process, which is a rank of one test
    return Balancer.connect(address, **arguments)


def balancer_of(
    address: str | None,
    job: str = "job",
    *,
    process_group: Any = None,
    options: BalanceOptions | None = None,
    **changes: Any,
) -> Balancer:
    """Of a service, embedded (None) or "off", with patience for a starved machine unless there are options."""
    patient: dict[str, Any] = {"timeout": timedelta(seconds=20), "group_timeout": timedelta(seconds=60)}
    options = BalanceOptions(**{**patient, **changes}) if options is None else options
    if address is None:
        return Balancer.embedded(job=job, options=options, process_group=process_group)
    if address == "off":
        return Balancer.off(options=options, process_group=process_group)
    return connect(address, job=job, options=options, process_group=process_group)


def run_in_turn(world_size: int, *jobs: tuple[Any, ...], check: bool = True) -> list[list[Any]]:
    """What ranks return of jobs, each a function and its arguments, by job and rank: they are started once for all.

    As `run_ranks` does, it raises what a rank has raised, or gives that for its result, without `check`.
    """
    by_rank = run_ranks(world_size, _in_turn, jobs, seconds=TIMEOUT_SECONDS * 2)
    by_job = [list(results) for results in zip(*by_rank, strict=True)]
    for (target, *arguments), results in zip(jobs, by_job, strict=True):
        for rank, result in enumerate(results if check else ()):
            if isinstance(result, Exception):
                raise RankFailedError(f"rank {rank} of {target.__name__}{tuple(arguments)}: {result.__notes__[-1]}")
    return by_job


def _in_turn(rank: int, jobs: tuple[tuple[Any, ...], ...]) -> list[Any]:
    results = []
    for target, *arguments in jobs:
        try:
            results.append(pickle.loads(pickle.dumps(target(rank, *arguments))))  # later jobs do not change it
        except Exception as error:
            error.add_note(traceback.format_exc())
            results.append(error)
        dist.barrier()
    return results


def logged(name: str = "trainer_client", *, form: str = "%(message)s") -> list[str]:
    """What is logged in this process from now on, a rank of one test."""
    lines: list[str] = []
    handler, formatter = logging.Handler(), logging.Formatter(form)
    handler.emit = lambda record: lines.append(formatter.format(record))
    logging.getLogger(name).addHandler(handler)
    return lines


def check_served(loader: BalancedLoader[Any], address: str | None) -> None:
    """Asserts who planned all rounds so far: the service, or the lead where there is none, or nobody."""
    wanted = [] if address == "off" else ["embedded" if address is None else "service"]
    planned = {mode.value for mode, _ in loader.counters.rounds} & {"service", "embedded"}
    assert sorted(planned) == wanted, loader.counters.rounds


@dataclass(slots=True, kw_only=True)
class Job:
    """A job of the tests: data with heavy tails, every sample known by its id."""

    steps: tuple[int, ...]  # batches of each rank
    batch_size: int = 8  # samples of a full batch
    address: str | None = None  # of the balancer; None: embedded; "off": no balancing
    name: str = "job"  # of the job
    # of balancing
    options: BalanceOptions = field(default_factory=lambda: BalanceOptions(timeout=timedelta(seconds=20)))

    def batches(self, rank: int) -> Iterator[dict[str, torch.Tensor]]:
        for step in range(self.steps[rank]):
            yield make_batch(rank, step, self.batch_size if step < self.steps[rank] - 1 else (rank * 3 + 1) % 8)

    def balancer(self) -> Balancer:
        return balancer_of(self.address, self.name, options=self.options)


STEPS = 8


def source(rank: int, loop: int, steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """Batches whose ids tell loop, step and rank."""
    return [make_batch(rank, step + 100 * loop, 6) for step in range(steps)]


def failing(batches: list[Any], after: int) -> Iterator[Any]:
    yield from batches[:after]
    raise OSError("the disk is gone")


@dataclass(slots=True)
class JobData:
    """A rank's batches of a job, which can be iterated again."""

    job: Job
    rank: int

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self.job.batches(self.rank)
