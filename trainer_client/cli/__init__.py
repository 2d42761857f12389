"""The command line: `evenkeel COMMAND`."""

from trainer_client.cli.app import main

__all__ = ["main"]
