"""What people are shown, as plain values for JSON: docs/operate/watching.md tells what each is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from evenkeel.restarts import restart_text
from services.balancer.history import History, Round, Stream, StreamName

FORMAT, VERSION = "evenkeel-watch", 2
MOST_RANKS = 128
"""That a document tells of, of more: the slow ones, and those with most to do."""

_DIGITS = 7  # of a figure: nobody sees more
_ORDER = {"failing": 0, "balanced": 1, "quiet": 2, "left": 3}


class Views:
    """Documents about a history, made by the thread of who asks."""

    def __init__(self, history: History, *, version: str, instance: int, draining: Callable[[], bool]) -> None:
        self._history = history
        self._version, self._instance, self._draining = version, instance, draining

    def overview(self, allows: Callable[[str], bool]) -> dict[str, Any]:
        """A row for each stream of the jobs that somebody may see: failing ones first, then the least even."""
        rows = [self._row(stream) for stream in self._history.streams if allows(stream.name.job)]
        return {**self._head(), "streams": sorted(rows, key=_place)}

    def stream(self, name: StreamName, *, since: int = 0, all_ranks: bool = False) -> dict[str, Any] | None:
        """All that is known of a stream; None where there is none.

        Args:
            name: Of the stream.
            since: Only rounds from this number on.
            all_ranks: Also those beyond `MOST_RANKS`.
        """
        stream = next((one for one in self._history.streams if one.name == name), None)
        if stream is None:
            return None
        ranks = _ranks(stream, stream.latest.ranks if all_ranks else MOST_RANKS)
        rounds = [one for one in list(stream.rounds) if one.number >= since]
        return {
            **self._head(),
            "stream": self._row(stream),
            "rounds": {field: [_short(one[column]) for one in rounds] for column, field in enumerate(Round._fields)},
            "ranks": ranks,
            "ranks_left_out": stream.latest.ranks - len(ranks),
            "failures": [one._asdict() for one in list(stream.failures.latest)],
        }

    def _head(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "time": round(time.time(), 3),
            "balancer": {
                "version": self._version,
                "instance": str(self._instance),  # more digits than a number of JavaScript has
                "draining": self._draining(),
            },
        }

    def _row(self, stream: Stream) -> dict[str, Any]:
        now, latest, figures, facts = self._history.now, stream.latest, stream.latest.figures, stream.latest.facts
        rounds, interval = list(stream.rounds), stream.interval
        return {
            **stream.name._asdict(),
            "run_id": latest.names.run_id,
            "restart_count": restart_text(latest.names.restart_count),
            "client_version": latest.names.client_version,
            "state": stream.state(now),
            "silent_seconds": _short(now - stream.planned_at),
            "ranks": latest.ranks,
            "window": latest.batches,
            "strategy": latest.strategy,
            "round": latest.names.round,
            "rounds_per_second": _short(1 / interval) if interval else None,
            "rounds_planned": stream.planned,
            "rounds_by_lead": facts.rounds_by_lead,
            "rounds_unbalanced": facts.rounds_unbalanced,
            "last_trouble": facts.last_trouble,
            "failed_calls": dict(stream.failures.counts),
            "imbalance_before": _short(figures.imbalance_before),
            "imbalance_after": _short(figures.imbalance_after),
            "imbalance_bound": _short(figures.imbalance_bound),
            "moved_share": _short(figures.moved_size / figures.size) if figures.size else None,
            "round_seconds": _short(sum(one.seconds for one in rounds) / len(rounds)),
            "search_seconds": _short(sum(one.search_seconds for one in rounds) / len(rounds)),
            "step_seconds": _short(facts.step_seconds) if facts.step_seconds else None,
            "saved_gpu_hours": _short(stream.saved_gpu_seconds / 3600) if facts.step_seconds else None,
            "slow_ranks": len({one.rank for one in facts.stragglers} | {one.rank for one in facts.delays}),
        }


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    """Where a row stands; those that differ by less than a hundredth would change places every second."""
    return _ORDER[row["state"]], -round(row["imbalance_after"] or 0.0, 2), row["job"], row["group"], row["loader"]


def _ranks(stream: Stream, most: int) -> list[dict[str, Any]]:
    """The ranks of the latest round: loads, and in what they are known to hold up the others."""
    latest = stream.latest
    slow = {one.rank: one for one in latest.facts.stragglers}
    late = {one.rank: one for one in sorted(latest.facts.delays, key=lambda one: one.share)}  # the worst of each
    loads = latest.loads_after
    order = sorted(range(latest.ranks), key=lambda rank: (rank not in slow and rank not in late, -loads[rank]))
    return [
        {
            "rank": rank,
            "load_before": _short(latest.loads_before[rank]),
            "load_after": _short(loads[rank]),
            "speed": _short(slow[rank].speed) if rank in slow else 1.0,
            "slow_since": slow[rank].since if rank in slow else None,
            "delay": late[rank].cause.label if rank in late else None,
            "delay_share": _short(late[rank].share) if rank in late else None,
            "delay_since": late[rank].since if rank in late else None,
        }
        for rank in sorted(order[:most])
    ]


def _short(value: float) -> float | int | None:
    """A figure with so many digits; whole numbers stay, and what is no number is none."""
    if isinstance(value, int):
        return value
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
