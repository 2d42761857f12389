"""What each rank says about a round before anything moves: one fixed struct per rank, all-gathered."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.samples import Lengths, RankSamples
from evenkeel.partitioning.slices import Slice
from trainer_client.balancing.batches.shared import digest

if TYPE_CHECKING:  # they know of votes
    from trainer_client.balancing.batches import Schema
    from trainer_client.balancing.service import ServiceDecision
    from trainer_client.balancing.tickets import Leaving, Ticket

_MASK = (1 << 64) - 1
_RANK_BITS = 20  # of a rank's number in a checksum; the batch of a window stands above


class Held(IntEnum):
    """What a rank holds of the service's decision."""

    NOTHING = 0
    BALANCED = 1
    IDENTITY = 2  # decided by the service, and better not balanced by anyone (no plan within the memory caps)
    UNDECIDED = 3  # the service answered that it could not decide (a rank late, draining, overloaded)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchVote:
    """One rank's part in one batch of a window.

    Attributes:
        samples: Samples that this rank loaded for it.
        received: Samples that this rank would train in it under the decision that it holds. Parts of split samples
            count, and those of own samples beyond the first are taken off, modulo 2^64: all ranks' add up to samples.
        load: Sum of the costs of the samples loaded.
        heaviest: The largest of them.
    """

    samples: int = 0
    received: int = 0
    load: float = 0.0
    heaviest: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One rank's part in the agreement on a round.

    Attributes:
        round: Round number; the same on all ranks, as each vote ends a round.
        pass_number: Which pass over the stream's batches the round is of; the same on all ranks too.
        left: This rank has left its loop; it takes part in no further round of the pass.
        out_of_turn: It left because its loop took batches in another order than it submitted them.
        drop_last: This rank's loader drops global batches that have too few samples for all ranks.
        taken: With `left`, how many batches its loop had got.
        held: What this rank holds of the service's decision.
        instance: The balancer's instance that decided.
        digest: 64 bits of the digest of the whole plan.
        moved: Samples that the plan moves, over all ranks.
        checksum: What this rank sends less what it expects to receive, hashed linearly; cancels over all ranks
            if and only if (but for chance of 2^-64) the slices of all ranks fit together.
        samples: Samples that this rank holds.
        exhausted: This rank's data has ended.
        asked: This rank sent the round to the service.
        ready: This rank's stream to the service is joined.
        costs_valid: This rank's costs can be balanced.
        costs_float: This rank's costs are float64, not int64.
        schema: 64 bits of the hash of the batch's schema.
        load: Sum of this rank's costs.
        heaviest: This rank's largest cost.
        peers_differ: The ranks that train this rank's batches hold other ones.
        compiling: Kernels of this rank, or of one that trains its batches, are still being compiled: it can neither
            partition nor move samples.
        has_cause: This rank knows a cause, not told yet, that keeps it from the service and does not pass.
        learns: This rank's cost is a learned one.
        has_fit: This rank knows other weights for it than all follow.
        resumed: Names the point from which this rank goes on; 0: it began at its beginning.
        shared: 64 bits of the shared values of its first batch; 0: it has no say.
        divisible: Samples that this rank offers to split.
        measured_load: Load of the batches that this rank has timed since its last vote, in the mean; 0: none.
        measured_seconds: The time that its own computation of them took, in the mean; 0: none.
        measured_late: The time that it had to wait for each of them, once its loop had asked for it, but for that of
            other ranks' submissions.
        measured_loading: The time that its host waited for its own loader, for each of them.
        measured_loop: The time from the step before each until its loop asked for it.
        num_batches: With a window, how many batches of it this rank has.
        batches: With a window of several batches, each of them; whole windows, also where this rank has fewer.
    """

    round: int
    pass_number: int = 0
    left: bool = False
    out_of_turn: bool = False
    drop_last: bool = False
    taken: int = 0
    held: Held = Held.NOTHING
    instance: int = 0
    digest: int = 0
    moved: int = 0
    checksum: int = 0
    samples: int = 0
    exhausted: bool = False
    asked: bool = False
    ready: bool = False
    costs_valid: bool = True
    costs_float: bool = False
    schema: int = 0
    load: float = 0.0
    heaviest: float = 0.0
    peers_differ: bool = False
    compiling: bool = False
    has_cause: bool = False
    learns: bool = False
    has_fit: bool = False
    resumed: int = 0
    shared: int = 0
    divisible: int = 0
    measured_load: float = 0.0
    measured_seconds: float = 0.0
    measured_late: float = 0.0
    measured_loading: float = 0.0
    measured_loop: float = 0.0
    num_batches: int = 1
    batches: tuple[BatchVote, ...] = ()

    def of_batch(self, batch: int) -> Vote:
        """The vote as if the round were this one batch of the window."""
        if not self.batches:
            return self
        one = self.batches[batch]
        return replace(self, samples=one.samples, load=one.load, heaviest=one.heaviest)

    def pack(self) -> bytes:
        """The struct on the wire, little-endian."""
        flags = self.exhausted | self.asked << 1 | self.ready << 2 | self.costs_valid << 3 | self.costs_float << 4
        flags |= self.left << 5 | self.out_of_turn << 6 | self.drop_last << 7
        flags |= self.peers_differ << 8 | self.has_cause << 9 | self.compiling << 10
        flags |= self.learns << 11 | self.has_fit << 12
        fixed = _LAYOUT.pack(
            self.round, self.pass_number, self.taken, self.held, flags, self.instance, self.digest, self.moved,
            self.checksum, self.samples, self.schema, self.load, self.heaviest, self.num_batches,
            self.resumed, self.shared, self.divisible, self.measured_load, self.measured_seconds,
            self.measured_late, self.measured_loading, self.measured_loop,
        )  # fmt: skip
        return fixed + b"".join(_BATCH.pack(b.samples, b.received, b.load, b.heaviest) for b in self.batches)

    @classmethod
    def unpack(cls, data: bytes) -> Vote:
        """Reads what `pack` wrote."""
        (
            number, pass_number, taken, held, flags, instance, digest, moved, checksum, samples, schema, load, heaviest,
            num_batches, resumed, shared, divisible, measured_load, measured_seconds,
            measured_late, measured_loading, measured_loop,
        ) = _LAYOUT.unpack(data[:VOTE_BYTES])  # fmt: skip
        return cls(
            round=number, pass_number=pass_number, taken=taken, left=bool(flags & 32), out_of_turn=bool(flags & 64),
            drop_last=bool(flags & 128), held=Held(held), instance=instance, digest=digest, moved=moved,
            checksum=checksum, samples=samples,
            exhausted=bool(flags & 1), asked=bool(flags & 2), ready=bool(flags & 4), costs_valid=bool(flags & 8),
            costs_float=bool(flags & 16), schema=schema, load=load, heaviest=heaviest,
            num_batches=num_batches, resumed=resumed, shared=shared, divisible=divisible,
            measured_load=measured_load, measured_seconds=measured_seconds,
            measured_late=measured_late, measured_loading=measured_loading, measured_loop=measured_loop,
            peers_differ=bool(flags & 256),
            compiling=bool(flags & 1024),
            has_cause=bool(flags & 512),
            learns=bool(flags & 2048),
            has_fit=bool(flags & 4096),
            batches=tuple(
                BatchVote(samples=loaded, received=received, load=its_load, heaviest=its_heaviest)
                for loaded, received, its_load, its_heaviest in _BATCH.iter_unpack(data[VOTE_BYTES:])
            ),
        )  # fmt: skip


_LAYOUT = struct.Struct("<Q4I6QddQQQI5d")
_BATCH = struct.Struct("<QQdd")
VOTE_BYTES = _LAYOUT.size


def vote_on(ticket: Ticket, decision: ServiceDecision | None, *, window: int, ready: bool, schema: Schema) -> Vote:
    """The vote on a submitted round.

    Args:
        ticket: The round.
        decision: What this rank holds of the service's decision.
        window: Batches of a round.
        ready: This rank's stream to the service is joined.
        schema: Of its batches, or what a rank without samples takes them to be.
    """
    held, checksum = Held.NOTHING, 0
    received = [0] * window
    if decision is not None:
        plan = decision.plan
        if plan is not None:
            held = Held.BALANCED
            for batch, piece in enumerate(plan.slices):
                checksum += transfer_checksum(piece, plan.sent_in(ticket.samples, batch), batch)
                cuts = plan.cuts_in(batch)  # the parts beyond the first of own samples arrive too, somewhere
                further = 0 if cuts is None else len(cuts) - cuts.num_samples
                received[batch] = int(piece.source_counts.sum()) - further & _MASK
            checksum &= _MASK
        else:
            held = Held.IDENTITY if decision.final else Held.UNDECIDED
    costs = ticket.samples.costs
    return Vote(
        round=ticket.round,
        pass_number=ticket.pass_number,
        held=held,
        instance=decision.instance if decision else 0,
        digest=decision.digest if decision else 0,
        moved=decision.moved_samples if decision else 0,
        checksum=checksum,
        samples=len(costs),
        exhausted=ticket.exhausted,
        drop_last=ticket.drop_last,
        asked=ticket.asked,
        ready=ready,
        costs_valid=not ticket.problem,
        costs_float=costs.dtype == np.float64,
        schema=int.from_bytes(schema.hash[:8], "little"),
        load=float(costs.sum()),
        heaviest=float(costs.max(initial=0)),
        resumed=0 if ticket.resumed is None else ticket.resumed.token,
        shared=digest(ticket.shared),
        divisible=0 if ticket.samples.divisible is None else len(ticket.samples.divisible),
        num_batches=len(ticket.samples.batch_sizes),
        batches=batch_votes(ticket.samples, received),
    )


def vote_to_leave(leaving: Leaving, round_number: int, *, window: int, ready: bool) -> Vote:
    """The vote of a rank that has left its loop on the first round that it did not submit."""
    return Vote(
        round=round_number,
        pass_number=leaving.pass_number,
        left=True,
        out_of_turn=leaving.out_of_turn,
        taken=leaving.taken,
        ready=ready,
        batches=(BatchVote(),) * window if window > 1 else (),
    )


def batch_votes(samples: RankSamples, received: Sequence[int]) -> tuple[BatchVote, ...]:
    """The part of a vote that is about each batch of a window; empty without windows.

    Args:
        samples: This rank's.
        received: Per batch of the window, how many samples this rank would train.
    """
    if len(received) == 1:
        return ()
    votes = []
    for batch, count in enumerate(received):
        costs = samples.costs[samples.in_batch(batch)]
        votes.append(
            BatchVote(samples=len(costs), received=count, load=float(costs.sum()), heaviest=float(costs.max(initial=0)))
        )
    return tuple(votes)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """MurmurHash3's 64-bit finaliser, elementwise."""
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xFF51AFD7ED558CCD)
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


