"""What uvicorn lacks: an end to its patience with requests that do not arrive, and certificates that are renewed."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from services.security.transport import Transport


def impatient_protocol(
    *, header_seconds: float = 10.0, body_seconds: float = 30.0, max_connections: int = 1000
) -> type[H11Protocol]:
    """A protocol class for `uvicorn.Config(http=…)` that bounds what a connection may hold.

    Args:
        header_seconds: Time from the connection's start to its first complete request line and headers.
        body_seconds: Time in which a request's body must have arrived.
        max_connections: Connections at a time; more are closed at once.
    """

    class Impatient(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _seen: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.close()
                return
            self._timer = self.loop.call_later(header_seconds, self._check)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

        def _check(self) -> None:
            cycle: Any = self.cycle
            # A body under way is seen twice, body_seconds apart; between requests uvicorn's keep-alive timeout holds.
            if cycle is None or (cycle.more_body and cycle is self._seen and not cycle.response_complete):
                self.transport.abort()
                return
            self._seen = cycle if cycle.more_body else None
            self._timer = self.loop.call_later(body_seconds, self._check)

    return Impatient


async def follow_certificates(transport: Transport, context: ssl.SSLContext, *, check_seconds: float = 1.0) -> None:
    """Loads changed files into the context, for the connections from then on; until cancelled.

    Authorities of clients are only ever added: to take one away, restart.
    """
    followed = transport.follow()

    def load() -> None:
        transport.read()  # tried on another context first: a half-loaded one would refuse everybody
        transport.load_into(context)

    while True:
        await asyncio.sleep(check_seconds)
        followed.load(load)
