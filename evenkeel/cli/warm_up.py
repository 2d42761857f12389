"""`evenkeel warm-up`: compile ahead of the first run."""

from __future__ import annotations

import importlib.util
import time

from rich.console import Console


def warm_up() -> None:
    """Compile the kernels into numba's cache, so that no run has to: about a minute, once per installation."""
    console = Console(stderr=True)
    started = time.perf_counter()
    with console.status("compiling the kernels of partitioning"):
        from evenkeel import partitioning

        partitioning.warm_up()
    if importlib.util.find_spec("torch") is not None:
        with console.status("compiling the kernels of redistribution and routing"):
            from trainer_client import redistribution, routing

            redistribution.warm_up()
            routing.warm_up()
    console.print(f"kernels ready after {time.perf_counter() - started:.0f} s")
