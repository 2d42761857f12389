"""`evenkeel warm-up`: compile ahead of the first run."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

from rich.console import Console


def warm_up() -> None:
    """Compile the kernels ahead of the first run: a minute or so, once per installation."""
    console = Console(stderr=True)
    started = time.perf_counter()
    with console.status("compiling the kernels, or loading them"):
        from evenkeel import partitioning

        partitioning.warm_up()
        if importlib.util.find_spec("torch") is not None:
            from trainer_client.balancing import redistribution
            from trainer_client.embedding.routing import cpu

            redistribution.warm_up()
            cpu.warm_up()
    if wrong := unusable_folder():
        console.print(wrong)
    console.print(f"kernels ready after {time.perf_counter() - started:.0f} s")


def unusable_folder() -> str:
    """What is wrong with the folder that the environment names for kernels; empty: nothing."""
    named = os.environ.get("EVENKEEL_CACHE_DIR")
    if not named or _is_writable(Path(named)):
        return ""
    return f"EVENKEEL_CACHE_DIR is {named}, which cannot be written to; set another folder, or unset it"


def _is_writable(folder: Path) -> bool:
    """Whether a folder can be written to, or made."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
