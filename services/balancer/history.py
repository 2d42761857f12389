"""What a balancer remembers of a session's last rounds, for people to look at: no decision depends on it.

It follows from what rounds have anyway, and takes a few microseconds a round. The event loop writes it, the thread of
the page reads it; each piece that is read is copied in one step of the interpreter.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.rounds import RoundPlan
from services.balancer.decisions import Decision, Reason
from services.balancer.effects import Decided, Loaded, PlanInput
from services.balancer.submissions import Submission

ROUNDS = 240
"""Rounds whose figures are kept."""
COLUMNS = (
    "number", "round", "time", "wait_seconds", "search_seconds", "reason", "mean_load", "before", "after", "bound",
    "imbalance_before", "imbalance_after", "samples", "moved_samples", "size", "moved_size",
)  # fmt: skip
"""What is kept of each; loads are the largest of a rank over its speed, `time` is that of the balancer's clock."""
HISTORY_BYTES = ROUNDS * 8 * len(COLUMNS) + 4000
"""What it takes of a session's memory."""

_ROW = struct.Struct(f"<{len(COLUMNS)}d")
_NAN = math.nan
_SMOOTHING = 0.1  # of a new value, in means that forget
_LONGEST_INTERVAL = 60.0
_FIRST_ROUNDS = 10
_PAUSE_FACTOR = 4.0  # a longer interval is a pause of the job, in which nothing is saved
_FOLLOW_SECONDS = 0.05  # between two rounds of which each rank's arrival is noted
_FOLLOW_RANK_SECONDS = 1e-4
_GIVE_UP_SECONDS = 60.0
_SAMPLE_SECONDS = 10.0
_MOST_SAMPLES = 1 << 20  # of a round whose heaviest samples are looked for
_MOST_OPEN = 16  # rounds with a plan of which the ranks have not told yet what they did


_UNKNOWN_LOADS = (Reason.INVALID_COSTS, Reason.NOT_TRAINED)

Sample: TypeAlias = tuple[int, PlanInput, RoundPlan]


@dataclass(frozen=True, slots=True)
class Fallback:
    """A round without a plan: which, when, why in a word and in words, and the ranks that did not come."""

    round: int
    time: float
    reason: str
    detail: str
    missing_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """Rounds that did not come here, because the ranks' breaker was open: the first, the last, when the next came."""

    first: int
    last: int
    time: float


