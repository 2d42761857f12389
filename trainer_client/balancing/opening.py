"""What the ranks settle once, when their stream opens: rank 0's options, what an empty batch looks like, who leads.

A thread does it, and the training thread waits: where that is interrupted (a signal, a deadline of the user's), the
opening goes on, and the next loop waits for the same one, so that no rank meets its own earlier collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from evenkeel import __version__
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.decide import mismatch
from trainer_client.balancing.errors import NoDataError, PeersDifferError, ProgramOrderError
from trainer_client.balancing.groups import Communicators, Key, take_communicators
from trainer_client.balancing.kernels import Kernels
from trainer_client.balancing.lead import Lead
from trainer_client.balancing.measured import Measured
from trainer_client.balancing.membership import Membership, Ranks, read_membership
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.report import Counters
from trainer_client.balancing.rounds import Rounds, RoundsAlone, SharedRounds
from trainer_client.process_groups import node_name

if TYPE_CHECKING:  # grpcio is needed only where a service is
    from evenkeel.credentials import Credentials
    from trainer_client.balancing.asking import Asker


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """What a stream is made from. Rank 0's address and options hold for all ranks.

    Attributes:
        job: The training job.
        group: The ranks that balance together, by name.
        loader: The stream's name.
        address: `host:port` of the balancer; None: embedded.
        balance: False: every sample stays at home.
        options: How to balance.
        process_group: The ranks that balance together; None: the default group.
        peers: The ranks that train the same batches; see `read_membership`.
        credentials: What calls of the balancer show.
    """

    job: str
    group: str
    loader: str
    address: str | None
    balance: bool
    options: BalanceOptions
    process_group: Ranks | None
    peers: Ranks | None = None
    credentials: Credentials | None = None

    @property
    def key(self) -> Key:
        """Job, group and loader."""
        return self.job, self.group, self.loader


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What all ranks have settled.

    Attributes:
        template: An empty batch.
        options: Rank 0's.
        to_gpu: Batches go to the ranks' GPUs where no device is named.
        rounds: This rank's part in them.
        lead: What decides; None where another rank does.
        communicators: With the other ranks; None where there are none.
        world: The default process group that it was opened in; None: there was none.
        rank: This one, among those that balance together.
        world_size: How many they are.
    """

    template: FlatBatch
    options: BalanceOptions
    to_gpu: bool
    rounds: Rounds
    lead: Lead | None
    communicators: Communicators | None
    world: dist.ProcessGroup | None
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hello:
    """What a rank says when a stream opens."""

    config: StreamConfig
    version: str
    node: str
    template: FlatBatch | None
    has_samples: bool
    on_gpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Welcome:
    """What the lead answers."""

    options: BalanceOptions
    template: FlatBatch | None = None
    to_gpu: bool = False
    error: Exception | None = None


def begin_opening(
    config: StreamConfig, first: FlatBatch | None, *, counters: Counters, measured: Measured, resumes: bool
) -> Future[Opened]:
    """Begins to open a stream, in a thread. Collective.

    Args:
        config: This rank's.
        first: Its first batch; None if it has none.
        counters: Of the stream.
        measured: What this rank measures.
        resumes: The first pass goes on from a state, and is to do what it would have done: it waits for kernels.

    Returns:
        What the ranks have settled; or `NoDataError` if no rank has a batch, and `ValueError`, `RuntimeError` and their
        kin where they differ, on all ranks alike.
    """
    membership = read_membership(config.process_group, config.peers)
    future: Future[Opened] = Future()

    def work() -> None:
        try:
            future.set_result(_open(config, membership, first, counters=counters, measured=measured, resumes=resumes))
        except BaseException as error:
            future.set_exception(error)

    if membership is None or len(membership.ranks) == 1:
        work()  # nobody is waited for
    else:
        threading.Thread(target=work, name=f"evenkeel-{config.loader}-open", daemon=True).start()
    return future


