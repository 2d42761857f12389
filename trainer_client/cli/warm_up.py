"""`evenkeel warm-up`: compile ahead of the first run."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

import typer

from trainer_client.cli.common import waiting


def warm_up() -> None:
    """Compile the kernels ahead of the first run: a minute or so, once per installation."""
    started = time.perf_counter()
    with waiting("compiling the kernels, or loading them"):
        from evenkeel import partitioning

        partitioning.warm_up()
        if importlib.util.find_spec("torch") is not None:
            from trainer_client.balancing import redistribution
            from trainer_client.embedding import routing

            redistribution.warm_up()
            routing.warm_up()
    if (folder := os.environ.get("EVENKEEL_CACHE_DIR")) and not _is_writable(Path(folder)):
        remedy = "set another folder, or unset it"
        typer.echo(f"EVENKEEL_CACHE_DIR is {folder}, which cannot be written to; {remedy}", err=True)
    typer.echo(f"kernels ready after {time.perf_counter() - started:.0f} s", err=True)


def _is_writable(folder: Path) -> bool:
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