class History:
    """The last rounds of one session.

    A round with a plan counts once the ranks have told that they followed it, which they do with their next
    submission; of ranks that tell nothing it counts at once. One without a plan counts at once, too.

    Attributes:
        rounds: How many have been counted.
        newest: The highest of them; -1 at first.
        fallbacks: The last rounds without a plan.
        gaps: The last gaps between rounds.
        num_gaps: How many there were.
        skipped: Rounds that did not come here.
        by_ranks: Rounds without a plan that was followed, which the ranks have balanced by themselves.
        interval: Seconds between two decisions, on average of late; 0 before the second.
        decided_at: When the last round was decided; NaN before.
        saved_seconds: GPU-seconds that balancing has saved so far, an estimate.
        lost_seconds: GPU-seconds that ranks were idle for the remaining imbalance so far, an estimate.
        knows_loads: Of some round it is known how even it was trained; otherwise nothing is known of what is lost.
        late: By rank: seconds from the first rank's submission to this one's, on average of late.
        missed: By rank: rounds whose deadline it missed.
        sample_wanted: Whether somebody wants to see the samples of a round.
        sample: When one was kept because of that, and which.
        heaviest: The heaviest samples of the last one that was looked at.
    """

    __slots__ = (
        "_arrivals", "_by_ranks", "_decided", "_follow_from", "_followed", "_newest", "_open", "_passed", "_ring",
        "_stayed", "_tells", "by_ranks", "decided_at", "fallbacks", "gaps", "heaviest", "interval", "knows_loads",
        "late", "lost_seconds", "missed", "newest", "num_gaps", "rounds", "sample", "sample_wanted", "saved_seconds",
        "skipped", "world_size",
    )  # fmt: skip

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.rounds = 0
        self.newest = -1
        self.fallbacks: deque[Fallback] = deque(maxlen=16)
        self.gaps: deque[Gap] = deque(maxlen=16)
        self.num_gaps = 0
        self.skipped = 0
        self.by_ranks = 0
        self.interval = 0.0
        self.decided_at = _NAN
        self.saved_seconds = 0.0
        self.lost_seconds = 0.0
        self.knows_loads = False
        self.late: dict[int, float] = {}
        self.missed: dict[int, int] = {}
        self.sample_wanted = False
        self.sample: tuple[float, Sample] | None = None
        self.heaviest: dict[str, Any] | None = None
        self._tells = False  # the ranks tell what they did
        self._open: dict[
            int, tuple[float, Decided]
        ] = {}  # when it was decided, of rounds that they have yet to tell of
        self._stayed: dict[int, Loaded] = {}  # of rounds without a plan, until it is told that all samples stayed
        self._decided = 0
        self._ring: bytearray | None = None
        self._newest = self._followed = self._by_ranks = -1
        self._passed: deque[Gap] = deque(maxlen=16)  # gaps until a later round is decided, their time still unknown
        self._follow_from = -math.inf
        self._arrivals: dict[int, float] = {}

    def arrived(self, now: float, round_number: int, submission: Submission) -> None:
        """Notes when ranks came to a round, of some rounds."""
        if round_number > self._newest:
            if round_number > self._newest + 1 and self._newest >= 0:
                self._passed.append(Gap(self._newest + 1, round_number - 1, _NAN))
                self.num_gaps += 1
                self.skipped += round_number - self._newest - 1
            self._newest = round_number
            if now >= self._follow_from:
                self._followed, self._arrivals = round_number, submission.arrivals(now)
                self._follow_from = now + _GIVE_UP_SECONDS
        elif round_number == self._followed:
            self._arrivals = submission.arrivals(now) | self._arrivals

    def decided(self, now: float, clock: float, event: Decided) -> bool:
        """Notes a decided round; returns whether it counts already. One that nobody trained never does.

        Args:
            now: Seconds of the loop's clock.
            clock: Seconds since 1970.
            event: The round.
        """
        self.gaps.extend(replace(gap, time=clock) for gap in self._passed)
        self._passed.clear()
        nothing = event.loaded is not None and not event.loaded.samples  # which ends a loop
        if nothing or event.decision.reason is Reason.NOT_TRAINED:
            return False
        if self.gaps and event.round <= self.gaps[-1].last:
            self._came_after_all(event.round)
        self._note_interval(now)
        self._decided += 1
        if event.round == self._followed:
            self._learn_lateness(now)
        if self._tells and event.decision.plan is not None and len(self._open) < _MOST_OPEN:
            self._open[event.round] = clock, event
            return False
        self._count(clock, event, told=not self._tells)
        return True

    def told(self, agreed: int | None = None, unfollowed: Mapping[int, Decision] | None = None) -> list[Decided]:
        """Notes what the ranks did; returns the rounds that count from now on, as what they turned out to be.

        Args:
            agreed: They have agreed on all rounds below this one; None: nobody will tell any more.
            unfollowed: What they did instead of what was decided, by round.
        """
        self._tells = True
        for number in sorted(self._stayed):
            if agreed is None or number < agreed:
                self._lose(self._stayed.pop(number), (unfollowed or {}).get(number))
        counted = []
        for number in sorted(self._open):
            if agreed is None or number < agreed:
                clock, event = self._open.pop(number)
                instead = (unfollowed or {}).get(number)
                if instead is not None:
                    if instead.reason is Reason.NOT_TRAINED:
                        continue
                    event = event._replace(decision=instead, loaded=_as_loaded(event.decision.plan))
                self._count(clock, event, told=True)
                counted.append(event)
        for number, instead in sorted((unfollowed or {}).items()):
            if instead.reason is Reason.NOT_TRAINED and number == self._newest + 1 and self._newest >= 0:
                self._newest = number  # it never came: the loop was over, and the ranks' breaker closed
            if instead.by_ranks and number > self._by_ranks:
                self._note_by_ranks(number)
        return counted

    def _count(self, clock: float, event: Decided, *, told: bool) -> None:
        decision, number = event.decision, event.round
        self.newest = max(self.newest, number)
        if self._ring is None:
            self._ring = bytearray(ROUNDS * _ROW.size)
        place = self.rounds % ROUNDS * _ROW.size
        head = (self.rounds, number, clock, event.waited)
        plan = decision.plan
        if plan is None:
            _ROW.pack_into(self._ring, place, *head, _NAN, decision.reason, *(_NAN,) * 10)
            self.fallbacks.append(
                Fallback(number, clock, decision.reason.label, decision.detail, decision.missing_ranks[:32])
            )
            for rank in decision.missing_ranks:
                self.missed[rank] = self.missed.get(rank, 0) + 1
            if event.loaded is not None:
                if told or len(self._stayed) >= _MOST_OPEN:
                    self._lose(event.loaded, decision)
                else:
                    self._stayed[number] = event.loaded
        else:
            figures = plan.figures
            _ROW.pack_into(
                self._ring, place, *head, plan.seconds, 0, figures.mean_load, figures.max_load_before,
                figures.max_load_after, figures.lower_bound, figures.imbalance_before, figures.imbalance_after,
                figures.samples, figures.moved_samples, figures.size, figures.moved_size,
            )  # fmt: skip
            after = sum(batch.max_load_after for batch in plan.batches)
            self._lose(Loaded(figures.samples, after, sum(b.max_load_after / b.imbalance_after for b in plan.batches)))
            if after > 0:
                before = sum(batch.max_load_before for batch in plan.batches)
                self.saved_seconds += self.interval * self.world_size * (before / after - 1)
        self.rounds += 1

    def planned(self, now: float, number: int, inputs: PlanInput, plan: RoundPlan) -> None:
        """Keeps the samples of a round, which somebody wants to see soon."""
        self.sample_wanted = False
        if plan.slices.destinations.size <= _MOST_SAMPLES:
            self.sample = now, (number, inputs, plan)

    def look_at_sample(self, *, again: bool = True) -> None:
        """Finds the heaviest samples of the round that was kept, and forgets it; `again`: wants another."""
        sample, self.sample, self.sample_wanted = self.sample, None, again
        if sample is not None:
            number = sample[1][0]
            self.heaviest = {"round": number, "samples": heaviest(sample[1])}

    def forget_sample(self, now: float) -> None:
        """Gives back the memory of a round that nobody has come to look at."""
        if self.sample is not None and now - self.sample[0] > _SAMPLE_SECONDS:
            self.sample = None

    def rows(self, since: int = 0) -> NDArray[np.float64]:
        """(n, columns) float64, the kept rounds from the `since`-th decided one on, in the order of decisions."""
        ring = self._ring
        if ring is None:
            return np.zeros((0, len(COLUMNS)))
        rows = np.frombuffer(bytes(ring), np.float64).reshape(ROUNDS, len(COLUMNS))
        rows = rows[rows[:, 2] > 0]  # the others are not written yet
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        return rows[np.searchsorted(rows[:, 0], since) :]

    # ------------------------------------------------------------------ inside

    def _note_interval(self, now: float) -> None:
        passed = now - self.decided_at
        self.decided_at = now
        if not passed >= 0:  # the first
            return
        # The first rounds come in a burst, as ranks submit ahead: they tell nothing of what is usual.
        usual = _PAUSE_FACTOR * self.interval if self._decided >= _FIRST_ROUNDS else _LONGEST_INTERVAL
        passed = min(passed, usual)
        self.interval += max(_SMOOTHING, 1 / max(1, self._decided)) * (passed - self.interval)

    def _came_after_all(self, number: int) -> None:
        """A round of a gap has come, as one that lay unread while the balancer did not run: it counts once."""
        gaps = list(self.gaps)
        for at, gap in enumerate(gaps):
            if gap.first <= number <= gap.last:
                parts = replace(gap, last=number - 1), replace(gap, first=number + 1)
                gaps[at : at + 1] = left = [part for part in parts if part.first <= part.last]
                self.gaps = deque(gaps, maxlen=self.gaps.maxlen)
                self.skipped -= 1
                self.num_gaps += len(left) - 1
                return

    def _lose(self, trained: Loaded, instead: Decision | None = None) -> None:
        """Adds what the ranks were idle in a round; `instead`: what they told to have done without a plan, if so."""
        if instead is not None and (instead.by_ranks or instead.reason in _UNKNOWN_LOADS):
            return
        self.knows_loads = True
        if trained.largest > 0:
            self.lost_seconds += self.interval * self.world_size * max(0.0, 1 - trained.mean / trained.largest)

    def _note_by_ranks(self, number: int) -> None:
        self._by_ranks = number
        self.by_ranks += 1
        for at, told in enumerate(self.fallbacks):
            if told.round == number:
                self.fallbacks[at] = replace(told, detail=f"{told.detail}; the ranks balanced it by themselves")

    def _learn_lateness(self, now: float) -> None:
        arrivals, late = self._arrivals, self.late
        first = min(arrivals.values())
        for rank, at in arrivals.items():
            before = late.get(rank)
            seconds = at - first
            late[rank] = seconds if before is None else before + _SMOOTHING * (seconds - before)
        self._followed, self._arrivals = -1, {}
        self._follow_from = now + _FOLLOW_SECONDS + _FOLLOW_RANK_SECONDS * self.world_size


