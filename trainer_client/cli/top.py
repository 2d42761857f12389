"""`evenkeel top`: the live jobs of a balancer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer_client.cli.connection_options import BalancerOption, CaOption, TokenOption


def top(
    balancer: BalancerOption = None,
    tls_ca: CaOption = None,
    token_file: TokenOption = None,
    job: Annotated[str | None, typer.Option(help="Only this training job, with its rounds and ranks.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    count: Annotated[int, typer.Option(min=0, help="Looks to take; 0: until interrupted.")] = 0,
    save: Annotated[
        Path | None, typer.Option(help="File that gets all that was seen as JSON, as for a ticket.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per look instead.")] = False,
) -> None:
    """Show the live jobs of a balancer, or of all behind a name: how even they are, and how fast they go.

    A job that is not there yet is waited for, unless looks are counted. Exit code: 0 at the end, also if nobody reads
    on, 1 if no balancer answers or a counted look finds no such job, 2 if the command line is wrong, or
    grpcio is not installed.
    """
    import contextlib
    import os
    import sys

    import grpc

    from evenkeel.addresses import endpoints
    from evenkeel.credentials import read_credentials
    from trainer_client.cli.calls import connected, explain, read_address
    from trainer_client.cli.sessions import watch

    try:
        address = read_address(balancer)
        credentials = read_credentials(tls_ca, token_file)
        with contextlib.ExitStack() as stack:
            balancers = [
                stack.enter_context(connected(place, credentials, timeout=max(5.0, interval)))
                for place in endpoints(address)
            ]
            watch(balancers, address, job or "", interval, count, as_json, save)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except LookupError as error:
        typer.echo(f"error: {address}: {error}", err=True)
        raise typer.Exit(1) from None
    except grpc.RpcError as error:
        typer.echo(f"error: {address}: {explain(error)}; evenkeel doctor --balancer {address} tells more", err=True)
        raise typer.Exit(1) from None
    except BrokenPipeError:  # who read has seen enough, as in `evenkeel top | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        typer.echo(f"error: {address}: {error}; evenkeel doctor --balancer {address} tells more", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        return
