"""Looks at the sessions of balancers, for `evenkeel top`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.restarts import restart_text
from trainer_client.cli.calls import Calls
from trainer_client.cli.watching import Seen, SlowRank, render_job, slow_ranks

_SILENT_SECONDS = 10.0
_MOST_JOBS = 3  # sessions of a job that are shown whole
_MOST_SLOW = 4  # ranks that a line names


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One session; what is unknown is None.

    Attributes:
        balancer: Where it lives.
        name: Job/group/loader.
        run: Run id and restart count.
        joined: Ranks that are there.
        world_size: Ranks of the session.
        round: The last decided round.
        rounds_per_second: Since the last look; None at the first.
        balanced: Share of rounds with a plan.
        before: Max/mean load as loaded, of the last balanced round.
        after: The same as trained.
        over_bound: How far that is above the lower bound, relative.
        moved: Share of the bytes that changed rank.
        wait_seconds: From a round's first submission to its decision, on average.
        silent_seconds: Since a rank said anything.
        reasons: Rounds without a plan, by reason.
        state: In a word, as the balancer's page has it; empty: the balancer is older.
        saved_gpu_hours: That balancing has saved, an estimate; None: the balancer is older.
        slow_ranks: Those that hold up the others, what costs most first; None: not one job was asked for, or the
            balancer is older.
    """

    balancer: str
    name: str
    run: str
    joined: int
    world_size: int
    round: int
    rounds_per_second: float | None
    balanced: float | None
    before: float | None
    after: float | None
    over_bound: float | None
    moved: float | None
    wait_seconds: float | None
    silent_seconds: float
    reasons: dict[str, int]
    state: str = ""
    saved_gpu_hours: float | None = None
    slow_ranks: tuple[SlowRank, ...] | None = None


_READ: dict[str, Callable[[Row], str]] = {
    "ranks": lambda row: f"{row.joined}/{row.world_size}",
    "round": lambda row: str(row.round),
    "rounds/s": lambda row: _known("{:.1f}", row.rounds_per_second),
    "before": lambda row: _known("{:.3f}", row.before),
    "after": lambda row: _known("{:.3f}", row.after),
    "over bound": lambda row: _known("{:.2%}", row.over_bound),
    "moved": lambda row: _known("{:.1%}", row.moved),
    "wait": lambda row: "" if row.wait_seconds is None else f"{row.wait_seconds * 1e3:.1f} ms",
    "saved": lambda row: _known("{:.3g} GPU-h", row.saved_gpu_hours),
    "state": lambda row: row.state.replace(" ", "_"),
    "planned": lambda row: _known("{:.1%}", row.balanced),
}
"""Each column as text; empty: unknown."""
_LAST_TO_GO = (
    "ranks", "after", "rounds/s", "planned", "before", "state", "wait", "moved", "round", "over bound", "saved",
)  # fmt: skip
_NAME_WIDTH, _GAP = 16, 3  # least characters of a session's name, and between two columns


def _known(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)


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
        address: The balancer's address, for the title.
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
        cells = {name: _READ[name](row) or "–" for name in shown}
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
        slow = row.slow_ranks or ()
        more = [f"{len(slow) - _MOST_SLOW} more ranks"] if len(slow) > _MOST_SLOW else []
        notes = [*map(_told, slow[:_MOST_SLOW]), *more, *_notes(row)]
        values = {name.replace(" ", "_"): read(row).replace(" ", "") or "unknown" for name, read in _READ.items()}
        if several:
            values["balancer"] = row.balancer
        told = f" ({', '.join(notes)})" if notes else ""
        yield f"{stamp} {row.name} {' '.join(f'{name}={value}' for name, value in values.items())}{told}"


def _told(slow: SlowRank) -> str:
    where = f" on {printable(slow.node)}" if slow.node else ""
    return f"rank {slow.rank}{where}: {slow}"


def _worst_first(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (-(row.after or 0.0), row.name))


def _notes(row: Row) -> list[str]:
    notes = [f"silent for {row.silent_seconds:.0f} s"] if row.silent_seconds > _SILENT_SECONDS else []
    return notes + [f"{reason} {number}" for reason, number in sorted(row.reasons.items(), key=lambda each: -each[1])]


_FIRST_SECONDS = 0.5
Rates: TypeAlias = dict[str, tuple[float, int]]