def _as_loaded(plan: RoundPlan | None) -> Loaded | None:
    """What a plan tells of a round in which it was not followed."""
    if plan is None:
        return None
    mean = sum(batch.max_load_before / batch.imbalance_before for batch in plan.batches)
    return Loaded(plan.figures.samples, sum(batch.max_load_before for batch in plan.batches), mean)


def reason_label(code: float) -> str:
    """The name of a reason as a row holds it; empty for a plan."""
    return "" if code == 0 else Reason(int(code)).label


def heaviest(sample: Sample, count: int = 10) -> list[dict[str, Any]]:
    """The samples of a round that cost most.

    Args:
        sample: The round's number, what it was planned from, and its plan.
        count: How many.
    """
    _, inputs, plan = sample
    costs = np.concatenate([np.asarray(part.costs, np.float64) for part in inputs.parts])
    counts = np.concatenate([part.counts_at_home for part in inputs.parts])
    homes = np.repeat(np.arange(len(counts)), counts)
    parts, ranks, mean = plan.parts, plan.slices.destinations, plan.figures.mean_load
    firsts = np.arange(len(costs)) if parts is None else np.flatnonzero(parts.begins == 0)
    pieces = np.diff(firsts, append=len(ranks))
    most = np.argsort(costs, kind="stable")[::-1][:count]
    return [
        {
            "cost": float(costs[at]),
            "share": float(costs[at] / mean) if mean else 0.0,
            "home": int(homes[at]),
            "rank": int(ranks[firsts[at]]),
            "pieces": int(pieces[at]),
        }
        for at in most.tolist()
    ]
