"""What a balancer remembers of the rounds that it has planned, for people to look at: no plan depends on it.

The event loop writes, other threads read: what they read is replaced as a whole, or copied in one step of the
interpreter.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from services.balancer.summary import RoundSummary

ROUNDS = 240
"""Rounds of a stream that are kept."""
MOST_STREAMS = 500
MOST_JOBS = 200
"""Jobs that are counted by name; later ones are counted together."""
OTHER = "other"
LEFT_SECONDS = 600.0
FORGOTTEN_SECONDS = 3600.0

_MOST_FAILURES = 16
_QUIET_SECONDS = 10.0
_QUIET_INTERVALS = 20.0
_RECENT_ROUNDS = 32  # whose intervals tell the rate


class Round(NamedTuple):
    """A planned round.

    Attributes:
        number: How many rounds of the stream were planned here before.
        round: Its number in the job.
        time: When it was planned, seconds since 1970.
        seconds: That the call took.
        search_seconds: That the search took.
        imbalance_before: Max/mean of load over speed as loaded; of several, this and the next two are
            those of the least even one.
        imbalance_after: The same as planned.
        imbalance_bound: No assignment of whole samples has less.
        samples: Of all ranks, as what follows.
        moved_samples: Samples that change rank.
        size: Bytes.
        moved_size: Bytes that change rank.
    """

    number: int
    round: int
    time: float
    seconds: float
    search_seconds: float
    imbalance_before: float
    imbalance_after: float
    imbalance_bound: float
    samples: int
    moved_samples: int
    size: int
    moved_size: int


class Failure(NamedTuple):
    """A call that failed: when (seconds since 1970), with which status, and why in a word."""

    time: float
    status: str
    reason: str


class StreamName(NamedTuple):
    """What tells streams of batches apart."""

    job: str
    group: str
    loader: str


@dataclass(slots=True, eq=False)
class Failures:
    """The calls of a job that failed.

    Attributes:
        at: When the latest did, on the history's clock.
        latest: The latest ones.
        counts: How many, by reason.
    """

    at: float = 0.0
    latest: deque[Failure] = field(default_factory=lambda: deque(maxlen=_MOST_FAILURES))
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Totals:
    """What is counted of a job, or of several together; never falls while it is remembered.

    Attributes:
        rounds: Planned.
        samples: Of those, as what follows.
        size: Bytes.
        moved_size: Bytes that changed rank.
        before: Sum of the rounds' imbalances as loaded.
        after: The same as planned.
        bound: The same at the lower bound.
        by_lead: Rounds that the lead planned by itself.
        saved_gpu_seconds: GPU-seconds that balancing has saved, as far as the time of a step is known.
    """

    rounds: int = 0
    samples: int = 0
    size: int = 0
    moved_size: int = 0
    before: float = 0.0
    after: float = 0.0
    bound: float = 0.0
    by_lead: int = 0
    saved_gpu_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Stream:
    """A run's stream of batches.

    Attributes:
        name: Of the stream.
        latest: The latest round, with its loads and what the lead has seen.
        planned_at: When that was planned, on the history's clock.
        failures: Of its job.
        planned: Rounds planned here.
        saved_gpu_seconds: As of `Totals`.
        rounds: The latest ones.
    """

    name: StreamName
    latest: RoundSummary
    planned_at: float
    failures: Failures
    planned: int = 0
    saved_gpu_seconds: float = 0.0
    rounds: deque[Round] = field(default_factory=lambda: deque(maxlen=ROUNDS))

    @property
    def interval(self) -> float:
        """Seconds between two rounds, median of the latest; 0 before the second."""
        times = [one.time for one in list(self.rounds)[-_RECENT_ROUNDS:]]
        return statistics.median(later - earlier for earlier, later in pairwise(times)) if len(times) > 1 else 0.0

    def state(self, now: float) -> str:
        """In a word: `balanced`, `failing`, `quiet` or `left`."""
        silent = now - self.planned_at
        if self.failures.at > self.planned_at and now - self.failures.at < LEFT_SECONDS:
            return "failing"
        if silent > LEFT_SECONDS:
            return "left"
        return "quiet" if silent > max(_QUIET_SECONDS, _QUIET_INTERVALS * self.interval) else "balanced"


class History:
    """The streams of which a balancer has planned rounds.

    Attributes:
        totals: By the job's name, or `OTHER`.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.totals: dict[str, Totals] = {}
        self._clock = clock
        self._streams: dict[StreamName, Stream] = {}  # the one that was silent for longest first
        self._failures: dict[str, Failures] = {}  # by job

    @property
    def now(self) -> float:
        """The clock by which streams fall silent."""
        return self._clock()

    @property
    def streams(self) -> list[Stream]:
        """Those that are not forgotten."""
        oldest = self.now - FORGOTTEN_SECONDS
        return [stream for stream in list(self._streams.values()) if stream.planned_at > oldest]

    def planned(self, summary: RoundSummary, seconds: float) -> None:
        """Notes a round; see `Observer`."""
        now, names, figures, facts = self.now, summary.names, summary.figures, summary.facts
        stream = self._stream_of(summary, now)
        totals = self.totals.get(names.job) or self.totals[OTHER]
        saved = summary.ranks * facts.step_seconds * max(0.0, summary.saved_steps)
        bound = figures.imbalance_bound
        totals.rounds += 1
        totals.samples += figures.samples
        totals.size += figures.size
        totals.moved_size += figures.moved_size
        totals.before += figures.imbalance_before
        totals.after += figures.imbalance_after
        totals.bound += bound
        totals.by_lead += max(0, facts.rounds_by_lead - stream.latest.facts.rounds_by_lead)
        totals.saved_gpu_seconds += saved
        stream.rounds.append(
            Round(
                stream.planned, names.round, time.time(), seconds, summary.seconds, figures.imbalance_before,
                figures.imbalance_after, bound, figures.samples, figures.moved_samples, figures.size,
                figures.moved_size,
            )
        )  # fmt: skip
        stream.planned += 1
        stream.saved_gpu_seconds += saved
        stream.latest, stream.planned_at = summary, now

    def failed(self, job: str, status: str, reason: str) -> None:
        """Notes a failed call of a job of which a round was planned: nobody else gets a place here."""
        failures = self._failures.get(job)
        if failures is not None:
            failures.at = self.now
            failures.latest.append(Failure(time.time(), status, reason))
            failures.counts[reason] += 1

    def _stream_of(self, summary: RoundSummary, now: float) -> Stream:
        """The stream of a round, which from now on is the one that was heard of last."""
        names = summary.names
        name = StreamName(names.job, names.group, names.loader)
        stream = self._streams.pop(name, None)
        if stream is None or _run(stream.latest) != _run(summary):
            self._forget(now)
            if names.job not in self.totals:
                self.totals.setdefault(names.job if len(self.totals) < MOST_JOBS else OTHER, Totals())
            stream = Stream(name, summary, now, self._failures.setdefault(names.job, Failures()))
        self._streams[name] = stream
        return stream

    def _forget(self, now: float) -> None:
        """Makes room for a stream: those go that were silent for long."""
        gone = set[str]()
        for name, stream in list(self._streams.items()):
            if len(self._streams) < MOST_STREAMS and now - stream.planned_at < FORGOTTEN_SECONDS:
                break
            del self._streams[name]
            gone.add(name.job)
        for job in gone - {name.job for name in self._streams}:
            self._failures.pop(job, None)
            if job != OTHER:
                self.totals.pop(job, None)


def _run(summary: RoundSummary) -> tuple[str, int]:
    return summary.names.run_id, summary.names.restart_count
