"""Certificates of an HTTP server that are renewed while it runs."""

from __future__ import annotations

import asyncio
import ssl

import structlog

from services.security.transport import Transport

log = structlog.get_logger(__name__)


async def follow_certificates(transport: Transport, context: ssl.SSLContext, *, check_seconds: float = 1.0) -> None:
    """Loads changed files into the context, for the connections from then on; until cancelled.

    Files that have become unusable are reported, and what was read before stays in force. Authorities of clients are
    only ever added: to take one away, restart.
    """
    stamp = transport.stamp()
    while True:
        await asyncio.sleep(check_seconds)
        fresh = transport.stamp()
        if fresh == stamp:
            continue
        stamp = fresh
        try:
            transport.read()  # tried on another context first: a half-loaded one would refuse everybody
            transport.load_into(context)
        except ValueError as error:
            log.error("TLS files cannot be used; those read before stay in force", error=str(error))
        else:
            log.info("TLS files read again")