def watch(
    balancers: list[Calls],
    address: str,
    job: str,
    interval: float,
    count: int,
    as_json: bool,
    save: Path | None = None,
) -> None:
    """Looks at the sessions again and again; `count` times, or until interrupted (0).

    A terminal shows a table that renews itself, and of one job its rounds and ranks too; what is piped gets a line a
    session and look.

    Args:
        balancers: All behind the address; one that does not answer is left out, as long as another does.
        address: The balancer's address, for the title.
        job: Only this job; empty: all.
        interval: Seconds between two looks.
        count: Looks to take.
        as_json: One line of JSON per look.
        save: File that holds all that was seen, written anew at each look.

    Raises:
        grpc.RpcError: If no balancer answers.
        OSError: If the file cannot be written.
        LookupError: If there is no such job at the first look, on no balancer behind the address, and looks are
            counted; else it is waited for.
    """
    console = Console()
    several = len(balancers) > 1
    looks, rates, seen = 0, Rates(), Seen()
    found, mute = look(balancers, job, rates, seen)  # rates need two looks
    if job and not found:
        unsure = f", and no answer from {', '.join(mute)}" if mute else ""
        missing = f"there is no job {printable(job)!r}{unsure}; evenkeel top without --job shows those there are"
        if count:
            raise LookupError(missing)
        typer.echo(f"note: {address}: {missing}; waiting for it", err=True)
    time.sleep(min(interval, _FIRST_SECONDS))
    with contextlib.ExitStack() as stack:
        live = None
        if console.is_terminal and not as_json:
            live = stack.enter_context(Live(console=console, auto_refresh=False, transient=False))
        while True:
            rows, silent = look(balancers, job, rates, seen)
            if save is not None:
                seen.save(save, time.time())
            if as_json:
                typer.echo(json.dumps([asdict(row) for row in rows]))
            elif live is not None:
                shown = [render_job(document, console.width) for document in seen.newest()]
                table = render(rows, address, several, silent, console.width)
                live.update(Group(table, *shown[:_MOST_JOBS]), refresh=True)
            else:
                for text in lines(rows, several, silent, datetime.now()):
                    typer.echo(text)
                sys.stdout.flush()
            looks += 1
            if looks == count:
                return
            time.sleep(interval)


def look(balancers: list[Calls], job: str, rates: Rates, seen: Seen) -> tuple[list[Row], list[str]]:
    """The sessions now, and which balancers do not answer.

    Args:
        balancers: Whom to ask.
        job: Only this job; empty: all.
        rates: Time and rounds of each session at the look before; brought up to date.
        seen: Gets what the balancers' pages show.

    Raises:
        grpc.RpcError: If no balancer answers.
    """
    wanted = pb.GetSessionStatsRequest.Watch.WATCH_ALL if job else pb.GetSessionStatsRequest.Watch.WATCH_ROW
    rows, silent, request = list[Row](), list[str](), pb.GetSessionStatsRequest(job=job, watch=wanted)
    earlier = dict(rates)
    rates.clear()
    for balancer in balancers:
        try:
            sessions = balancer.call("GetSessionStats", request).sessions
        except grpc.RpcError:
            silent.append(balancer.address)
            if len(silent) == len(balancers):
                raise
            continue
        now = time.monotonic()
        for session in sessions:
            key = f"{balancer.address} {_key(session)}"
            watched = json.loads(session.watch) if session.watch else None
            document = watched if watched and job else None
            row = document["session"] if document else watched
            seen.take(row, document, where=balancer.address, at=time.time())
            slow = slow_ranks(document) if document else None
            rows.append(read_row(session, earlier.get(key), now, balancer.address, row, slow))
            rates[key] = now, decided(session)
    return rows, silent


def printable(text: str) -> str:
    """What an older balancer lets others call a session, without what a terminal would obey."""
    return text if text.isprintable() else ascii(text)[1:-1]


def _key(session: Any) -> str:
    return f"{session.job}/{session.group}/{session.loader} {session.run_id}:{session.restart_count}"


def decided(session: Any) -> int:
    """Rounds that a session has had decided."""
    return int(session.rounds_balanced + sum(session.rounds_identity.values()))


def read_row(
    session: Any,
    earlier: tuple[float, int] | None,
    now: float,
    balancer: str,
    watched: dict[str, Any] | None = None,
    slow: tuple[SlowRank, ...] | None = None,
) -> Row:
    """A row of the table.

    Args:
        session: A `SessionStats` message.
        earlier: (time, rounds) of the look before.
        now: Time of this one, in the same seconds.
        balancer: Where it lives.
        watched: What the balancer's page shows of it.
        slow: Its ranks that hold up the others, where they are known.
    """
    rounds = decided(session)
    balance = session.last_balance if session.HasField("last_balance") else None
    return Row(
        balancer=balancer,
        name=printable(f"{session.job}/{session.group}/{session.loader}"),
        run=printable(f"{session.run_id}:{restart_text(session.restart_count)}"),
        joined=session.joined_ranks,
        world_size=session.world_size,
        round=session.last_round,
        rounds_per_second=(rounds - earlier[1]) / (now - earlier[0]) if earlier and now > earlier[0] else None,
        balanced=session.rounds_balanced / rounds if rounds else None,
        before=balance.imbalance_before if balance else None,
        after=balance.imbalance_after if balance else None,
        over_bound=balance.max_load_after / balance.lower_bound - 1 if balance and balance.lower_bound else None,
        moved=balance.moved_size / balance.size if balance and balance.size else None,
        wait_seconds=session.mean_round_wait_seconds if rounds else None,
        silent_seconds=session.seconds_since_last_message,
        reasons=dict(session.rounds_identity),
        state=str(watched["state"]) if watched else "",
        saved_gpu_hours=watched["saved_gpu_hours"] if watched else None,
        slow_ranks=slow,
    )
