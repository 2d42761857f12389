"""Putting a directory in place whole or not at all."""

import os
import shutil
from pathlib import Path

from trainer_client.embedding.checkpoint.record import CheckpointError


def staging_path(target: Path) -> Path:
    """Where a checkpoint is written before it takes its name."""
    return target.with_name(f".{target.name}.writing")


def _replaced_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def begin(target: Path, *, overwrite: bool, keep: bool = False) -> Path:
    """Makes the staging directory.

    Args:
        target: The checkpoint that is to be written.
        overwrite: Whether there may be an older one.
        keep: Whether what an interrupted attempt left in the staging directory stays there.

    Raises:
        CheckpointError: If the target exists and may not be replaced.
    """
    recover(target)
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists; choose another name or allow it to be replaced")
    staging = staging_path(target)
    if not keep:
        shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True, exist_ok=True)
    return staging


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(target: Path, result: Path | None = None) -> None:
    """Gives a finished directory its name; an older checkpoint of the name is removed afterwards.

    Args:
        target: The name.
        result: The directory, the staging directory or one in it; the staging directory is gone afterwards.
    """
    staging, replaced = staging_path(target), _replaced_path(target)
    result = result if result is not None else staging
    for path in [*result.rglob("*"), result]:
        _sync(path)
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    result.rename(target)
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    shutil.rmtree(staging, ignore_errors=True)


def recover(target: Path) -> None:
    """Puts the old checkpoint back if a process died between the two renamings of `publish`."""
    replaced = _replaced_path(target)
    if replaced.exists() and not target.exists():
        replaced.rename(target)
