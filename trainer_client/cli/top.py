"""`evenkeel top`: the live jobs of balancers, from what their pages read."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

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
                live.update(_shown(documents, several=len(pages) > 1), refresh=True)
            if looks == count:
                return
            time.sleep(interval)
