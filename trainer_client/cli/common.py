"""What commands share: their options, errors in a sentence, what a terminal shows, and files that are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich import status
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

CaOption = Annotated[Path | None, typer.Option("--tls-ca", help="Authorities of the service; EVENKEEL_TLS_CA.")]
TokenOption = Annotated[Path | None, typer.Option("--token-file", help="File with a token; EVENKEEL_TOKEN_FILE.")]


class Status(StrEnum):
    """How bad what is found is; the value is the colour."""

    OK = "green"
    WARN = "yellow"
    FAIL = "red"
    SKIP = "dim"


class Finding(NamedTuple):
    """A line of the report: what was looked at, how bad it is, what was found, and what to do if anything."""

    check: str
    status: Status
    text: str
    remedy: str = ""


@contextmanager
def errors_in_a_sentence(mistake: int = 2, failure: int = 2) -> Iterator[None]:
    """Ends the command with an exit code where what was given cannot be used, or where a machine or a file fails."""
    try:
        yield
    except (typer.Exit, typer.Abort):  # which are RuntimeErrors
        raise
    except (ValueError, OSError, RuntimeError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(mistake if isinstance(error, ValueError) else failure) from None


def waiting(what: str, *, quiet: bool = False) -> status.Status:
    """A spinner on standard error."""
    return Console(stderr=True, quiet=quiet).status(what, spinner="line")


@contextmanager
def progress(what: str) -> Iterator[Callable[[float, float], None]]:
    """A bar on standard error, while a terminal is there; is called with what is done, and of how much."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show(title: str, headings: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Prints a table whose first column is text and the others figures."""
    table = Table(title=title)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console().print(table)


def write(flag: str, path: Path, text: str) -> bool:
    """Writes a file, or says why it cannot be written; whether it is."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        remedy = "name a file in a folder that is there and may be written"
        typer.echo(f"error: {flag}: {path}: {error.strerror or error}; {remedy}", err=True)
        return False
    return True