def _open(
    config: StreamConfig,
    membership: Membership | None,
    first: FlatBatch | None,
    *,
    counters: Counters,
    measured: Measured,
    resumes: bool,
) -> Opened:
    on_gpu = first is not None and first.device is not None and first.device.type == "cuda"
    template = None if first is None else first.empty()
    hello = _Hello(
        config=replace(config, process_group=None, peers=None, credentials=None), version=__version__, node=node_name(),
        template=template, has_samples=first is not None and first.num_samples > 0,
        on_gpu=on_gpu or (membership is not None and membership.backend == "nccl"),
    )  # fmt: skip
    communicators, world = None, dist.group.WORLD if membership is not None else None
    rank, world_size = 0, 1
    lead: Lead | None = None
    if membership is None or len(membership.ranks) == 1:
        welcome, lead = _welcome(config, [hello], counters=counters, measured=measured, resumes=resumes)
        hello = replace(hello, on_gpu=False)
        welcome = replace(welcome, to_gpu=on_gpu or (membership is not None and membership.backend == "nccl"))
    else:
        communicators = take_communicators(membership, config.key, config.options.collective_timeout)
        rank, world_size = communicators.rank, communicators.world_size
        hellos = communicators.gather_objects(hello)
        answer = None
        if hellos is not None:
            answer, lead = _welcome(
                config, hellos, counters=counters, measured=measured, resumes=resumes, peers=communicators.peers
            )
        welcome = communicators.broadcast_object(answer)
        communicators.set_timeout(welcome.options.collective_timeout)
    if welcome.error is not None:
        if communicators is not None:
            communicators.free.set()
        raise welcome.error
    assert welcome.template is not None
    rounds: Rounds
    if communicators is None:
        assert lead is not None
        rounds = RoundsAlone(lead, counters)
    else:
        depth = welcome.options.depth
        rounds = SharedRounds(config.loader, communicators, depth=depth, counters=counters, lead=lead)
    return Opened(
        template=welcome.template, options=welcome.options, to_gpu=welcome.to_gpu, rounds=rounds, lead=lead,
        communicators=communicators, world=world, rank=rank, world_size=world_size,
    )  # fmt: skip


def _welcome(
    config: StreamConfig,
    hellos: Sequence[_Hello],
    *,
    counters: Counters,
    measured: Measured,
    resumes: bool,
    peers: NDArray[np.int64] | None = None,
) -> tuple[_Welcome, Lead | None]:
    """What the lead answers to all ranks, and how it decides from then on. Errors are for all ranks."""
    first = hellos[0].config
    options = first.options
    num_peers = 1 if peers is None else peers.shape[1]
    contributors = hellos[::num_peers]
    try:
        _check_hellos(hellos, num_peers)
        options.check_world(len(contributors))
        template = _common_template(contributors)
        asker = None
        if first.address is not None and first.balance and len(contributors) > 1:
            asker = partial(_make_asker, config, options)
            if options.require_service:
                asker(lambda: None).require()
        kernels = None
        if first.balance and len(contributors) > 1:
            kernels = Kernels(config.loader, wait=options.memory_caps is not None or options.min_samples > 0 or resumes)
        lead = Lead(
            config.loader, options=options, balance=first.balance,
            nodes=[one.node for one in contributors], template=template, counters=counters, asker=asker,
            kernels=kernels, peers=peers if num_peers > 1 else None, learns=lambda: measured.learns,
        )  # fmt: skip
    except Exception as error:
        return _Welcome(options=options, error=error), None
    return _Welcome(options=options, template=template, to_gpu=any(one.on_gpu for one in hellos)), lead


def _make_asker(config: StreamConfig, options: BalanceOptions, woken: Any) -> Asker:
    from trainer_client.balancing.asking import Asker

    assert config.address is not None
    assert config.credentials is not None
    return Asker(
        config.address, config.credentials, job=config.job, group=config.group, loader=config.loader,
        timeout=options.timeout.total_seconds(), woken=woken,
    )  # fmt: skip


def _check_hellos(hellos: Sequence[_Hello], num_peers: int) -> None:
    first = hellos[0]
    for number, hello in enumerate(hellos):
        rank = number // num_peers
        if hello.config.loader != first.config.loader:
            raise ProgramOrderError(
                f"rank {rank} begins the loader {hello.config.loader!r} while rank 0 begins {first.config.loader!r}; "
                "begin loaders for the first time in the same order on all ranks"
            )
        if hello.version != first.version:
            raise ValueError(
                f"rank {rank} runs evenkeel {hello.version}, rank 0 runs {first.version}; install the same version on "
                "all ranks (the balancer may be of another)"
            )
        leader = hellos[rank * num_peers]
        if (hello.template is None) != (leader.template is None):
            ended, more = ("no", "one") if hello.template is None else ("a", "none")
            raise PeersDifferError(
                f"a rank that trains the same batches as rank {rank} has {ended} first batch where that has {more}; "
                "let them load the same samples in the same order, as by mesh['dp'].get_local_rank()"
            )


def _common_template(hellos: Sequence[_Hello]) -> FlatBatch:
    """An empty batch of the one schema that the ranks' first batches have."""
    known = [(rank, hello) for rank, hello in enumerate(hellos) if hello.template is not None]
    if not known:
        raise NoDataError
    known = [one for one in known if one[1].has_samples] or known
    first_rank, first = known[0]
    assert first.template is not None
    for rank, hello in known[1:]:
        assert hello.template is not None
        if hello.template.schema.lines != first.template.schema.lines:
            raise mismatch(first_rank, first.template.schema.lines, rank, hello.template.schema.lines)
    return first.template
