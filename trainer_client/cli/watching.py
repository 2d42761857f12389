"""One job for `evenkeel top`, as the balancer's page shows it, and what was seen as a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

MOST_ROUNDS = 5000
"""Rounds of a session that a file keeps."""
MOST_ROWS, MOST_DOCUMENTS = 5000, 16
"""Runs of sessions that it keeps, those that were seen last: of which it has a row, and all."""

COMPUTING = "computing"
_SHADES = " ▁▂▃▄▅▆▇█"
_BAR = 24
_SHOWN_RANKS, _SHOWN_SAMPLES, _SHOWN_REASONS = 16, 5, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that holds the others up.

    Attributes:
        rank: Its number.
        node: Where it runs; None: unknown.
        cause: In what it is slower, what costs most: `computing`, `loading`, `network`, or `loop`.
        share: By how much, in what the median rank's computation takes.
        or_more: It may be more: this is the most that balancing takes into account.
    """

    rank: int
    node: str | None
    cause: str
    share: float
    or_more: bool = False

    def __str__(self) -> str:
        if self.cause != COMPUTING:
            return f"{self.cause} +{self.share:.0%}"
        return f"computing {'≤' if self.or_more else ''}{1 / (1 + self.share):.2f}×"


class Seen:
    """What a command has seen of sessions, to be shown and saved; also of those that are over."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._documents: dict[tuple[Any, ...], dict[str, Any]] = {}

    def take(self, row: dict[str, Any] | None, document: dict[str, Any] | None, *, where: str, at: float) -> None:
        """Adds what a balancer says of a session: its row, or all of it with the rounds that it remembers.

        Args:
            row: The row; None: the balancer is older.
            document: All of it; None: only rows are asked for.
            where: The balancer's address.
            at: Seconds since 1970.
        """
        if row is None:
            return
        run: tuple[Any, ...] = (where, *_name(row), row["run_id"], row["restart_count"])
        _keep(self._rows, run, {**row, "balancer": where, "seen": round(at, 3)}, MOST_ROWS)
        if document is not None:
            run = (*run, document["balancer"]["instance"])
            before = self._documents.get(run)
            if before is not None:
                document = {**document, "rounds": _joined(before["rounds"], document["rounds"])}
            _keep(self._documents, run, document, MOST_DOCUMENTS)

    def newest(self) -> list[dict[str, Any]]:
        """The last document of each session."""
        return list({_name(document["session"]): document for document in self._documents.values()}.values())

    def save(self, path: Path, now: float) -> None:
        """Writes it all, so that a reader sees a whole file.

        Raises:
            OSError: If it cannot be written.
        """
        content = {
            "format": "evenkeel-watch",
            "version": 1,
            "time": round(now, 3),
            "sessions": list(self._rows.values()),
            "jobs": list(self._documents.values()),
        }
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def render_job(document: dict[str, Any], width: int) -> RenderableType:
    """A session: its figures, its rounds, its ranks, heaviest samples and reasons.

    Args:
        document: What a balancer says of it.
        width: Characters of a line.
    """
    session, rounds = document["session"], document["rounds"]
    name = f"{session['job']}/{session['group']}/{session['loader']}"
    opened = session["breaker_openings"]
    breaker = f"opened {opened} ×, {session['rounds_elsewhere']} rounds elsewhere" if opened else "closed so far"
    facts = (
        f"{session['state']}, {session['joined_ranks']}/{session['ranks']} ranks, round {session['round']}, "
        f"{_number(session['rounds_per_second'])} rounds/s, wait {_milliseconds(session['wait_seconds'])}, "
        f"breaker {breaker}, saved {_number(session['saved_gpu_hours'])} GPU-hours, "
        f"lost {_number(session['lost_gpu_hours'])}"
    )
    lines: list[RenderableType] = [Text(name, style="bold"), Text(facts)]
    room = max(20, width - 24)
    for label, column in (("before", "imbalance_before"), ("after", "imbalance_after")):
        values = rounds[column][-room:]
        largest = max((value for value in rounds["imbalance_before"][-room:] if value), default=1.0)
        last = next((value for value in reversed(values) if value is not None), None)
        lines.append(Text(f"{label:<7}{_number(last):>8} {_sparkline(values, largest)}"))
    moved = [m / s if s else None for m, s in zip(rounds["moved_size"][-room:], rounds["size"][-room:], strict=True)]
    lines.append(Text(f"moved  {_percent(moved[-1] if moved else None):>8} {_sparkline(moved, 1.0, base=0.0)}"))
    lines.append(_ranks(document, width))
    if document["heaviest"]:
        told = [
            f"{_number(one['cost'])} ({_percent(one['share'])} of a rank's mean, rank {one['home']} to {one['rank']})"
            for one in document["heaviest"]["samples"][:_SHOWN_SAMPLES]
        ]
        lines.append(Text(f"heaviest samples of round {document['heaviest']['round']}: {'; '.join(told)}"))
    for one in document["fallbacks"][-_SHOWN_REASONS:]:
        lines.append(Text(f"round {one['round']}: {one['reason']}. {one['detail']}", style="yellow"))
    for one in document["gaps"][-_SHOWN_REASONS:]:
        lines.append(Text(f"rounds {one['first']} to {one['last']} did not come here: breaker open", style="yellow"))
    return Group(*lines)


def _ranks(document: dict[str, Any], width: int) -> RenderableType:
    """Ranks, the slow ones first, then those that come last; a column only where there is something to say in it."""
    rows = sorted(_rows(document), key=lambda one: (_slow(one) is None, -(one["late_seconds"] or 0.0)))
    left_out = document["ranks_left_out"] + max(0, len(rows) - _SHOWN_RANKS)
    rows = rows[:_SHOWN_RANKS]
    largest = max((value for value in document["ranks"]["load_after"] if value), default=0.0)
    cells = {
        "rank": [str(one["rank"]) for one in rows],
        "late": [_milliseconds(one["late_seconds"]) for one in rows],
        "missed": [str(one["missed"] or "") for one in rows],
        "slow in": [str(_slow(one) or "") for one in rows],
    }
    cells = {name: column for name, column in cells.items() if any(column)}
    sizes = {name: max(map(len, (name, *column))) for name, column in cells.items()}
    room = width - sum(sizes.values()) - 3 * (len(cells) + 1)  # for nodes and bars
    hosts = max((len(one["node"] or "") for one in rows), default=0)
    hosts = max(4, min(hosts, room - 8))
    bar = max(4, min(_BAR, room - hosts))
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("node", no_wrap=True, max_width=hosts)
    table.add_column("load", no_wrap=True, width=bar)
    others = list(cells)[1:]
    for name in others:
        table.add_column(name, justify="right", no_wrap=True, min_width=sizes[name])
    for at, one in enumerate(rows):
        filled = round(bar * (one["load_after"] or 0.0) / largest) if largest else 0
        table.add_row(
            cells["rank"][at], escape(one["node"] or ""), "█" * filled, *(cells[n][at] for n in list(cells)[1:])
        )
    return Group(Text(f"ranks, the latest first{f'; {left_out} left out' if left_out else ''}"), table)


def slow_ranks(document: dict[str, Any]) -> tuple[SlowRank, ...]:
    """The ranks that are known to hold up a session's others, what costs most first."""
    slow = (_slow(one) for one in _rows(document))
    return tuple(sorted((one for one in slow if one is not None), key=lambda one: -one.share))


