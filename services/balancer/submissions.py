"""What ranks say: who they are, what they agree on, and their part in a round."""

from __future__ import annotations

from dataclasses import dataclass, field

from evenkeel.partitioning.rounds import RoundOptions
from evenkeel.partitioning.samples import RankSamples
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds

SUBMISSION_BYTES = 700
"""What a submission takes beside its arrays, in an open round."""


@dataclass(frozen=True, slots=True)
class SessionKey:
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
    """One rank's part in one round. Two are equal when they say the same about the samples.

    Attributes:
        samples: What it says of its samples.
        exhausted: The rank's data has ended.
        timeout: Seconds from the round's first submission to its deadline.
        traceparent: Context of the rank's trace of this round; empty: none.
        learned: What the ranks know of their speeds, on rank 0.
        fingerprint: Hash of what it says about the samples, within this process.
    """

    samples: RankSamples
    exhausted: bool = False
    timeout: float = 1.0
    traceparent: str = ""
    learned: LearnedSpeeds = ALL_EQUAL
    fingerprint: int = 0

    def __post_init__(self) -> None:
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", self._fingerprint())

    @property
    def num_samples(self) -> int:
        """Number of samples; also none."""
        return len(self.samples)

    @property
    def nbytes(self) -> int:
        """Memory of its arrays, and of all that goes with them."""
        return SUBMISSION_BYTES + self.samples.nbytes + 200 * len(self.learned.stragglers)

    def _fingerprint(self) -> int:
        contents = tuple(None if a is None else (a.dtype.char, a.shape, a.tobytes()) for a in self.samples.arrays)
        return hash((self.exhausted, self.samples.batch_sizes, contents, self.learned))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Submission) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return self.fingerprint
