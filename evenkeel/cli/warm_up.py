"""`evenkeel warm-up`: compile ahead of the first run."""

from __future__ import annotations

import importlib.util
import time

from rich.console import Console


def warm_up() -> None:
    """Compile the kernels ahead of the first run, on all cores: half a minute or so, once per installation."""
    console = Console(stderr=True)
    started = time.perf_counter()
    with console.status("compiling the kernels, or loading them"):
        from evenkeel import partitioning
        from evenkeel.partitioning.preparing import ready

        sets = [partitioning.KERNELS]
        if importlib.util.find_spec("torch") is not None:
            from trainer_client import redistribution
            from trainer_client.routing import cpu

            sets += [redistribution.KERNELS, cpu.KERNELS]
        ready(sets)
    folders = sorted({str(each.folder.path.parent) for each in sets if each.folder.path is not None})
    where = f"in {', '.join(folders)}" if folders else "in this process only: no folder can be written"
    console.print(f"kernels ready after {time.perf_counter() - started:.0f} s, {where}")