def _rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    ranks = document["ranks"]
    return [dict(zip(ranks, row, strict=True)) for row in zip(*ranks.values(), strict=True)]


def _slow(row: dict[str, Any]) -> SlowRank | None:
    """Whether and in what a rank is slower than the others; a balancer may be older, and not say it."""
    computing, delay = 1 / row.get("speed", 1.0) - 1, row.get("delay_share") or 0.0
    cause, share = (str(row["delay"]), delay) if delay > computing else (COMPUTING, computing)
    if share <= 0:
        return None
    or_more = cause == COMPUTING and bool(row.get("speed_at_floor"))
    return SlowRank(rank=row["rank"], node=row["node"], cause=cause, share=share, or_more=or_more)


def _sparkline(values: Sequence[float | None], largest: float, base: float = 1.0) -> str:
    """A character a value, a cross where there is none."""
    span = max(1e-12, largest - base)
    return "".join(
        "×" if value is None else _SHADES[min(8, max(1, math.ceil(8 * (value - base) / span)))] for value in values
    )


def _joined(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The rounds of two looks, each once."""
    last = before["number"][-1] if before["number"] else -1
    new = sum(number > last for number in after["number"])
    return {name: (before[name] + after[name][len(after[name]) - new :])[-MOST_ROUNDS:] for name in after}


def _name(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["job"], row["group"], row["loader"]


def _keep(kept: dict[tuple[Any, ...], dict[str, Any]], key: tuple[Any, ...], value: dict[str, Any], most: int) -> None:
    """Puts it last, and forgets the one that was not seen for longest where there are too many."""
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > most:
        del kept[next(iter(kept))]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.1f} ms"
