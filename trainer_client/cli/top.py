"""`evenkeel top`: the live jobs of balancers, from what their pages read."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from evenkeel.addresses import Endpoint, endpoints
from evenkeel.credentials import Credentials, read_credentials
from trainer_client.cli.common import CaOption, TokenOption, errors_in_a_sentence

Document = dict[str, Any]

_USUAL = "127.0.0.1:9101"
_PAGES_HELP = f"Metrics ports of balancers, several replicas behind a name among them. [default: {_USUAL}]"
_MOST_RANKS = 16  # that are shown of a stream
_BAR = 30
_COLUMNS: dict[str, Callable[[Document], str]] = {
    "state": lambda row: row["state"],
    "ranks": lambda row: str(row["ranks"]),
    "round": lambda row: str(row["round"]),
    "rounds/s": lambda row: _figure("{:.1f}", row["rounds_per_second"]),
    "before": lambda row: _figure("{:.3f}", row["imbalance_before"]),
    "after": lambda row: _figure("{:.3f}", row["imbalance_after"]),
    "bound": lambda row: _figure("{:.3f}", row["imbalance_bound"]),
    "moved": lambda row: _figure("{:.1%}", row["moved_share"]),
    "round_ms": lambda row: _figure("{:.2f}", 1e3 * row["round_seconds"]),
    "by_lead": lambda row: str(row["rounds_by_lead"]),
    "slow": lambda row: str(row["slow_ranks"]),
    "saved_gpu_h": lambda row: _figure("{:.3g}", row["saved_gpu_hours"]),
}


def top(
    pages: Annotated[
        list[str] | None, typer.Argument(envvar="EVENKEEL_PAGES", metavar="[HOST:PORT]...", help=_PAGES_HELP)
    ] = None,
    tls_ca: CaOption = None,
    token_file: TokenOption = None,
    job: Annotated[str | None, typer.Option(help="Only this training job, with its ranks and what went wrong.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    count: Annotated[int, typer.Option(min=0, help="Looks to take; 0: until interrupted.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per look, as for a ticket.")] = False,
) -> None:
    """Show the live jobs of balancers: how even they are, how fast they go, and who holds them up.

    A job is seen at the replica that its rank 0 is connected to. Exit code: 0 at the end, also if nobody reads on, 1 if
    no balancer answers or a counted look finds no such job, 2 if the command line is wrong.
    """
    with errors_in_a_sentence(failure=1):
        credentials = read_credentials(tls_ca, token_file)
        names = [name for each in pages or [_USUAL] for name in each.split(",")]
        try:
            replicas = [replica for name in names for replica in _replicas(name, credentials)]
            _watch(replicas, job, interval, count, as_json=as_json)
        except BrokenPipeError:  # who read has seen enough, as in `evenkeel top | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except KeyError as error:
            raise RuntimeError(f"a page has no {error}; is it that of a balancer of this version?") from None
        except KeyboardInterrupt:
            return


@dataclass(frozen=True, slots=True)
class _Replica:
    """A balancer's page: where it is, for TLS the context, and the headers of each request."""

    place: Endpoint
    context: ssl.SSLContext | None
    headers: dict[str, str]

    def read(self, path: str, timeout: float) -> Document:
        """A document.

        Raises:
            OSError: If there is no answer, or none that can be used; the message says which, and what to do.
        """
        connection = http.client.HTTPConnection(self.place.server_name, self.place.port, timeout=timeout)
        try:
            connection.sock = socket.create_connection((self.place.host, self.place.port), timeout)
            if self.context is not None:  # by the name, whichever of its addresses this is
                connection.sock = self.context.wrap_socket(connection.sock, server_hostname=self.place.server_name)
            connection.request("GET", path, headers=self.headers)
            response = connection.getresponse()
            document = dict(json.loads(response.read()))
        except (http.client.HTTPException, ValueError, TypeError) as error:
            raise OSError(f"{error}: is this the balancer's metrics port, and does it want TLS?") from None
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise OSError(str(document.get("detail", response.status)))
        return document

    def look(self, job: str | None, timeout: float) -> Document:
        """What the replica shows; of one job, its streams with their ranks and failures."""
        try:
            overview = self.read("/v1/streams", timeout)
            if job is not None:
                rows = [row for row in overview["streams"] if row["job"] == job]
                queries = [urlencode({name: row[name] for name in ("job", "group", "loader")}) for row in rows]
                details = [self.read(f"/v1/stream?{query}", timeout) for query in queries]
                overview |= {"streams": rows, "details": details}
        except OSError as error:
            return {"replica": str(self.place), "error": str(error)}
        return {"replica": str(self.place), **overview}


