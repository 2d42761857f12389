"""The trainer's handle on balancing."""

from __future__ import annotations

import atexit
import os
import weakref
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evenkeel.addresses import check_address
from trainer_client.balancing.batches import BatchSpec, flatten
from trainer_client.balancing.costs.base import Cost
from trainer_client.balancing.errors import NoDataError
from trainer_client.balancing.groups import Ranks, read_membership
from trainer_client.balancing.options import BalanceOptions, StreamConfig
from trainer_client.balancing.rounds import Ticket
from trainer_client.balancing.stream import BatchStream, check_device
from trainer_client.launchers import read_launch

if TYPE_CHECKING:  # grpcio is needed only where a service is
    from evenkeel.credentials import Credentials

_open_balancers: weakref.WeakSet[Balancer] = weakref.WeakSet()


class Balancer:
    """Balances the batches of a data-parallel group of ranks.

    Make one on every rank with `connect`, `embedded`, `off` or `from_env`; rank 0's arguments hold for all. Nothing is
    connected and no thread starts before the first batch is submitted.

    Most loops use `BalancedLoader`. A loop of its own calls `submit` for a batch as early as it has it on the host and
    `redistribute` when it needs it, in the same order. A rank whose data has ended submits None; `redistribute` returns
    None when the loops of all ranks are over. Who leaves a loop before calls `leave`.
    """

    def __init__(
        self,
        *,
        address: str | None,
        job: str,
        group: str | None,
        options: BalanceOptions | None,
        process_group: Ranks | None,
        peers: Ranks | None = None,
        balance: bool = True,
        credentials: Credentials | None = None,
    ) -> None:
        membership = read_membership(process_group, peers)  # also what a default group would hide
        group = membership.group_name if group is None else group
        names: dict[str, Any] = {"job": job, "group": group}
        for field, value in names.items():
            if not isinstance(value, str) or not value or len(value) > 200 or not value.isprintable():
                raise ValueError(f"{field} is {value!r}; give a name of 1 to 200 printable characters")
        read_launch()  # what it says in vain is refused here, where all ranks are, not where rank 0 names a session
        if address is not None:
            if credentials is None:
                from evenkeel.credentials import Credentials

                credentials = Credentials.from_env()
            credentials.check(address)
        self._config = StreamConfig(
            job=job, group=group, address=address, balance=balance, options=options or BalanceOptions(),
            process_group=process_group, peers=peers, credentials=credentials,
        )  # fmt: skip
        self._streams: dict[str, BatchStream] = {}
        self._specs: dict[str, BatchSpec | None] = {}  # of what was submitted by hand
        _open_balancers.add(self)

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        job: str,
        group: str | None = None,
        options: BalanceOptions | None = None,
        process_group: Ranks | None = None,
        peers: Ranks | None = None,
        credentials: Credentials | None = None,
    ) -> Balancer:
        """A balancer that asks a service, and plans on rank 0 while the service is slow or gone.

        Args:
            address: `host:port` of the service, with or without `grpc://`; the host may be a name with the addresses of
                several balancers, any of which will do. Of several without a common name, `IP:port,IP:port`.
            job: Name of the training job.
            group: Name of the data-parallel group at the service; default: `default`, or `from-rank-N` for a group
                that is not the only one of its job.
            options: How to balance.
            process_group: The ranks that balance together, this one among them: a process group, or the data-parallel
                dimensions of a mesh, as `mesh["dp"]`; default: all.
            peers: The ranks that train the same batches as this one (tensor, pipeline, context parallelism), which
                then always do the same; default: those of the other dimensions of the mesh that `process_group` was
                cut from. With process groups, pass theirs.
            credentials: TLS and token files of this rank's host (`evenkeel.credentials.Credentials`); unlike
                the other arguments they are not taken from rank 0. Default: those of this rank's environment
                (`EVENKEEL_TLS`, `EVENKEEL_TLS_CA`, `EVENKEEL_TLS_CERTIFICATE`, `EVENKEEL_TLS_KEY`,
                `EVENKEEL_TOKEN_FILE`); `Credentials()` is plaintext without a token, whatever the environment says.

        Raises:
            ValueError: If the address, the job or the group is malformed, a file of the credentials cannot be used, or
                it is not clear which ranks balance.
        """
        return cls(
            address=check_address(address), job=job, group=group, options=options, process_group=process_group,
            peers=peers, credentials=credentials,
        )  # fmt: skip

    @classmethod
    def embedded(
        cls,
        *,
        job: str = "job",
        group: str | None = None,
        options: BalanceOptions | None = None,
        process_group: Ranks | None = None,
        peers: Ranks | None = None,
    ) -> Balancer:
        """A balancer without a service: rank 0 of the group plans."""
        return cls(address=None, job=job, group=group, options=options, process_group=process_group, peers=peers)

    @classmethod
    def off(
        cls,
        *,
        options: BalanceOptions | None = None,
        process_group: Ranks | None = None,
        peers: Ranks | None = None,
    ) -> Balancer:
        """No balancing: every sample stays at home, and the reports tell how uneven that is."""
        return cls(
            address=None, job="off", group=None, options=options, process_group=process_group, peers=peers,
            balance=False,
        )  # fmt: skip

    @classmethod
    def from_env(
        cls,
        *,
        job: str | None = None,
        group: str | None = None,
        options: BalanceOptions | None = None,
        process_group: Ranks | None = None,
        peers: Ranks | None = None,
    ) -> Balancer:
        """What the environment of rank 0 says.

        `EVENKEEL_BALANCER` is `host:port`, `embedded` (also when unset) or `off`. Where no argument names the job,
        `EVENKEEL_JOB` does, else its launcher: the name of the run under Ray Train, name and number of the job under
        Slurm (`NAME-ID`). The credentials are those of each rank's own environment: `EVENKEEL_TLS`, `EVENKEEL_TLS_CA`,
        `EVENKEEL_TLS_CERTIFICATE`, `EVENKEEL_TLS_KEY` and `EVENKEEL_TOKEN_FILE`.

        Raises:
            ValueError: If a variable holds what cannot be used; the message names it.
        """
        where = os.environ.get("EVENKEEL_BALANCER", "").strip() or "embedded"
        name = job or read_launch().job or "job"
        try:
            address = None if where in ("embedded", "off") else check_address(where)
        except ValueError as error:
            raise ValueError(f"EVENKEEL_BALANCER: {error}; or 'embedded', or 'off'") from None
        return cls(
            address=address, job=name, group=group, options=options, process_group=process_group, peers=peers,
            balance=where != "off",
        )  # fmt: skip

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that balance together, as ranks of the job."""
        return read_membership(self._config.process_group, self._config.peers).ranks

    @property
    def options(self) -> BalanceOptions:
        """How its streams balance; rank 0's hold for all ranks."""
        return self._config.options

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """This rank among those that balance together, and how many they are."""
        return read_membership(self._config.process_group, self._config.peers).place

    def stream(self, loader: str = "train") -> BatchStream:
        """The stream of batches of one loader; each loader has rounds of its own."""
        if loader not in self._streams:
            self._streams[loader] = BatchStream(replace(self._config, loader=loader))
        return self._streams[loader]

    def submit(
        self,
        batch: Any,
        *,
        cost: Cost,
        memory: Cost | None = None,
        users: Cost | None = None,
        spec: BatchSpec | None = None,
        loader: str = "train",
    ) -> Ticket:
        """Announces a batch to the balancer and returns at once; see `BatchStream.submit_window`.

        The first one begins a loop, and ends a `BalancedLoader`'s of this name that is not over.

        Args:
            batch: The host's batch; None when this rank's data has ended, until all ranks' has.
            cost: From the batch to the predicted work of each sample.
            memory: From the batch to what each sample adds to the memory caps; default: its bytes.
            users: From the batch to whose each sample is; see `BalancedLoader`.
            spec: How to read the batch's fields.
            loader: Name of the loop; loops that are under way at the same time need different ones.
        """
        stream = self.stream(loader)
        stream.go_on_by_hand()
        if batch is not None:
            self._specs[loader] = spec
        try:
            batches = [] if batch is None else [batch]
            return stream.submit_window(batches, cost=cost, memory=memory, users=users, spec=spec)
        except NoDataError:
            return Ticket.of_nothing()

    def redistribute(
        self,
        batch: Any,
        ticket: Ticket,
        *,
        spec: BatchSpec | None = None,
        device: torch.device | str | None = None,
        loader: str = "train",
    ) -> Any:
        """Agrees with all ranks, then moves the samples.

        Args:
            batch: The submitted batch, or its copy on a device; None if None was submitted.
            ticket: What `submit` returned for it.
            spec: As submitted; default: that.
            device: Where the result shall be; default: where the batch is.
            loader: As submitted.

        Returns:
            The batch that this rank trains: samples of all ranks, sorted by (home, index at home). None when the loops
            of all ranks are over: no rank has data left, or one has left its loop.

        Raises:
            ValueError: If this rank does not have the device.
            ProgramOrderError: If one redistributes its batches in another order than it submitted them; on all ranks.
        """
        check_device(device)
        stream = self.stream(loader)
        spec = self._specs.get(loader) if spec is None else spec
        if stream.directive(ticket).ended:
            return None
        if batch is not None:
            # of a batch without samples the ticket has the fields that other ranks know
            samples = ticket.contribution.samples
            lengths = np.asarray(samples.lengths, dtype=np.int64) if len(samples) else None
            try:
                ticket.flats = (flatten(batch, spec, lengths=lengths, allow_sync=lengths is None),)
            except Exception:
                stream.leave()  # the others have begun to move, which is done here with what was submitted
                raise
        return stream.start(ticket, device).wait().unflatten(spec)

    def leave(self, *, loader: str = "train") -> None:
        """Leaves a loop of submissions before its end, or ends one that may be followed by another.

        The loops of all ranks end together: `redistribute` returns None on ranks that go on, once what was agreed on
        before has been moved. The next `submit` begins a new loop. Does nothing where a loop has ended.
        """
        if loader in self._streams:
            self._streams[loader].leave()

    def close(self) -> None:
        """Leaves all sessions and ends all threads, within a bounded time. A later loop opens what it needs again."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def __enter__(self) -> Balancer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@atexit.register
def _close_all() -> None:
    for balancer in list(_open_balancers):
        balancer.close()


# Threads and streams are the parent's: a child that exits must not wait for them, nor leave the session.
os.register_at_fork(after_in_child=_open_balancers.clear)
