"""One stream of batches of a group of ranks: submit early, redistribute late."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel import __version__
from trainer_client.balancing.alone import decide_alone
from trainer_client.balancing.embedded import RoundData
from trainer_client.balancing.groups import Groups, node_name
from trainer_client.balancing.identity import SessionName, name_session
from trainer_client.balancing.membership import Ranks
from trainer_client.balancing.opening import agree_on_template, node_numbers, warm_up, wire_fields
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.peers import Twin
from trainer_client.balancing.tickets import Outcome, Ticket, read_costs
from trainer_client.balancing.worker import RoundWorker
from trainer_client.batches import BatchSpec, FlatBatch, flatten
from trainer_client.redistribution import Pending, start
from trainer_client.redistribution.regroup import pick
from trainer_client.tracing import RoundTrace, StreamTracer, tracer_of

if TYPE_CHECKING:
    from trainer_client.service import Connection, Credentials

Cost = Callable[[Any], Any]


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


class BatchStream:
    """Rounds of one loader. All ranks submit and redistribute the same number of batches in the same order."""

    def __init__(self, config: StreamConfig) -> None:
        self._config = config
        self._options = config.options
        self._next_round = 0
        self._template: FlatBatch | None = None
        self._worker: RoundWorker | None = None
        self._connection: Connection | None = None
        self._groups: Groups | None = None
        self._cost_dtype: np.dtype[Any] = np.dtype(np.int64)
        self._tracer: StreamTracer | None = None
        self._moves_started = 0
        self._moves_ended = 0

    @property
    def options(self) -> BalanceOptions:
        """Rank 0's options once the stream is open, before that this rank's."""
        return self._options

    @property
    def worker(self) -> RoundWorker:
        """The worker of an open stream, with its counters and the breaker's state."""
        if self._worker is None:
            raise RuntimeError(f"the stream {self._config.loader!r} is not open; submit a batch first")
        return self._worker

    def submit(
        self,
        batch: Any,
        *,
        cost: Cost,
        memory: Cost | None = None,
        spec: BatchSpec | None = None,
        device: torch.device | str | None = None,
    ) -> tuple[FlatBatch, Ticket]:
        """Announces a batch: costs and lengths go to the service, nothing moves yet.

        The first submission opens the stream, which is collective. Later ones return at once, unless `depth` batches
        are already in flight.

        Args:
            batch: The host's batch.
            cost: From the batch to the predicted work of each sample.
            memory: From the batch to what each sample adds to the memory caps; default: its bytes.
            spec: How to read the batch's fields.
            device: Where the batches will be trained; its kernels are compiled when the stream opens.

        Returns:
            The flattened batch and the round's ticket.

        Raises:
            ValueError: If the batch or its costs cannot be read; the message names the field.
            SchemaMismatchError: If the ranks' batches differ in their fields.
        """
        flats, ticket = self.submit_window([batch], cost=cost, memory=memory, spec=spec, device=device)
        return flats[0], ticket

    def submit_window(
        self,
        batches: Sequence[Any],
        *,
        cost: Cost,
        memory: Cost | None = None,
        spec: BatchSpec | None = None,
        device: torch.device | str | None = None,
    ) -> tuple[tuple[FlatBatch, ...], Ticket]:
        """Announces the batches of one window, which are balanced together; otherwise as `submit`.

        Args:
            batches: One to `BalanceOptions.window` batches of the host, in the order in which they are to be trained.
            cost, memory, spec, device: As for `submit`.

        Returns:
            The flattened batches and the round's ticket.

        Raises:
            ValueError: If there are more batches than the window has, or for what `submit` raises it.
            SchemaMismatchError: If the ranks' batches differ in their fields.
        """
        flats = tuple(flatten(batch, spec) for batch in batches)
        self._open(flats[0] if flats else None, device)
        trace = self._begin_trace()
        assert self._groups is not None
        if not 1 <= len(flats) <= self._options.window:
            raise ValueError(f"{len(flats)} batches for a window of {self._options.window}; set BalanceOptions.window")
        # sums over all ranks and batches stay exact
        shares = self._groups.world_size * self._options.window
        costs, memories, problem = [], [], ""
        for batch, flat in zip(batches, flats, strict=True):
            values, its_problem = read_costs(cost(batch), flat.num_samples, world_size=shares)
            costs.append(values)
            problem = problem or its_problem
            if self._options.memory_caps is not None:
                held, its_problem = (
                    (flat.sizes, "")
                    if memory is None
                    else read_costs(memory(batch), flat.num_samples, what="memory", world_size=shares)
                )
                memories.append(held.astype(np.float64))
                problem = problem or its_problem
        data = RoundData(
            costs=_joined(costs),
            lengths=_joined([flat.lengths for flat in flats]),
            sizes=_joined([flat.sizes for flat in flats]),
            memory=_joined(memories) if memories else None,
            batch_sizes=tuple(flat.num_samples for flat in flats),
        )
        self._cost_dtype = data.costs.dtype
        return flats, self._enqueue(flats[0], data, problem, exhausted=False, trace=trace)

    def submit_exhausted(self, device: torch.device | str | None = None) -> tuple[FlatBatch, Ticket]:
        """Takes part in a round after this rank's data has ended, with no sample.

        Raises:
            NoDataError: On all ranks, if none of them has ever had a batch.
        """
        self._open(None, device)
        trace = self._begin_trace()
        flat = self._template
        assert flat is not None
        held = np.zeros(0, dtype=np.float64) if self._options.memory_caps is not None else None
        costs = np.zeros(0, dtype=self._cost_dtype)
        data = RoundData(costs=costs, lengths=flat.lengths, sizes=flat.sizes, memory=held)
        return flat, self._enqueue(flat, data, "", exhausted=True, trace=trace)

    def start(
        self,
        flat: FlatBatch | Sequence[FlatBatch],
        ticket: Ticket,
        device: torch.device | str | None = None,
        *,
        batch: int = 0,
    ) -> Pending:
        """Waits for the agreement on a round (normally long there) and starts to move its samples.

        Args:
            flat: The flattened batch, or all flattened batches of the window.
            ticket: What `submit` or `submit_window` returned for it.
            device: Where the result shall be; default: where the batch is.
            batch: Which batch of the window, 0 to `len(outcome.reports)` - 1; each once, in order, on all ranks.

        Returns:
            The move in flight; its `wait()` gives the batch that this rank trains, sorted by (home, index at home).
        """
        outcome = self.outcome(ticket)
        assert self._groups is not None
        if ticket.trace is not None:
            ticket.trace.moving()
        started = time.perf_counter()
        self._moves_started += 1
        pending = start(
            self._batch_of(outcome, [flat] if isinstance(flat, FlatBatch) else flat, batch),
            outcome.piece.slices[batch],
            group=self._groups.data if outcome.verdict.moved else None,
            device=device,
            method=self._options.method,
        )
        self.worker.counters.redistribution_seconds += time.perf_counter() - started
        pending.then(self._move_ended if ticket.trace is None else partial(self._move_ended, ticket.trace))
        return pending

    def _move_ended(self, trace: RoundTrace | None = None) -> None:
        self._moves_ended += 1
        if trace is not None:
            trace.moved()

    def _batch_of(self, outcome: Outcome, flats: Sequence[FlatBatch], batch: int) -> FlatBatch:
        """This rank's samples that are trained in a batch of the window, whichever rank trains them."""
        assert self._template is not None
        if outcome.piece.steps is None:
            return flats[batch] if batch < len(flats) else self._template
        begins = np.cumsum([0, *(flat.num_samples for flat in flats)])
        chosen = [np.flatnonzero(outcome.piece.steps[begins[i] : begins[i + 1]] == batch) for i in range(len(flats))]
        return pick(flats, chosen) if any(samples.size for samples in chosen) else self._template

    def outcome(self, ticket: Ticket) -> Outcome:
        """What all ranks agreed on; waits for it.

        Raises:
            RuntimeError: If the process group failed, or what else ended the agreement.
            TimeoutError: If it did not come within the timeouts of its waits and collectives.
        """
        started = time.perf_counter()
        exposed = ticket.trace is not None and not ticket.future.done()
        since = time.time_ns() if exposed else 0
        try:
            return ticket.future.result(self._options.patience)
        finally:
            if exposed and ticket.trace is not None:
                ticket.trace.part("exposed wait", since)
            self.worker.counters.exposed_seconds += time.perf_counter() - started

    def close(self) -> None:
        """Leaves the session and ends the threads; the process groups are kept for the next stream of these ranks."""
        rounds = None if self._worker is None else self._worker.close(seconds=5.0)
        if self._connection is not None:
            self._connection.close()
        if self._groups is not None and rounds is not None and self._moves_started == self._moves_ended:
            self._groups.leave(rounds, self._moves_ended)
        self._groups, self._worker, self._connection = None, None, None

    # ------------------------------------------------------------------ opening

    def _open(self, flat: FlatBatch | None, device: torch.device | str | None) -> None:
        """Meets all ranks once: options, session, schema; a rank without any batch gets an empty one. Collective."""
        if self._worker is not None:
            return
        config = self._config
        if self._groups is None:
            self._groups = Groups.create(config.process_group, config.options.group_timeout, config.peers)
        groups = self._groups
        self._template = template = agree_on_template(flat, groups)
        named = None
        if groups.rank == 0:
            config.options.check_world(groups.world_size)
            named = name_session(config.job, config.group, config.loader)
        address, balance, self._options, session = groups.broadcast(
            (config.address, config.balance, config.options, named)
        )
        assert session is not None
        if balance and groups.world_size > 1:
            if address is not None:
                groups.led(lambda: self._connect(address, session, groups.leaders, template))
            warm_up(groups, device)
        self._worker = RoundWorker(
            name=config.loader,
            groups=groups,
            options=self._options,
            connection=self._connection,
            balance=balance,
            nodes=node_numbers(groups),
        )
        self._tracer = tracer_of(
            job=session.job,
            group=session.group,
            loader=session.loader,
            run=f"{session.run_id}:{session.restart_count}",
            rank=groups.rank,
        )

    def _begin_trace(self) -> RoundTrace | None:
        return None if self._tracer is None else self._tracer.begin(self._next_round)

    def _connect(self, address: str, session: SessionName, groups: Groups, template: FlatBatch) -> None:
        try:
            from trainer_client.balancing.nodes import take_seat
            from trainer_client.service import Connection, join_request
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error}; a balancer service needs grpcio: pip install 'evenkeel[trainer]'"
            ) from error
        options = self._options
        join = join_request(
            job=session.job,
            group=session.group,
            loader=session.loader,
            run_id=session.run_id,
            restart_count=session.restart_count,
            opening=session.opening,
            world_size=groups.world_size,
            rank=groups.rank,
            node=node_name(),
            strategy=options.strategy,
            counts=options.counts,
            tolerance=options.tolerance,
            speeds=options.speeds,
            memory_caps=options.memory_caps,
            schema_hash=template.schema.hash,
            schema_fields=wire_fields(template),
            client_version=__version__,
            window=options.window,
        )
        self._connection = Connection(
            address,
            join,
            join_timeout=max(1.0, options.timeout.total_seconds()),
            credentials=self._config.credentials,
            seat=take_seat(groups, options),
        )
        self._connection.start()

    # ------------------------------------------------------------------ a round

    def _enqueue(
        self, flat: FlatBatch, data: RoundData, problem: str, *, exhausted: bool, trace: RoundTrace | None
    ) -> Ticket:
        assert self._groups is not None
        assert self._worker is not None
        number = self._next_round
        self._next_round += 1
        asked = self._worker.asks(number)
        timeout = self._options.timeout.total_seconds()
        ticket = Ticket(
            round=number,
            data=data,
            schema=flat.schema,
            exhausted=exhausted,
            problem=problem,
            asked=asked,
            deadline=time.monotonic() + timeout,
            twin=None
            if self._groups.peers is None
            else Twin.of(number, [flat], data.lengths, exhausted=exhausted, values=number == 0),
            trace=trace,
        )
        if asked:
            assert self._connection is not None
            self._connection.submit(
                number,
                costs=data.costs,
                lengths=data.lengths,
                sizes=data.sizes,
                memory=data.memory,
                batch_sizes=data.batch_sizes if self._options.window > 1 else (),
                exhausted=exhausted,
                # The service gives up first, so that its answer still arrives in time.
                timeout_ms=max(1, int(750 * timeout)),
                traceparent="" if trace is None else trace.traceparent,
            )
        if trace is not None:
            trace.submitted()
        if self._groups.world_size == 1:
            ticket.future.set_result(decide_alone(ticket, self._options))
        else:
            self._worker.put(ticket)
        return ticket


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
