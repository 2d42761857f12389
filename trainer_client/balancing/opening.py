"""What the ranks settle once, when their stream opens: rank 0's options, what an empty batch looks like, who leads.

A thread does it, and the training thread waits: where that is interrupted (a signal, a deadline of the user's), the
opening goes on, and the next loop waits for the same one, so that no rank meets its own earlier collectives.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch.distributed as dist

from evenkeel import __version__
from trainer_client.balancing.batches import BatchError, FlatBatch
from trainer_client.balancing.costs.learned import LearnedCost
from trainer_client.balancing.errors import NoDataError, ProgramOrderError
from trainer_client.balancing.groups import read_membership, take_communicators
from trainer_client.balancing.kernels import prepare_moves
from trainer_client.balancing.lead import Lead
from trainer_client.balancing.options import BalanceOptions, StreamConfig
from trainer_client.balancing.report import Counters
from trainer_client.balancing.rounds import Rounds
from trainer_client.balancing.stages import make_lead
from trainer_client.process_groups import node_name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hello:
    """What a rank says when a stream opens."""

    loader: str
    version: str
    node: str
    template: FlatBatch | None
    has_samples: bool
    on_gpu: bool


class Opening:
    """The meeting of all ranks that opens a stream. Collective; `error` begins it."""

    def __init__(
        self,
        config: StreamConfig,
        first: FlatBatch | None,
        *,
        counters: Counters,
        learns: Callable[[], LearnedCost | None],
        resumes: bool,
    ) -> None:
        """Meets nobody yet; `first` is this rank's first batch, `learns` gives its learned cost, if it has one.

        With `resumes` the first pass goes on from a state, and is to do what it would have done: it waits for kernels.
        """
        self._config, self._counters, self._learns, self._resumes = config, counters, learns, resumes
        membership = read_membership(config.process_group, config.peers)
        self._membership = membership if len(membership.ranks) > 1 else None
        self._world = dist.group.WORLD if membership.backend else None
        nccl, template = membership.backend == "nccl", None if first is None else first.empty()
        if self._membership is not None:
            _check_sendable(template)
        self._hello = _Hello(
            loader=config.loader, version=__version__, node=node_name(),
            template=template,
            has_samples=first is not None and first.num_samples > 0,
            on_gpu=nccl or (first is not None and first.device is not None and first.device.type == "cuda"),
        )  # fmt: skip
        self._future: Future[Rounds] = Future()
        self._begun = threading.Lock()

    def error(self, seconds: float | None = None) -> BaseException | None:
        """Waits, and may be interrupted; why the ranks could not settle, if so.

        `NoDataError` if no rank has a batch, and `ValueError`, `RuntimeError` and their kin, on all ranks alike.
        """
        if not self._begun.locked():
            threading.Thread(target=self._run, name=f"evenkeel-{self._config.loader}-open", daemon=True).start()
        return self._future.exception(seconds)

    @property
    def rounds(self) -> Rounds:
        """This rank's part in the stream that they have opened."""
        return self._future.result()

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return  # `error` was interrupted as it began this, and called again
        try:
            if self._membership is not None:
                prepare_moves()  # here, as an exception in the training thread would end the compiler's work
            self._future.set_result(self._settle())
        except BaseException as error:
            self._future.set_exception(error)

    def _settle(self) -> Rounds:
        config = self._config
        communicators = take_communicators(self._membership, config.options.collective_timeout)
        hellos, peers = communicators.gather_objects(self._hello), communicators.peers
        settled: tuple[BalanceOptions, FlatBatch, bool] | Exception | None = None
        lead: Lead | None = None
        if hellos is not None:
            try:
                template = _common_template(hellos, peers.shape[1])
                lead = make_lead(
                    config, template=template, nodes=[one.node for one in hellos[:: peers.shape[1]]],
                    peers=peers.tolist(), counters=self._counters, learns=self._learns, waits=self._resumes,
                )  # fmt: skip
                settled = config.options, template, any(one.on_gpu for one in hellos)
            except Exception as error:
                settled = error
        settled = communicators.broadcast_object(settled)
        if isinstance(settled, Exception):
            communicators.release()
            raise settled
        assert settled is not None
        options, template, to_gpu = settled
        if self._membership is not None:
            communicators.set_timeout(options.collective_timeout)
        return Rounds(
            replace(config, options=options), communicators, counters=self._counters, template=template, lead=lead,
            to_gpu=to_gpu, world=self._world,
        )  # fmt: skip


def _check_sendable(template: FlatBatch | None) -> None:
    """Raises `BatchError` where a batch is of classes that other ranks could not make."""
    try:
        pickle.dumps(template)
    except Exception as error:
        raise BatchError(
            f"the batch is of a class that other ranks cannot make ({error}); define it at the top of a module"
        ) from error


def _common_template(hellos: Sequence[_Hello], num_peers: int) -> FlatBatch:
    """An empty batch of a schema that some rank's first batch has; `decide` compares those with samples in round 0."""
    first = hellos[0]
    for number, hello in enumerate(hellos):
        rank = number // num_peers
        if hello.loader != first.loader:
            raise ProgramOrderError(
                f"rank {rank} begins the loader {hello.loader!r} while rank 0 begins {first.loader!r}; "
                "begin loaders for the first time in the same order on all ranks"
            )
        if hello.version != first.version:
            raise ValueError(
                f"rank {rank} runs evenkeel {hello.version}, rank 0 runs {first.version}; install the same version "
                "on all ranks (the balancer may be of another)"
            )
    known = sorted(hellos, key=lambda hello: not hello.has_samples)  # an empty one tells little of its fields
    template = next((hello.template for hello in known if hello.template is not None), None)
    if template is None:
        raise NoDataError
    return template
