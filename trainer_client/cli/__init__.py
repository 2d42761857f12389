"""`evenkeel COMMAND`: what a user does from a terminal. Each command has a file of its name.

`plan` is its options; `plan_io` makes a request of them and of files, which `files` reads, and shows the answer.
`balancer_checks` are those of `doctor` that go over the network. `common` is what several commands share.

Commands import what they need when they run: the list of them appears at once, and `evenkeel plan` needs neither torch
nor grpcio.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Annotated

import typer

from evenkeel import __version__
from trainer_client.cli import checkpoint
from trainer_client.cli.calibrate import calibrate
from trainer_client.cli.doctor import doctor
from trainer_client.cli.gain import gain
from trainer_client.cli.plan import plan
from trainer_client.cli.top import top
from trainer_client.cli.warm_up import warm_up

_WITHOUT_TORCH = (
    "PyTorch is not installed here: checkpoint, plan --clock, and calibrate without --raw, need it. Install the build "
    "for your CUDA version."
)
_WITHOUT_TRAINER = "a balancer's calls need grpcio and protobuf: pip install 'evenkeel[trainer]'"
_REMEDIES = {
    "grpc": _WITHOUT_TRAINER,
    "google": _WITHOUT_TRAINER,
    "torch": _WITHOUT_TORCH,
    "torchrec": "plans are run with TorchRec: install it, or leave --clock out",
    "matplotlib": "--png needs matplotlib: install it, or leave --png away",
    "pyarrow": "CSV and Parquet are read with pyarrow: install it, or give a .npy file",
}
"""What to do where a package is missing, by the first part of its module's name."""

app = typer.Typer(
    name="evenkeel",
    help="Planning and balancing for multi-GPU recommender training.",
    epilog=None if importlib.util.find_spec("torch") else _WITHOUT_TORCH,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
for command in (gain, plan, calibrate, doctor, top, warm_up):
    app.command()(command)
app.add_typer(checkpoint.app, name="checkpoint")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"evenkeel {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before a command."""
    del version


def main() -> None:
    """The entry point of the `evenkeel` command."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the end
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before gRPC is imported: what failed is said by the command
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except ModuleNotFoundError as error:
        remedy = _REMEDIES.get((error.name or "").partition(".")[0])
        if remedy is None:
            raise
        typer.echo(f"error: {remedy} ({error})", err=True)
        sys.exit(2)
    except OSError as error:
        if error.filename is not None:
            raise
        with open(os.devnull, "w") as nowhere:  # for what else is in the buffer
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        typer.echo(f"error: standard output cannot be written: {error.strerror}; write to another disk", err=True)
        sys.exit(2)
