"""What commands share: their options, errors in a sentence, findings, tables, and files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich import status
from rich.console import Console
from rich.markup import escape
from rich.table import Table

CaOption = Annotated[Path | None, typer.Option("--tls-ca", help="Authorities of the service; EVENKEEL_TLS_CA.")]
TokenOption = Annotated[Path | None, typer.Option("--token-file", help="File with a token; EVENKEEL_TOKEN_FILE.")]


class Status(StrEnum):
    """How bad what `evenkeel doctor` finds is; the value is the colour."""

    OK = "green"
    WARN = "yellow"
    FAIL = "red"
    SKIP = "dim"


class Finding(NamedTuple):
    """One line of its report: what was looked at, how bad it is, what was found, and what to do if anything."""

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


def show(title: str, headings: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Prints a table whose first column is text and the others figures."""
    table = Table(title=title)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console().print(table)


def write(flag: str, path: Path, text: str) -> str:
    """Writes a file; why it could not be written, if so, and what to do."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        return f"{flag}: {path}: {error.strerror or error}; name a file in a folder that is there and may be written"
    return ""
