"""The sessions of a balancer as `evenkeel top` shows them: a table as wide as the terminal, or a line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

from rich.markup import escape
from rich.table import Table

_SILENT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One session.

    Attributes:
        balancer: Where it lives.
        name: job/group/loader.
        run: Run id and restart count.
        joined: Ranks that are there.
        world_size: Ranks of the session.
        round: The last decided round.
        rounds_per_second: Since the last look; None at the first.
        balanced: Share of rounds with a plan.
        before: max/mean load as loaded, of the last balanced round.
        after: The same as trained.
        over_bound: How far that is above the lower bound, relative.
        moved: Share of the samples that changed rank.
        wait_seconds: From a round's first submission to its decision, on average.
        silent_seconds: Since a rank said anything.
        reasons: Rounds without a plan, by reason.
    """

    balancer: str
    name: str
    run: str
    joined: int
    world_size: int
    round: int
    rounds_per_second: float | None
    balanced: float
    before: float
    after: float
    over_bound: float
    moved: float
    wait_seconds: float
    silent_seconds: float
    reasons: dict[str, int]


_READ: dict[str, Callable[[Row], str]] = {
    "ranks": lambda row: f"{row.joined}/{row.world_size}",
    "round": lambda row: str(row.round),
    "rounds/s": lambda row: "" if row.rounds_per_second is None else f"{row.rounds_per_second:.1f}",
    "before": lambda row: f"{row.before:.3f}",
    "after": lambda row: f"{row.after:.3f}",
    "over bound": lambda row: f"{row.over_bound:.2%}",
    "moved": lambda row: f"{row.moved:.1%}",
    "wait": lambda row: f"{row.wait_seconds * 1e3:.1f} ms",
    "planned": lambda row: f"{row.balanced:.1%}",
}
_LAST_TO_GO = ("ranks", "after", "rounds/s", "planned", "before", "wait", "moved", "round", "over bound")
_NAME_WIDTH, _GAP = 16, 3  # least characters of a session's name, and between two columns


def _that_fit(rows: list[Row], width: int, several: bool) -> list[str]:
    """The columns for which there is room, those that matter most."""
    left = width - _NAME_WIDTH * (2 if several else 1) - (_GAP if several else 0)
    fit = []
    for name in _LAST_TO_GO:
        left -= _GAP + max(len(name), *(len(_READ[name](row)) for row in rows), 0)
        if left < 0:
            break
        fit.append(name)
    return [name for name in _READ if name in fit]


def render(rows: list[Row], address: str, several: bool, silent: list[str], width: int) -> Table:
    """The table, the least even job first; of several balancers with a column that tells which.

    Args:
        rows: The sessions.
        address: For the title.
        several: Whether there are several balancers.
        silent: Those that do not answer.
        width: Characters of a line; columns that matter less are left out where there is no room.
    """
    title = f"{len(rows)} sessions on {address}" + (f"; no answer from {', '.join(silent)}" if silent else "")
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("job/group/loader", overflow="fold", min_width=_NAME_WIDTH)
    if several:
        table.add_column("balancer", overflow="fold", min_width=_NAME_WIDTH)
    shown = _that_fit(rows, width, several)
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for row in _worst_first(rows):
        cells = {name: _READ[name](row) for name in shown}
        if row.joined < row.world_size and "ranks" in cells:
            cells["ranks"] = f"[red]{cells['ranks']}[/]"
        name = "\n".join([escape(row.name), *(f"[yellow]{escape(note)}[/]" for note in _notes(row))])
        table.add_row(name, *([row.balancer] if several else []), *cells.values())
    return table


def lines(rows: list[Row], several: bool, silent: list[str], now: datetime) -> Iterator[str]:
    """A line for each session, for files and pipes: the time, its name, then every column as `name=value`."""
    stamp = now.isoformat(timespec="seconds")
    for address in silent:
        yield f"{stamp} no answer from {address}"
    if not rows:
        yield f"{stamp} no sessions"
    for row in _worst_first(rows):
        values = {name.replace(" ", "_"): read(row).replace(" ", "") for name, read in _READ.items()}
        if several:
            values["balancer"] = row.balancer
        notes = f" ({', '.join(_notes(row))})" if _notes(row) else ""
        yield f"{stamp} {row.name} {' '.join(f'{name}={value}' for name, value in values.items())}{notes}"


def _worst_first(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (-row.after, row.name))


def _notes(row: Row) -> list[str]:
    notes = [f"silent for {row.silent_seconds:.0f} s"] if row.silent_seconds > _SILENT_SECONDS else []
    return notes + [f"{reason} {number}" for reason, number in sorted(row.reasons.items(), key=lambda each: -each[1])]
