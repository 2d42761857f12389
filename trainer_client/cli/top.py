"""`evenkeel top`: the live jobs of balancers, from what their pages read."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from evenkeel.addresses import Endpoint, endpoints
from evenkeel.credentials import Credentials, read_credentials
from trainer_client.cli.connection_options import CaOption, TokenOption

Document = dict[str, Any]

_USUAL = "127.0.0.1:9101"
_MOST_RANKS = 16  # that are shown of a stream
_BAR = 30
_COLUMNS: dict[str, Callable[[Document], str]] = {
    "state": lambda row: row["state"],
    "ranks": lambda row: str(row["ranks"]),
    "round": lambda row: str(row["round"]),
    "rounds/s": lambda row: _known("{:.1f}", row["rounds_per_second"]),
    "before": lambda row: _known("{:.3f}", row["imbalance_before"]),
    "after": lambda row: _known("{:.3f}", row["imbalance_after"]),
    "bound": lambda row: _known("{:.3f}", row["imbalance_bound"]),
    "moved": lambda row: _known("{:.1%}", row["moved_share"]),
    "round_ms": lambda row: _known("{:.2f}", 1e3 * row["round_seconds"]),
    "by_lead": lambda row: str(row["rounds_by_lead"]),
    "slow": lambda row: str(row["slow_ranks"]),
    "saved_gpu_h": lambda row: _known("{:.3g}", row["saved_gpu_hours"]),
}


@dataclass(frozen=True, slots=True)
class Page:
    """The page of a replica.

    Attributes:
        place: Where it is.
        context: For TLS; None: plaintext.
        headers: Of each request.
    """

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
            document = json.loads(response.read())
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"{error}: is this the balancer's metrics port, and does it want TLS?") from None
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise OSError(str(document.get("detail", response.status)) if isinstance(document, dict) else "no answer")
        return dict(document)


def top(
    pages: Annotated[
        list[str] | None,
        typer.Argument(
            envvar="EVENKEEL_PAGES", metavar="[HOST:PORT]...",
            help=f"Metrics ports of balancers, several replicas behind a name among them. [default: {_USUAL}]",
        ),
    ] = None,
    tls_ca: CaOption = None,
    token_file: TokenOption = None,
    job: Annotated[str | None, typer.Option(help="Only this training job, with its ranks and what went wrong.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    count: Annotated[int, typer.Option(min=0, help="Looks to take; 0: until interrupted.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per look, as for a ticket.")] = False,
) -> None:  # fmt: skip
    """Show the live jobs of balancers: how even they are, how fast they go, and who holds them up.

    A job is seen at the replica that its rank 0 is connected to. Exit code: 0 at the end, also if nobody reads on, 1 if
    no balancer answers or a counted look finds no such job, 2 if the command line is wrong.
    """
    try:
        credentials = read_credentials(tls_ca, token_file)
        names = [name for each in pages or [_USUAL] for name in each.split(",")]
        found = [page for name in names for page in _pages(name, credentials)]
        _watch(found, job, interval, count, as_json=as_json)
    except (ValueError, LookupError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None
    except BrokenPipeError:  # who read has seen enough, as in `evenkeel top | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return


def _pages(name: str, credentials: Credentials) -> list[Page]:
    """The pages behind an address, each with the token if that cannot be read on the way.

    Raises:
        ValueError: If it is no address, or a file of the credentials cannot be used.
    """
    scheme, _, bare = name.rpartition("://")
    secure = scheme == "https" if scheme else credentials.secure
    host, _, port = bare.rstrip("/").rpartition(":")
    if scheme not in ("", "http", "https") or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{name!r} is no page: give the host and the metrics port of a balancer, as in {_USUAL}")
    context = credentials.ssl_context() or ssl.create_default_context() if secure else None
    try:
        places = endpoints(f"{host}:{port}")
    except OSError as error:
        raise LookupError(f"{host} has no address: {error}; check the name and the DNS") from None
    shown = credentials if secure else Credentials(token_file=credentials.token_file)
    return [Page(place, context, dict(shown.metadata(str(place)))) for place in places]


def _watch(pages: list[Page], job: str | None, interval: float, count: int, *, as_json: bool) -> None:
    """Looks again and again; `count` times, or until interrupted (0).

    Raises:
        LookupError: If no balancer answers, or looks are counted and there is no such job.
    """
    console, looks = Console(), 0
    with (
        Live(console=console, auto_refresh=False, transient=False)
        if console.is_terminal and not as_json
        else _Lines() as live
    ):
        while True:
            documents = [_look(page, job, max(5.0, interval)) for page in pages]
            if all("error" in document for document in documents):
                raise LookupError("; ".join(f"no answer from {one['replica']}: {one['error']}" for one in documents))
            looks += 1
            if job and count == looks and not any(document.get("streams") for document in documents):
                raise LookupError(f"there is no job {job!a} here; evenkeel top without --job shows those there are")
            if as_json:
                print(json.dumps(documents), flush=True)
            else:
                live.update(_Shown(documents, len(pages) > 1), refresh=True)
            if looks == count:
                return
            time.sleep(interval)


class _Lines:
    """Where there is no terminal: a line a stream and look, for files and pipes."""

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def update(self, shown: _Shown, *, refresh: bool) -> None:
        del refresh
        at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        for line in shown.lines():
            print(at, line, flush=True)


def _look(page: Page, job: str | None, timeout: float) -> Document:
    """What a replica shows; of one job, its streams with their ranks and failures."""
    try:
        overview = page.read("/v1/streams", timeout)
        if job is not None:
            rows = [row for row in overview["streams"] if row["job"] == job]
            overview["streams"] = rows
            overview["details"] = [page.read(_path_of(row), timeout) for row in rows]
    except OSError as error:
        return {"replica": str(page.place), "error": str(error)}
    return {"replica": str(page.place), **overview}


def _path_of(row: Document) -> str:
    return f"/v1/stream?{urlencode({name: row[name] for name in ('job', 'group', 'loader')})}"


@dataclass(frozen=True, slots=True)
class _Shown:
    """A look at all replicas, as a table or as lines."""

    documents: list[Document]
    several: bool

    def lines(self) -> Iterator[str]:
        for document in self.documents:
            if "error" in document:
                yield f"{document['replica']}: no answer: {document['error']}"
            for row in document.get("streams", ()):
                values = " ".join(f"{name}={read(row)}" for name, read in _COLUMNS.items())
                yield f"{document['replica']} {_name(row)} {values}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=None, pad_edge=False)
        for column in (*(["replica"] if self.several else []), "stream", *_COLUMNS):
            table.add_column(column, justify="left" if column in ("replica", "stream", "state") else "right")
        for document in self.documents:
            for row in document.get("streams", ()):
                cells = [_name(row), *(read(row) for read in _COLUMNS.values())]
                table.add_row(*([document["replica"]] if self.several else []), *map(escape, cells))
        yield table
        for document in self.documents:
            if "error" in document:
                yield f"[red]{document['replica']}: no answer: {escape(document['error'])}[/red]"
            for detail in document.get("details", ()):
                yield from _details(detail)


def _details(detail: Document) -> Iterator[str | Table]:
    """The ranks of a stream, those with most to do or that hold up the others, and the latest failures."""
    ranks = sorted(detail["ranks"], key=lambda one: (one["delay"] is None, one["speed"], -(one["load_after"] or 0)))
    most = max([1e-300, *((one["load_after"] or 0.0) for one in ranks)])
    table = Table(box=None, pad_edge=False, title=_name(detail["stream"]), title_justify="left")
    for column in ("rank", "load", "", "holds the others up"):
        table.add_column(column)
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


def _known(form: str, value: float | None) -> str:
    return "unknown" if value is None else form.format(value)