def _weighted(source: NDArray[np.uint64], target: NDArray[np.uint64], amounts: NDArray[np.uint64]) -> int:
    """Sum over (pair, column) of amount × a hash of (source, target, column), mod 2^64."""
    columns = np.arange(amounts.shape[1], dtype=np.uint64)
    pairs = _mix((source << np.uint64(32)) | target)
    keys = _mix(pairs[:, None] + columns[None, :] * np.uint64(0x9E3779B97F4A7C15))
    return int((keys * amounts).sum(dtype=np.uint64))


def transfer_checksum(piece: Slice, lengths: Lengths, batch: int = 0) -> int:
    """What a rank sends less what it expects to receive, as 64 bits that cancel over all ranks.

    The hash is linear in the number of samples and of values between each pair of ranks, so the sums of senders and
    receivers meet exactly when every receiver expects what is sent to it.

    Args:
        piece: The rank's slice of the plan.
        lengths: (samples, jagged fields) values of each jagged field of each own sample.
        batch: Which batch of a window the slice is of; those of different batches do not cancel.
    """
    me = np.uint64(piece.rank | batch << _RANK_BITS)
    ones = np.ones((len(piece.destinations), 1), dtype=np.uint64)
    sent = np.hstack([ones, lengths.astype(np.uint64)])
    received = np.hstack([piece.source_counts[:, None].astype(np.uint64), piece.source_totals.astype(np.uint64)])
    shift = np.uint64(batch << _RANK_BITS)
    targets, sources = piece.destinations.astype(np.uint64) | shift, piece.sources.astype(np.uint64) | shift
    total = _weighted(np.full_like(targets, me), targets, sent)
    total -= _weighted(sources, np.full_like(sources, me), received)
    return total & _MASK


def checksums_cancel(votes: list[Vote]) -> bool:
    """Whether the transfers of all ranks fit together."""
    return sum(vote.checksum for vote in votes) & _MASK == 0


def batches_keep_their_sizes(votes: list[Vote]) -> bool:
    """Whether each batch of a window trains as many samples as were loaded for it, and so has the weight it was given.

    It also keeps samples out of batches that no rank has, which nobody would train.
    """
    columns = zip(*(vote.batches for vote in votes), strict=True)
    return all(sum(one.samples - one.received for one in batch) & _MASK == 0 for batch in columns)
