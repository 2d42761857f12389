"""Looks at the sessions of balancers, for `evenkeel top`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict
from datetime import datetime
from typing import Any, TypeAlias

import grpc
import typer
from rich.console import Console
from rich.live import Live

from evenkeel.protocol import balancer_pb2 as pb
from trainer_client.cli.calls import Calls
from trainer_client.cli.session_rows import Row, lines, render

_FIRST_SECONDS = 0.5
Seen: TypeAlias = dict[str, tuple[float, int]]


def watch(balancers: list[Calls], address: str, job: str, interval: float, count: int, as_json: bool) -> None:
    """Looks at the sessions again and again; `count` times, or until interrupted (0).

    A terminal shows a table that renews itself; what is piped gets a line a session and look.

    Args:
        balancers: All behind the address; one that does not answer is left out, as long as another does.
        address: For the title.
        job: Only this job; empty: all.
        interval: Seconds between two looks.
        count: Looks to take.
        as_json: One line of JSON per look.

    Raises:
        grpc.RpcError: If no balancer answers.
    """
    console = Console()
    several = len(balancers) > 1
    looks, seen = 0, Seen()
    look(balancers, job, seen)  # rates need two looks
    time.sleep(min(interval, _FIRST_SECONDS))
    with contextlib.ExitStack() as stack:
        live = None
        if console.is_terminal and not as_json:
            live = stack.enter_context(Live(console=console, auto_refresh=False, transient=False))
        while True:
            rows, silent = look(balancers, job, seen)
            if as_json:
                typer.echo(json.dumps([asdict(row) for row in rows]))
            elif live is not None:
                live.update(render(rows, address, several, silent, console.width), refresh=True)
            else:
                for text in lines(rows, several, silent, datetime.now()):
                    typer.echo(text)
                sys.stdout.flush()
            looks += 1
            if looks == count:
                return
            time.sleep(interval)


def look(balancers: list[Calls], job: str, seen: Seen) -> tuple[list[Row], list[str]]:
    """The sessions now, and which balancers do not answer.

    Args:
        balancers: Whom to ask.
        job: Only this job; empty: all.
        seen: Time and rounds of each session at the look before; brought up to date.

    Raises:
        grpc.RpcError: If no balancer answers.
    """
    rows, silent, request = list[Row](), list[str](), pb.GetSessionStatsRequest(job=job)
    earlier = dict(seen)
    seen.clear()
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
            rows.append(read_row(session, earlier.get(key), now, balancer.address))
            seen[key] = now, decided(session)
    return rows, silent


def _key(session: Any) -> str:
    return f"{session.job}/{session.group}/{session.loader} {session.run_id}:{session.restart_count}"


def decided(session: Any) -> int:
    """Rounds that a session has had decided."""
    return int(session.rounds_balanced + sum(session.rounds_identity.values()))


def read_row(session: Any, earlier: tuple[float, int] | None, now: float, balancer: str) -> Row:
    """A row of the table.

    Args:
        session: A `SessionStats` message.
        earlier: (time, rounds) of the look before.
        now: Time of this one, in the same seconds.
        balancer: Where it lives.
    """
    rounds, balance = decided(session), session.last_balance
    mean = balance.mean_load
    bound = balance.lower_bound / mean if mean else 1.0
    return Row(
        balancer=balancer,
        name=f"{session.job}/{session.group}/{session.loader}",
        run=f"{session.run_id}:{session.restart_count}",
        joined=session.joined_ranks,
        world_size=session.world_size,
        round=session.last_round,
        rounds_per_second=(rounds - earlier[1]) / (now - earlier[0]) if earlier and now > earlier[0] else None,
        balanced=session.rounds_balanced / rounds if rounds else 0.0,
        before=balance.imbalance_before,
        after=balance.imbalance_after,
        over_bound=balance.imbalance_after / bound - 1 if bound and balance.imbalance_after else 0.0,
        moved=balance.moved_samples / balance.samples if balance.samples else 0.0,
        wait_seconds=session.mean_round_wait_seconds,
        silent_seconds=session.seconds_since_last_message,
        reasons=dict(session.rounds_identity),
    )
