"""What a state machine wants done: the only way in which it reaches the world.

There are dozens of these a round: they are tuples, which Python makes, compares and hashes without running code.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from evenkeel.partitioning.rounds import RoundOptions
from evenkeel.partitioning.samples import RoundSamples
from evenkeel.restarts import restart_text
from services.balancer.decisions import Decision
from services.balancer.refusals import Refusal
from services.balancer.submissions import SessionKey

Asker = Hashable
"""Where answers go: one stream, which may speak for several ranks, or one call. Equal tokens are the same place."""


class Answer(NamedTuple):
    """Tell `asker` the outcome of its submissions to a round, for some of its ranks."""

    asker: Asker
    round: int
    ranks: tuple[int, ...]
    result: Decision | Refusal


class Close(NamedTuple):
    """End the stream of `asker` with an error."""

    asker: Asker
    refusal: Refusal


class Leave(NamedTuple):
    """Tell `asker` that the balancer leaves.

    Attributes:
        asker: Whose stream.
        from_round: The first round that is another balancer's; None: it may join one, and rounds go on here.
    """

    asker: Asker
    from_round: int | None


class Wake(NamedTuple):
    """Call `tick` at this time or a little later."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """All that the partition of a round depends on.

    Attributes:
        parts: The ranks' samples, of some ranks each, in the order of the ranks.
        options: How to partition.
        nodes: Host of each rank.
        window: Batches of the round.
        roles: What each jagged field is to a sample in parts; empty where none is split.
        together: The ranks of each stream whose ranks are told of the plan together, as arrays.
    """

    parts: tuple[RoundSamples, ...]
    options: RoundOptions
    nodes: tuple[str, ...]
    window: int = 1
    roles: tuple[int, ...] = ()
    together: tuple[tuple[int, ...], ...] = ()

    @property
    def nbytes(self) -> int:
        """Memory of the samples."""
        return sum(part.nbytes for part in self.parts)


class StartPartition(NamedTuple):
    """Compute the plan of a complete round before its deadline: call `started`, then `partitioned`."""

    session: SessionId
    round: int
    inputs: PlanInput
    deadline: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When what happened in a round of which ranks have a trace; times of the session's clock.

    Attributes:
        opened_at: Its first submission.
        gathered_at: Its plan was asked for, all ranks being there; None if it never was.
        decided_at: Its decision.
        arrivals: By rank with a trace: when it came, and the context of its trace.
    """

    opened_at: float
    gathered_at: float | None
    decided_at: float
    arrivals: dict[int, tuple[float, str]]


class Loaded(NamedTuple):
    """How even a round is with every sample at home.

    Attributes:
        samples: Of all ranks.
        largest: The largest load of a rank over its speed, summed over the batches of the window.
        mean: The mean of the ranks, as well.
    """

    samples: int
    largest: float
    mean: float


class Decided(NamedTuple):
    """A round was decided; for logs and metrics.

    Attributes:
        session: Whose round it is.
        round: Its number.
        decision: Its outcome.
        waited: Seconds from its first submission to its decision.
        timeline: For its trace; None if no rank has one.
        caller: Whose session it is.
        loaded: Of a round without a plan, how even it is as loaded; None: unknown.
    """

    session: SessionId
    round: int
    decision: Decision
    waited: float
    timeline: Timeline | None = None
    caller: str = ""
    loaded: Loaded | None = None


class SessionId(NamedTuple):
    """One incarnation of a session: it starts at round 0.

    Attributes:
        key: The name that it holds.
        run_id: The launcher's name of the run.
        restart_count: Grows with each start of the run, see `evenkeel.restarts`.
        opening: Tells apart what a launcher starts again under the same run and count.
    """

    key: SessionKey
    run_id: str
    restart_count: int
    opening: int = 0

    @property
    def restart(self) -> str:
        """The restarts, for people to read."""
        return restart_text(self.restart_count)


Effect = Answer | Close | Leave | Wake | StartPartition | Decided
