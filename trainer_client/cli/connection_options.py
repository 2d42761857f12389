"""Options of the commands that speak to a balancer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BalancerOption = Annotated[
    str | None,
    typer.Option(
        "--balancer",
        envvar="EVENKEEL_BALANCER",
        help="host:port of a balancer or of several behind one name, or IP:port,IP:port.",
    ),
]
CaOption = Annotated[Path | None, typer.Option("--tls-ca", help="Authorities of the balancer; EVENKEEL_TLS_CA.")]
TokenOption = Annotated[Path | None, typer.Option("--token-file", help="File with a token; EVENKEEL_TOKEN_FILE.")]