def _replicas(name: str, credentials: Credentials) -> list[_Replica]:
    """The balancers behind an address, each with the token if that cannot be read on the way."""
    scheme, _, bare = name.rpartition("://")
    host, _, port = bare.rstrip("/").rpartition(":")
    if scheme not in ("", "http", "https") or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{name!r} is no page: give the host and the metrics port of a balancer, as in {_USUAL}")
    secure = scheme == "https" if scheme else credentials.secure
    context = credentials.ssl_context() or ssl.create_default_context() if secure else None
    shown = credentials if secure else Credentials(token_file=credentials.token_file)
    try:
        places = endpoints(f"{host}:{port}")
    except OSError as error:
        raise OSError(f"{host} has no address: {error}; check the name and the DNS") from None
    return [_Replica(place, context, dict(shown.metadata(str(place)))) for place in places]


def _watch(replicas: list[_Replica], job: str | None, interval: float, count: int, *, as_json: bool) -> None:
    """Looks again and again; `count` times, or until interrupted (0).

    Raises:
        RuntimeError: If no balancer answers, or looks are counted and there is no such job.
    """
    console, looks = Console(), 0
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None
    with live or nullcontext():
        while True:
            documents = [replica.look(job, max(5.0, interval)) for replica in replicas]
            if all("error" in document for document in documents):
                failed = "; ".join(f"no answer from {one['replica']}: {one['error']}" for one in documents)
                raise RuntimeError(
                    f"{failed}; start a balancer (docker compose up), or name the HOST:PORT of its metrics"
                )
            looks += 1
            if job and count == looks and not any(document.get("streams") for document in documents):
                raise RuntimeError(f"there is no job {job!a} here; evenkeel top without --job shows those there are")
            if as_json:
                print(json.dumps(documents), flush=True)
            elif live is not None:
                live.update(Group(*renderables(documents)), refresh=True)
            else:
                for line in _lines(documents):
                    print(time.strftime("%Y-%m-%dT%H:%M:%S%z"), line, flush=True)
            if looks == count:
                return
            time.sleep(interval)


def _lines(documents: Sequence[Document]) -> Iterator[str]:
    for document in documents:
        if "error" in document:
            yield f"{document['replica']}: no answer: {document['error']}"
        for row in document.get("streams", ()):
            values = " ".join(f"{name}={read(row)}" for name, read in _COLUMNS.items())
            yield f"{document['replica']} {_name(row)} {values}"


def renderables(documents: Sequence[Document]) -> Iterator[str | Table]:
    """What a terminal shows of a look at all replicas."""
    several = len(documents) > 1
    table = Table(box=None, pad_edge=False)
    for column in (*(["replica"] if several else []), "stream", *_COLUMNS):
        table.add_column(column, justify="left" if column in ("replica", "stream", "state") else "right")
    for document in documents:
        for row in document.get("streams", ()):
            cells = [_name(row), *(read(row) for read in _COLUMNS.values())]
            table.add_row(*([document["replica"]] if several else []), *map(escape, cells))
    yield table
    for document in documents:
        if "error" in document:
            yield f"[red]{document['replica']}: no answer: {escape(document['error'])}[/red]"
        for detail in document.get("details", ()):
            yield from _details(detail)


def _details(detail: Document) -> Iterator[str | Table]:
    """The ranks of a stream, those with most to do or that hold up the others, and the latest failures."""
    ranks = sorted(detail["ranks"], key=lambda one: (one["delay"] is None, one["speed"], -(one["load_after"] or 0)))
    most = max([1e-300, *((one["load_after"] or 0.0) for one in ranks)])
    table = Table(
        "rank", "load", "", "holds the others up",
        box=None, pad_edge=False, title=_name(detail["stream"]), title_justify="left",
    )  # fmt: skip
    for one in ranks[:_MOST_RANKS]:
        load = one["load_after"] or 0.0
        why = [f"computes at {one['speed']:.2f} of the median"] if one["speed"] < 1 else []
        why += [f"{one['delay']} +{one['delay_share']:.0%}"] if one["delay"] is not None else []
        table.add_row(str(one["rank"]), f"{load:.4g}", "█" * round(_BAR * load / most), ", ".join(why))
    yield table
    for failure in detail["failures"][-3:]:
        at = time.strftime("%H:%M:%S", time.localtime(failure["time"]))
        yield f"{at} a call failed: {failure['status']} ({failure['reason']})"
    if trouble := detail["stream"]["last_trouble"]:
        yield f"the lead's latest trouble: {escape(trouble)}"


def _name(row: Document) -> str:
    return "/".join(row[name] for name in ("job", "group", "loader"))


def _figure(form: str, value: float | None) -> str:
    return "unknown" if value is None else form.format(value)
