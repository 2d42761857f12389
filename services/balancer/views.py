"""What people are shown of a balancer's sessions, as plain values for JSON: docs/watching.md tells what each is.

Read by the thread of the page while the event loop goes on: what is looked at may be a round older than what comes
next.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import chain, islice, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.speeds import LOWEST
from services.balancer.history import COLUMNS, ROUNDS, History, reason_label
from services.balancer.hub import Hub
from services.balancer.session import Session

FORMAT, VERSION = "evenkeel-watch", 1
MOST_SESSIONS = 500
"""Of an overview; the least even ones of more."""
EVENT_ROUNDS = 60
"""That one event tells of; of a job that has more of them a second, not all are drawn."""
MOST_RANKS = 128
"""Whose bars are told, of more: those that most is to be said of."""

_MOST_MISSING = 32  # that are named
_QUIET_SECONDS = 10.0
_QUIET_INTERVALS = 20.0
_WHOLE = frozenset({"number", "round", "samples", "moved_samples", "size", "moved_size"})
_DIGITS = 7  # of a figure: nobody sees more, and they are a third of a document


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a document says of the balancer itself.

    Attributes:
        version: Of the software.
        instance: This incarnation.
    """

    version: str
    instance: int


class Views:
    """Documents about the sessions of a hub."""

    def __init__(self, hub: Hub, place: Place) -> None:
        self._hub = hub
        self._place = place

    def sessions(self, allows: Callable[[str], bool]) -> list[Session]:
        """The sessions of jobs that somebody may see."""
        return [one for one in list(self._hub.registry.sessions.values()) if allows(one.id.key.job)]

    def find(self, job: str, group: str, loader: str, allows: Callable[[str], bool]) -> Session | None:
        """A session by its name, if somebody may see it."""
        for session in self.sessions(allows):
            key = session.id.key
            if (key.job, key.group, key.loader) == (job, group, loader):
                return session
        return None

    def overview(self, allows: Callable[[str], bool]) -> dict[str, Any]:
        """A row for each session: those that are not balanced first, then the least even."""
        rows = [self.row(session) for session in self.sessions(allows)]
        rows.sort(key=_order)
        return {
            **self._head(),
            "sessions": rows[:MOST_SESSIONS],
            "sessions_left_out": max(0, len(rows) - MOST_SESSIONS),
        }

    def row(self, session: Session) -> dict[str, Any]:
        """What an overview tells of a session."""
        hub, key, statistics = self._hub, session.id.key, session.statistics
        history = self.history(session)
        now = hub.now
        joined = hub.registry.num_members(session.id)
        balance = statistics.last_balance
        figures = None if balance is None else balance[0]
        state = _state(session, history, now, joined)
        rate = 1 / history.interval if history.interval else None
        reasons = {reason.label: count for reason, count in list(statistics.identity.items())}
        return {
            "job": key.job,
            "group": key.group,
            "loader": key.loader,
            "run_id": session.id.run_id,
            "restart_count": session.id.restart,
            "state": state,
            "joined_ranks": joined,
            "ranks": session.terms.world_size,
            "missing_ranks": list(hub.registry.missing(session.id, session.terms.world_size)[:_MOST_MISSING]),
            "window": session.terms.window,
            "strategy": session.terms.options.strategy,
            "round": statistics.last_round,
            "rounds_balanced": statistics.balanced,
            "rounds_identity": reasons,
            "rounds_by_ranks": history.by_ranks,
            "rounds_elsewhere": history.skipped,
            "breaker_openings": history.num_gaps,
            "rounds_per_second": 0.0 if state in ("quiet", "left") else _number(rate) if history.rounds else None,
            "imbalance_before": None if figures is None else _number(figures.imbalance_before),
            "imbalance_after": None if figures is None else _number(figures.imbalance_after),
            "bound": None if figures is None else _number(figures.imbalance_bound),
            "moved_share": None if not figures or not figures.size else _number(figures.moved_size / figures.size),
            "wait_seconds": _number(statistics.mean_wait) if statistics.rounds else None,
            "silent_seconds": _number(max(0.0, now - session.last_message_at)),
            "saved_gpu_hours": _number(history.saved_seconds / 3600),
            "lost_gpu_hours": _number(history.lost_seconds / 3600) if history.knows_loads else None,
        }

    def document(
        self, session: Session, since: int = 0, *, most_rounds: int = ROUNDS, all_ranks: bool = False
    ) -> dict[str, Any]:
        """All that is kept of a session.

        Args:
            session: The session.
            since: Only rounds from the so-many-th decided one on.
            most_rounds: Of more, as many at even distances, the last among them.
            all_ranks: Also those beyond `MOST_RANKS`.
        """
        history = self.history(session)
        history.look_at_sample()
        rows = history.rows(since)
        shown = rows if len(rows) <= most_rounds else rows[_spread(len(rows), most_rounds)]
        ranks, left_out = _ranks(session, history, None if all_ranks else MOST_RANKS)
        return {
            **self._head(),
            "session": self.row(session),
            "rounds": _rounds(shown),
            "rounds_left_out": len(rows) - len(shown),
            "ranks": ranks,
            "ranks_left_out": left_out,
            "heaviest": history.heaviest,
            "fallbacks": [_shown(asdict(one)) for one in list(history.fallbacks)],
            "gaps": [asdict(one) for one in list(history.gaps)],
        }

    def history(self, session: Session) -> History:
        """What is remembered of a session; nothing for one that nobody has joined by a stream."""
        return self._hub.histories.get(session.id) or History(session.terms.world_size)

    def _head(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "time": round(time.time(), 3),
            "balancer": {
                "version": self._place.version,
                "instance": str(self._place.instance),  # more digits than a number of JavaScript has
                "draining": self._hub.registry.draining,
            },
        }


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    """Rows that differ by less than a hundredth stay where they are: they would change places every second."""
    return row["state"] == "balanced", -round(row["imbalance_after"] or 0.0, 2), row["job"], row["group"], row["loader"]


