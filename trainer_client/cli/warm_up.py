"""`evenkeel warm-up`: compile ahead of the first run."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:  # numba is imported when the command runs
    from evenkeel.partitioning.kernel_cache import KernelFolder


def warm_up() -> None:
    """Compile the kernels ahead of the first run, on all cores: half a minute or so, once per installation."""
    console = Console(stderr=True)
    started = time.perf_counter()
    with console.status("compiling the kernels, or loading them"):
        from evenkeel import partitioning
        from evenkeel.partitioning.preparing import ready

        sets = [partitioning.KERNELS]
        if importlib.util.find_spec("torch") is not None:
            from trainer_client.balancing import redistribution, sampling
            from trainer_client.embedding.routing import cpu

            sets += [redistribution.KERNELS, sampling.KERNELS, cpu.KERNELS]
        ready(sets)
    if passed_over := passed_over_folder(sets[0].folder):
        console.print(passed_over)
    folders = sorted({str(each.folder.path.parent) for each in sets if each.folder.path is not None})
    where = f"in {', '.join(folders)}" if folders else "in this process only: no folder can be written"
    console.print(f"kernels ready after {time.perf_counter() - started:.0f} s, {where}")


def passed_over_folder(folder: KernelFolder) -> str:
    """What is wrong with the folder that the environment names, if kernels are kept elsewhere; else nothing."""
    told = os.environ.get("EVENKEEL_CACHE_DIR")
    if not told or (folder.path is not None and folder.path.parent == Path(told)) or _is_writable(Path(told)):
        return ""
    return f"EVENKEEL_CACHE_DIR is {told}, which cannot be written to; set another folder, or unset it"


def _is_writable(folder: Path) -> bool:
    """Whether a folder can be written to, or made."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
