"""What the ranks settle once, when their stream opens, beginning with its name."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel import __version__
from evenkeel.restarts import restart_text
from trainer_client.balancing.agreement import ProgramOrderError
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.groups import Groups
from trainer_client.balancing.kernels import Kernels
from trainer_client.balancing.launchers import read_launch
from trainer_client.balancing.membership import Ranks, take_seat
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.telling import raise_mismatch, require_service
from trainer_client.balancing.tracing import StreamTracer, tracer_of
from trainer_client.balancing.votes import VOTE_BYTES
from trainer_client.process_groups import node_name

if TYPE_CHECKING:  # grpcio is needed only where a service is
    from trainer_client.balancing.service import Connection, Credentials

_openings: Counter[tuple[str, str, str]] = Counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionName:
    """What names a session at the service.

    Attributes:
        job: The training job.
        group: The data-parallel group of ranks that balances together.
        loader: The stream of batches.
        run_id: One launch of the job; equal across the launcher's restarts.
        restart_count: The launcher's restarts so far.
        opening: Drawn for each incarnation: a launcher may start a run again without counting a restart, when its
            members change or with the run id of an earlier launch.
    """

    job: str
    group: str
    loader: str
    run_id: str
    restart_count: int
    opening: int


def name_session(job: str, group: str, loader: str) -> SessionName:
    """Names a new incarnation of a stream; called on rank 0, which broadcasts it.

    The launcher names the run, so that a restart takes over from what it replaces. A stream opened again by the same
    processes is another incarnation, so a count of openings is part of the id.
    """
    key = (job, group, loader)
    _openings[key] += 1
    launch = read_launch()
    again = f"/{_openings[key]}" if _openings[key] > 1 else ""
    return SessionName(
        job=job,
        group=group,
        loader=loader,
        run_id=launch.run_id + again,
        restart_count=launch.restart_count,
        opening=secrets.randbits(63) | 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """What a stream is made from. Rank 0's address, options and session name hold for all ranks.

    Attributes:
        job: The training job.
        group: The data-parallel group within the job.
        loader: The stream's name within the group.
        address: `host:port` of the balancer; None: embedded.
        balance: False: every sample stays at home.
        options: How to balance.
        process_group: The ranks that balance together; None: the default group.
        peers: The ranks that train the same batches; see `read_membership`.
        credentials: What this rank shows to the balancer; each rank its own.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What all ranks have settled.

    Attributes:
        template: An empty batch.
        options: Rank 0's.
        balance: Whether samples are balanced.
        connection: To the service; None without one, and on ranks whose peers speak to it.
        nodes: (world size,) host of each rank; None when there is only one.
        node_names: Of each rank.
        tracer: Of the stream's rounds; None when tracing is off.
        to_gpu: Batches go to the ranks' GPUs where no device is named.
        kernels: This rank's, and what is known of the others'; None where nothing is ever moved.
    """

    template: FlatBatch
    options: BalanceOptions
    balance: bool
    connection: Connection | None
    nodes: NDArray[np.int32] | None
    node_names: list[str]
    tracer: StreamTracer | None
    to_gpu: bool
    kernels: Kernels | None


class NoDataError(Exception):
    """No rank has had any batch yet, so nobody knows what an empty one looks like."""


def goes_to_gpu(flat: FlatBatch | None, groups: Groups) -> bool:
    """Whether batches go to the ranks' GPUs where no device is named. Collective; the same on all ranks.

    They do if some rank's batches are on one, as a rank without any must take its share where the others do, and if the
    ranks can exchange tensors of GPUs only, as after `init_process_group("nccl")`.

    Args:
        flat: This rank's first batch; None if it has none.
        groups: The ranks.
    """
    on_gpu = flat is not None and flat.device is not None and flat.device.type == "cuda"
    return any(groups.gather_objects(on_gpu or groups.needs_gpu))


def wire_fields(template: FlatBatch) -> list[tuple[str, str, str, tuple[int, ...]]]:
    """(path, dtype, kind, shape) as the service sees the batch: a jagged field is what has lengths of its own."""
    fields = [
        (leaf.path, str(leaf.dtype).removeprefix("torch."), "dense", leaf.shape)
        for leaf in template.structure.leaves
        if leaf.rows
    ]
    for index, path in enumerate(template.structure.columns):
        dtypes = [str(leaf.dtype).removeprefix("torch.") for leaf in template.structure.leaves if index in leaf.columns]
        fields.append((path, "+".join(dtypes), "jagged", ()))
    return fields


def agree_on_template(flat: FlatBatch | None, groups: Groups, name: str) -> FlatBatch:
    """An empty batch of the one schema that all ranks' batches have. Collective.

    Args:
        flat: This rank's first batch; None if it has none.
        groups: The ranks.
        name: Of the loader whose stream opens.

    Raises:
        ProgramOrderError: If they begin different loaders; on all ranks.
        SchemaMismatchError: If their batches differ in their fields; on all ranks.
        NoDataError: If none has a batch; on all ranks.
    """
    told = (None, 0) if flat is None else (flat.schema.lines, flat.num_samples)
    said = groups.gather_objects((name, *told))
    for rank, (other, _, _) in enumerate(said):
        if other != said[0][0]:
            raise ProgramOrderError(
                f"rank {rank} begins the loader {other!r} while rank 0 begins {said[0][0]!r}; begin loaders for the "
                "first time in the same order on all ranks"
            )
    schemas = [lines for _, lines, _ in said]
    # Ranks whose batch is empty have no say, as it may have been padded to nothing; where all are, the first will do.
    holding = [lines if samples else None for _, lines, samples in said]
    known = [lines for lines in holding if lines is not None] or [lines for lines in schemas if lines is not None]
    if not known:
        raise NoDataError
    if any(lines not in (None, known[0]) for lines in holding):
        raise_mismatch(holding)
    own = None if flat is None or flat.schema.lines != known[0] else flat.empty()
    if all(lines == known[0] for lines in schemas):
        assert own is not None
        return own
    return next(other for other in groups.gather_objects(own) if other is not None)


def number_nodes(names: list[str]) -> NDArray[np.int32] | None:
    """The host of each rank as a number; None when there is only one."""
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([order[name] for name in names], dtype=np.int32) if len(order) > 1 else None


def connect(
    address: str,
    session: SessionName,
    *,
    groups: Groups,
    options: BalanceOptions,
    template: FlatBatch,
    credentials: Credentials | None,
) -> Connection:
    """This rank's way to the service, not yet started. Collective.

    Args:
        address: Where the balancer is.
        session: What all ranks call themselves.
        groups: The ranks.
        options: Rank 0's options.
        template: An empty batch.
        credentials: What this rank shows to the balancer; None: what its environment says, as where rank 0 alone knew
            of a balancer.

    Raises:
        ModuleNotFoundError: If grpcio is not installed.
        ValueError: If a variable of the credentials is malformed.
    """
    try:
        from trainer_client.balancing.service import Connection, Credentials, join_request
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}; a balancer service needs grpcio: pip install 'evenkeel[trainer]'"
        ) from error
    if credentials is None:
        credentials = Credentials.from_env()
    join = join_request(
        session,
        world_size=groups.world_size,
        rank=groups.rank,
        node=node_name(),
        options=options.of_rounds,
        schema_hash=template.schema.hash,
        schema_fields=wire_fields(template),
        roles=template.structure.roles,
        window=options.window,
    )
    return Connection(
        address,
        join,
        join_timeout=max(1.0, options.timeout.total_seconds()),
        credentials=credentials,
        seat=take_seat(groups, options),
    )


def check_versions(versions: Sequence[str]) -> None:
    """Checks that all ranks run the same version of Evenkeel, since their votes must look alike.

    Raises:
        ValueError: If they do not; it names the first rank that differs from rank 0.
    """
    for rank, version in enumerate(versions):
        if version != versions[0]:
            raise ValueError(
                f"rank {rank} runs evenkeel {version}, rank 0 runs {versions[0]}; install the same version on all "
                "ranks (the balancer may be of another)"
            )


def meet(
    config: StreamConfig,
    groups: Groups,
    flat: FlatBatch | None,
    device: torch.device | str | None,
    *,
    resumes: bool = False,
) -> Opened:
    """Meets all ranks once: options, session, schema; a rank without any batch gets an empty one. Collective.

    Args:
        config: This rank's.
        groups: The ranks.
        flat: This rank's first batch; None if it has none.
        device: Where batches will be trained.
        resumes: The first pass goes on from a state, and is to do what it would have done: it waits for kernels.
    """
    template = agree_on_template(flat, groups, config.loader)
    to_gpu = goes_to_gpu(flat, groups)
    named = name_session(config.job, config.group, config.loader) if groups.rank == 0 else None
    address, balance, options, session = groups.broadcast((config.address, config.balance, config.options, named))
    options.check_world(groups.world_size)  # after the broadcast, so that all ranks raise what is wrong with rank 0's
    assert session is not None
    tracer = tracer_of(
        job=session.job,
        group=session.group,
        loader=session.loader,
        run=f"{session.run_id}:{restart_text(session.restart_count)}",
        rank=groups.rank,
    )
    connections: list[Connection] = []
    kernels: Kernels | None = None

    def reach(where: str) -> None:
        connection = connect(
            where, session, groups=groups.leaders, options=options, template=template, credentials=config.credentials
        )
        connection.start()
        connections.append(connection)
        try:
            if options.require_service:
                require_service(groups.leaders, connection)
        except BaseException:
            connection.close()
            raise

    if balance and groups.world_size > 1:
        if address is not None:
            groups.led(partial(reach, address))
        kernels = Kernels(
            config.loader, groups.rank, "cuda" if device is None and to_gpu else device,
            wait=options.memory_caps is not None or options.min_samples > 0 or resumes,
        )  # fmt: skip
    told: list[Any] = groups.gather_objects((node_name(), f"{__version__}, votes of {VOTE_BYTES} bytes"))
    check_versions([one[1] if isinstance(one, tuple) else "an older one" for one in told])
    names = [one[0] for one in told]
    return Opened(
        template=template,
        options=options,
        balance=balance,
        connection=connections[0] if connections else None,
        nodes=number_nodes(names),
        node_names=names,
        tracer=tracer,
        to_gpu=to_gpu,
        kernels=kernels,
    )
