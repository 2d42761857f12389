"""A TCP proxy that harms what passes through it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

CHUNK = 16_384


class TcpProxy:
    """Forwards to a port of this host, as long as nobody sets anything else.

    Attributes:
        port: Where it listens.
        target: The port that new connections go to.
        delay: Seconds that every chunk is held back, both ways.
        rate: Bytes per second of each direction of each connection; None: unlimited.
        swallow: Takes bytes and passes none on: what was sent is lost, and both sides see open connections.
        refuse: Resets new connections.
        cut_after: Bytes of answers after which the connection that carries them is reset; counts down over all.
        seen: How often it has refused, swallowed, delayed and throttled.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.delay = 0.0
        self.rate: float | None = None
        self.swallow = False
        self.refuse = False
        self.cut_after: int | None = None
        self.seen: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)
        self._writers: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def reset(self) -> int:
        """Resets every connection; returns how many."""
        return self._on_loop(lambda: self._end_all(_reset))

    def half_close(self) -> int:
        """Ends the direction of the answers of every connection, and leaves the other open; returns how many."""
        return self._on_loop(lambda: self._end_all(lambda writer: writer.write_eof(), clients=True))

    def heal(self) -> None:
        """Harms nothing from now on."""
        self.delay, self.rate, self.swallow, self.refuse, self.cut_after = 0.0, None, False, False, None

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result(10)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    async def _end(self) -> None:
        assert self._server is not None
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    # ------------------------------------------------------------------ on the loop

    def _on_loop(self, function: Callable[[], int]) -> int:
        async def run() -> int:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def _end_all(self, end: Callable[[asyncio.StreamWriter], Any], *, clients: bool = False) -> int:
        pairs = list(self._writers)
        for client, server in pairs:
            for writer in (client,) if clients else (client, server):
                with contextlib.suppress(OSError):
                    end(writer)
        return len(pairs)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            self.seen["refused"] += 1
            _reset(writer)
            return
        try:
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            _reset(writer)
            return
        pair = (writer, upstream)
        self._writers.append(pair)
        pumps = [
            asyncio.create_task(self._pump(reader, upstream, answers=False)),
            asyncio.create_task(self._pump(upstream_reader, writer, answers=True)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        self._writers.remove(pair)
        for pump in pumps:
            pump.cancel()
        for end in pair:
            end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                if self.swallow:
                    self.seen["swallowed"] += 1
                    continue
                if self.delay:
                    self.seen["delayed"] += 1
                    await asyncio.sleep(self.delay)
                if self.rate is not None:
                    self.seen["throttled"] += 1
                    await asyncio.sleep(len(data) / self.rate)
                if answers and self.cut_after is not None:
                    if len(data) > self.cut_after:
                        writer.write(data[: self.cut_after])
                        await writer.drain()
                        self.cut_after = None
                        _reset(writer, linger=True)
                        return
                    self.cut_after -= len(data)
                writer.write(data)
                await writer.drain()


def _reset(writer: asyncio.StreamWriter, *, linger: bool = False) -> None:
    """Ends a connection with RST; with `linger` what was written before goes out first, and the end is a FIN."""
    sock = writer.get_extra_info("socket")
    if sock is not None and not linger:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    (writer.close if linger else writer.transport.abort)()
