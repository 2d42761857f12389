"""The last line against being filled: what arrives piece by piece is held by gRPC, where nobody counts it.

A message that never ends can be told from a quiet stream by nothing but the memory that it takes. When the process has
more than what callers may hold together, streams that have not said a whole message for some time are ended, those of
the caller first who has most of them. A rank whose stream was only quiet connects again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import structlog

from services.balancer.refusals import Code, Refusal
from services.balancer.streams import Streams

log = structlog.get_logger(__name__)

_INTERVAL_SECONDS = 0.25
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Pressure:
    """Watches what the process takes."""

    def __init__(
        self, streams: Streams, max_memory: int, *, ended: Callable[[int], None], quiet_seconds: float = 3.0
    ) -> None:
        """Must be made when nobody has connected yet.

        Args:
            streams: The open streams.
            max_memory: Bytes that the process may take more than now.
            ended: Told how many streams were ended.
            quiet_seconds: Time without a message from which on a stream may be ended.
        """
        self._streams, self._max_memory, self._ended, self._quiet = streams, max_memory, ended, quiet_seconds
        self._at_first = resident()
        self._task = asyncio.create_task(self._run(), name="pressure")

    def stop(self) -> None:
        """Ends the watch."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            taken = resident() - self._at_first
            if taken <= self._max_memory:
                continue
            caller, quiet = self._streams.quiet(self._quiet)
            if not quiet:
                continue
            log.warning("out of memory: quiet streams ended", caller=caller, streams=len(quiet), taken_bytes=taken)
            self._ended(len(quiet))
            for mailbox in quiet:
                mailbox.close(_short_of_memory(self._quiet))
            await asyncio.sleep(2 * _INTERVAL_SECONDS)  # until what they held is given back


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE


def _short_of_memory(seconds: float) -> Refusal:
    return Refusal(
        code=Code.LIMIT_EXCEEDED,
        field="max_memory",
        value=f"exceeded by the process, and this stream has sent no whole message for {seconds:g} s",
        remedy="connect again; the operator may raise the server's max_memory",
        fatal=True,
    )
