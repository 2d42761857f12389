"""What ranks say: who they are, what they agree on, and their part in a round."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.rounds import RoundOptions
from evenkeel.partitioning.samples import RoundSamples
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds

SUBMISSION_BYTES = 700
"""What a submission takes beside its arrays, in an open round."""
MOST_HELD = 60.0
"""Seconds for which a node's leader may have had a submission."""


class SessionKey(NamedTuple):
    """The name of a session; one incarnation at a time holds it."""

    job: str
    group: str
    loader: str

    def __str__(self) -> str:
        return "/".join(part for part in (self.job, self.group, self.loader) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all ranks of a session must say alike.

    Attributes:
        world_size: Number of ranks.
        window: Batches per round.
        options: How to partition.
        schema_hash: Of the batch's fields.
        schema: One line per field, for messages to people.
        num_jagged: Jagged fields of a batch.
        roles: What each of them is to a sample in parts; empty where none is split.
    """

    world_size: int
    window: int = 1
    options: RoundOptions = field(default_factory=RoundOptions)
    schema_hash: bytes = b""
    schema: tuple[str, ...] = ()
    num_jagged: int = 0
    roles: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Memory that they take, about."""
        options = self.options
        schema = sum(60 + len(line) for line in self.schema) + 40 * len(self.roles)
        return 500 + schema + 40 * (len(options.speeds) + len(options.memory_caps))

    def difference(self, theirs: Terms) -> tuple[str, str, str] | None:
        """The first thing that two ranks see differently: field, our value, their value."""
        if self == theirs:
            return None
        for name in ("world_size", "window"):
            if getattr(self, name) != getattr(theirs, name):
                return name, str(getattr(self, name)), str(getattr(theirs, name))
        for name in ("strategy", "counts", "tolerance", "move_price", "speeds", "memory_caps", "min_samples", "split"):
            mine, other = getattr(self.options, name), getattr(theirs.options, name)
            if mine != other:
                if isinstance(mine, tuple) and len(mine) == len(other):
                    at = next(i for i in range(len(mine)) if mine[i] != other[i])
                    return f"options.{name}[{at}]", str(mine[at]), str(other[at])
                return f"options.{name}", str(mine), str(other)
        for at in range(max(len(self.schema), len(theirs.schema))):
            mine_line = self.schema[at] if at < len(self.schema) else "absent"
            other_line = theirs.schema[at] if at < len(theirs.schema) else "absent"
            if mine_line != other_line:
                return f"schema.fields[{at}]", mine_line, other_line
        if self.roles != theirs.roles:
            return "schema.roles", str(list(self.roles)), str(list(theirs.roles))
        return "schema.hash", self.schema_hash.hex(), theirs.schema_hash.hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """The introduction of a rank, or of several on one stream.

    Attributes:
        key: The session.
        run_id: The launcher's name of the run.
        restart_count: The launcher's count of restarts.
        rank: Who speaks.
        node: Its host.
        terms: What all ranks must say alike.
        opening: Tells apart what a launcher starts again under the same run and count.
        protocol_version: That both sides speak.
        ranks: Whom the stream speaks for, `rank` among them; empty: only it.
        caller: Who made the call: a token's name or an address.
    """

    key: SessionKey
    run_id: str
    restart_count: int
    rank: int
    node: str
    terms: Terms
    opening: int = 0
    protocol_version: int = 1
    ranks: tuple[int, ...] = ()
    caller: str = ""

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """Whom the stream speaks for."""
        return self.ranks or (self.rank,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Submission:
    """The part of a rank, or of several ranks of a node, in one round.

    Attributes:
        ranks: Whose it is.
        samples: What they say of their samples, one rank after another.
        timeout: Seconds from the round's first submission to its deadline.
        traceparents: Contexts of the traces of this round, of the ranks that have one.
        learned: What the ranks know of their speeds, if rank 0 is among these.
        held: (ranks,) seconds for which each came earlier than the message; None: none did.
    """

    ranks: tuple[int, ...]
    samples: RoundSamples
    timeout: float = 1.0
    traceparents: Mapping[int, str] = field(default_factory=dict)
    learned: LearnedSpeeds = ALL_EQUAL
    held: NDArray[np.float64] | None = None
    _said: list[int] = field(default_factory=list, init=False, repr=False)

    @property
    def num_samples(self) -> int:
        """Number of samples; also none."""
        return len(self.samples.costs)

    @property
    def nbytes(self) -> int:
        """Memory of its arrays, and of all that goes with them."""
        learned = len(self.learned.stragglers) + len(self.learned.delays)
        return SUBMISSION_BYTES * len(self.ranks) + self.samples.nbytes + 200 * learned

    def arrivals(self, now: float) -> dict[int, float]:
        """By rank, when it came, where the message came `now`; not before the longest time that counts."""
        if self.held is None:
            return dict.fromkeys(self.ranks, now)
        return dict(zip(self.ranks, (now - np.minimum(self.held, MOST_HELD)).tolist(), strict=True))

    def earliest(self, now: float) -> float:
        """When the first of them came, as `arrivals` tells."""
        return now if self.held is None else now - min(float(self.held.max()), MOST_HELD)

    @property
    def fingerprints(self) -> dict[int, int]:
        """By rank, a number that is the same when it says the same about its samples, whoever else is with it."""
        if not self._said:
            self._said.extend(self._fingerprints())
        return dict(zip(self.ranks, self._said, strict=True))

    def parts(self) -> list[tuple[int, RoundSamples]]:
        """The samples of ranks that follow one another, with the first of these; ascending where the ranks are."""
        return [(self.ranks[begin], self.samples.part(begin, end)) for begin, end in runs_of(self.ranks)]

    def of(self, ranks: Collection[int]) -> Submission:
        """What it says of some of its ranks."""
        places = [at for at, rank in enumerate(self.ranks) if rank in ranks]
        chosen = [self.samples.part(at, at + 1) for at in places]
        return replace(
            self,
            ranks=tuple(self.ranks[at] for at in places),
            samples=RoundSamples.joined(chosen),
            traceparents={rank: text for rank, text in self.traceparents.items() if rank in ranks},
            held=None if self.held is None else self.held[places],
        )

    def _fingerprints(self) -> list[int]:
        """Hashes of each rank's bytes, in the types that a plan is made from: narrow integers say the same."""
        samples, said, first = self.samples, list[int](), 0
        costs = "<f8" if samples.costs.dtype.kind == "f" else "<i8"
        arrays = (samples.costs, samples.lengths, samples.sizes, samples.memory)
        columns = [
            (array.astype(dtype, copy=False).tobytes(), int(dtype[-1]) * (array.size // max(1, len(array))))
            for array, dtype in zip(arrays, (costs, "<u4", "<i8", "<f8"), strict=True)
            if array is not None
        ]
        kind = (costs, samples.sizes is None)
        for rank, own in zip(self.ranks, samples.batch_sizes.tolist(), strict=True):
            last = first + sum(own)
            more: list[object] = [*own]
            if last > first:
                more += kind
                more += [data[width * first : width * last] for data, width in columns]
            if rank == 0 and self.learned:
                more.append(self.learned)
            table = None if samples.divisible is None else samples.divisible_in(first, last)
            if table is not None and len(table):
                more.append(table.tobytes())
            said.append(hash(tuple(more)))
            first = last
        return said

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Submission) and self.fingerprints == other.fingerprints

    def __hash__(self) -> int:
        return hash(tuple(self.fingerprints.items()))


def runs_of(ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    """The places in a tuple of ranks, from begin to end, where each rank follows the one before."""
    first, count = ranks[0], len(ranks)
    if ranks == tuple(range(first, first + count)):
        return [(0, count)]
    starts = [at for at in range(count) if at == 0 or ranks[at] != ranks[at - 1] + 1]
    return list(pairwise([*starts, count]))
