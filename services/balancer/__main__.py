"""`python -m services.balancer`: serves until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import sys
from collections.abc import Coroutine
from typing import Any

# gRPC's core writes lines of its own format, one for each failed handshake of a stranger; it reads this when it is
# first imported. What it has to say to the balancer comes as a status too.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# isort: split
from services.balancer.server import BalancerServer
from services.balancer.settings import Settings, load_settings
from services.balancer.workers.staff import Zygote
from services.operations.program import run_service, stop_on_signals, write_port

_GC_THRESHOLDS = (2_000, 2, 225)
_SWITCH_SECONDS = 0.0001


def serve(settings: Settings) -> Coroutine[Any, Any, int]:
    """Forks the workers' zygote; what it returns runs a balancer until it is asked to stop, to the exit code."""
    return _serve(settings, Zygote.start())


async def _serve(settings: Settings, zygote: Zygote) -> int:
    stop = asyncio.Event()
    stop_on_signals(stop.set)
    server = BalancerServer(settings, zygote=zygote)
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(server.start())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        return 0
    await starting
    # What was loaded to start stays: looking through it in every full collection would hold up rounds.
    gc.collect()
    gc.freeze()
    # A round of a thousand ranks makes thousands of objects that go with it, hardly any in cycles: looking for those
    # after every 700 took a tenth of the service's time. Calls that are refused leave cycles behind: to look through a
    # hundred thousand objects at a time held up everybody for 0.1 s.
    gc.set_threshold(*_GC_THRESHOLDS)
    # A thread that answers a scraper keeps the loop waiting for one switch each time that the loop has looked for news.
    sys.setswitchinterval(_SWITCH_SECONDS)
    write_port(settings.metrics_port_file, server.metrics_port)
    write_port(settings.port_file, server.port)
    await stopping
    # The process ends within the grace whatever hangs: this timer needs neither the event loop nor Python.
    faulthandler.dump_traceback_later(settings.grace_seconds, exit=True)
    await server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(run_service(load_settings, serve, sys.argv[1:]))