def as_json(document: dict[str, Any]) -> str:
    """A document as it goes out."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _state(session: Session, history: History, now: float, joined: int) -> str:
    if session.ends_at < math.inf:
        return "draining"
    if not joined:
        return "left"
    if joined < session.terms.world_size:
        return "joining" if len(session.nodes) < session.terms.world_size else "missing ranks"
    if not history.rounds:
        return "starting"
    if now - history.decided_at > max(_QUIET_SECONDS, _QUIET_INTERVALS * history.interval):
        return "quiet"
    last = max((one.round for one in list(history.fallbacks)), default=-1)
    return "falling back" if last >= history.newest else "balanced"


def _rounds(rows: NDArray[np.float64]) -> dict[str, list[Any]]:
    """The figures of rounds, a list for each column; null where a round has none."""
    columns: dict[str, list[Any]] = {}
    for name, column in zip(COLUMNS, rows.T, strict=True):
        if name == "reason":
            columns[name] = [reason_label(code) for code in column.tolist()]
            continue
        if name in _WHOLE:
            found = [None if value != value else int(value) for value in column.tolist()]  # noqa: PLR0124
        else:
            short = np.round(column, 3) if name == "time" else _shortened(column)
            found = [None if value != value else value for value in short.tolist()]  # noqa: PLR0124
        columns[name] = found
    return columns


def _spread(count: int, most: int) -> NDArray[np.int64]:
    """Places at even distances, the last among them."""
    return np.asarray(count - 1 - np.arange(most)[::-1] * count // most, np.int64)


def _shortened(column: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same to so many digits; what is no number stays none."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = 10.0 ** (_DIGITS - 1 - np.floor(np.log10(np.abs(column))))
        short = np.round(column * scale) / scale
    return np.where(np.isfinite(short), short, np.where(column == 0, 0.0, np.nan))


def _ranks(session: Session, history: History, most: int | None) -> tuple[dict[str, list[Any]], int]:
    """Ranks with their node, load in the last balanced round, lateness and speed, and how many are left out."""
    size = session.terms.world_size
    nodes, late, missed = dict(session.nodes), dict(history.late), dict(history.missed)
    balance = session.statistics.last_balance
    before, after = (None, None) if balance is None else (balance[2], balance[3])
    learned = session.statistics.last_learned
    slow = {one.rank: one for one in learned.stragglers}
    waits = {one.rank: one for one in sorted(learned.delays, key=lambda one: one.share)}  # the longer of a rank's two
    shown: Iterable[int] = range(size)
    if most is not None and size > most:
        told = [
            sorted(slow, key=lambda rank: slow[rank].speed),
            [*waits][::-1],
            sorted(late, key=lambda rank: -late[rank]),
        ]
        if after is not None:
            order = np.argsort(after, kind="stable").tolist()
            told += [order[::-1], order]
        in_turn = chain.from_iterable(zip_longest(*(ranks[:most] for ranks in told)))
        picked = dict.fromkeys(rank for rank in chain(in_turn, range(size)) if rank is not None)
        shown = sorted(islice(picked, most))
    ranks = list(shown)
    columns: dict[str, list[Any]] = {
        "rank": ranks,
        "node": [nodes.get(rank) for rank in ranks],
        "load_before": [None if before is None else _number(before[rank]) for rank in ranks],
        "load_after": [None if after is None else _number(after[rank]) for rank in ranks],
        "late_seconds": [_number(late.get(rank)) for rank in ranks],
        "missed": [missed.get(rank, 0) for rank in ranks],
        "speed": [_number(slow[rank].speed) if rank in slow else 1.0 for rank in ranks],
        "speed_at_floor": [rank in slow and slow[rank].speed <= LOWEST for rank in ranks],
        "slow_since": [slow[rank].since if rank in slow else None for rank in ranks],
        "delay": [waits[rank].cause.label if rank in waits else None for rank in ranks],
        "delay_share": [_number(waits[rank].share) if rank in waits else None for rank in ranks],
        "delay_since": [waits[rank].since if rank in waits else None for rank in ranks],
    }
    return columns, size - len(ranks)


def _shown(fallback: dict[str, Any]) -> dict[str, Any]:
    return {**fallback, "detail": fallback["detail"][:300], "missing_ranks": list(fallback["missing_ranks"])}


def _number(value: Any, digits: int | None = None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return round(float(value), digits) if digits is not None else float(f"{float(value):.{_DIGITS}g}")
