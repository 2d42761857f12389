"""Attacks below the calls: raw HTTP/2, TLS and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from benchmarks.attack_client import TOKEN, join
from evenkeel.protocol import balancer_pb2 as pb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW = 0, 1, 4, 6, 8


class Target:
    """What is attacked.

    Attributes:
        port: Of the balancer.
        metrics_port: Of its metrics; 0: none.
        seconds: How long to go on.
        folder: Of the certificates, for a port with TLS.
        outcomes: What it counted.
    """

    def __init__(self, port: int, metrics_port: int, seconds: float, folder: Path | None) -> None:
        self.port, self.metrics_port, self.seconds, self.folder = port, metrics_port, seconds, folder
        self.until = asyncio.get_running_loop().time() + seconds
        self.outcomes: dict[str, int] = {}
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def goes_on(self) -> bool:
        """Whether there is time left."""
        return asyncio.get_running_loop().time() < self.until

    async def connect(self, port: int = 0, tls: ssl.SSLContext | None = None) -> Wire:
        """A connection.

        Raises:
            OSError: If it is refused.
        """
        name = None if tls is None else "localhost"
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection("127.0.0.1", port or self.port, ssl=tls, server_hostname=name), 15
        )
        self._writers.append(writer)
        return Wire(reader, writer)

    async def close(self) -> None:
        """Ends all connections."""
        for writer in self._writers:
            writer.transport.abort()


class Wire:
    """One connection, spoken frame by frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.windows: dict[int, int] = {0: 65_535}

    def send(self, data: bytes) -> None:
        """Sends bytes."""
        self.writer.write(data)

    def frame(self, kind: int, flags: int, stream: int, content: bytes = b"") -> None:
        """Sends a frame."""
        self.send(struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content)

    def begin(self, window: int = 65_535) -> None:
        """Sends the preface; streams get this window for what the server sends."""
        self.send(PREFACE)
        self.frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, window))

    def call(self, stream: int, path: str, message: bytes | None = None, **headers: str) -> None:
        """Begins a call."""
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost",
                  "content-type": "application/grpc", "te": "trailers", **headers}  # fmt: skip
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        self.frame(_HEADERS, 4, stream, block)
        self.windows[stream] = 65_535
        if message is not None:
            self.frame(_DATA, 0, stream, b"\0" + struct.pack(">I", len(message)) + message)

    async def read_windows(self) -> None:
        """Takes what the server sends, noting how much it will take."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await self.reader.readexactly(9)
                content = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
                stream = int.from_bytes(head[5:9], "big")
                if head[3] == _WINDOW:
                    self.windows[stream] = self.windows.get(stream, 0) + int.from_bytes(content, "big")
                elif head[3] == _SETTINGS and not head[4] & 1:
                    self.frame(_SETTINGS, 1, 0)
                elif head[3] == _PING and not head[4] & 1:
                    self.frame(_PING, 1, 0, content)

    async def push(self, stream: int, content: bytes, seconds: float) -> int:
        """Sends content as far as the server lets it within some time; returns how much was left."""
        deadline = asyncio.get_running_loop().time() + seconds
        while content and asyncio.get_running_loop().time() < deadline:
            room = min(self.windows[0], self.windows[stream], 16_384)
            if room <= 0:
                await asyncio.sleep(0.01)
                continue
            part, content = content[:room], content[room:]
            self.windows[0] -= len(part)
            self.windows[stream] -= len(part)
            self.frame(_DATA, 0, stream, part)
            await asyncio.sleep(0)
        return len(content)


async def closed_watches(target: Target) -> None:
    """Health watches whose client takes nothing: no token is needed."""
    for _ in range(8):
        wire = await target.connect()
        wire.begin(window=0)
        for number in range(8):
            wire.call(2 * number + 1, "/grpc.health.v1.Health/Watch", b"")
    await asyncio.sleep(target.seconds)


async def half_messages(target: Target) -> None:
    """Streams that announce 4 MB, send nearly all of it, and wait."""
    wires = []
    for _ in range(4):
        wire = await target.connect()
        wire.begin()
        reading = asyncio.create_task(wire.read_windows())
        wires.append(reading)
        for number in range(16):
            first = pb.BalanceRequest(join=join(f"hostile-half-{number}", 1, alone=True)).SerializeToString()
            stream = 2 * number + 1
            wire.call(stream, "/evenkeel.balancer.v1.BalancerService/Balance", first, authorization=f"Bearer {TOKEN}")
        await asyncio.sleep(0.5)
        size = (4 << 20) - 64
        for number in range(16):
            announced = b"\0" + struct.pack(">I", size) + bytes(size - 100)
            left = await wire.push(2 * number + 1, announced, 1.0)
            target.outcomes["pushed_mb"] = target.outcomes.get("pushed_mb", 0) + (len(announced) - left >> 20)
            if not target.goes_on:
                break
    await asyncio.sleep(1.0)


async def half_handshakes(target: Target) -> None:
    """Connections that never finish their first frame, or their TLS handshake."""
    for number in range(300):
        with contextlib.suppress(OSError, TimeoutError):
            wire = await target.connect()
            wire.send((b"\x16\x03\x01\x02\x00" if target.folder else PREFACE)[: number % 24])
        await asyncio.sleep(0.01)
    await asyncio.sleep(1.0)


async def pings_and_settings(target: Target) -> None:
    """Control frames without end."""
    while target.goes_on:
        with contextlib.suppress(OSError, TimeoutError):
            wire = await target.connect()
            wire.begin()
            reading = asyncio.create_task(wire.read_windows())
            for _ in range(20):
                for _ in range(50):
                    wire.frame(_PING, 0, 0, b"12345678")
                    wire.frame(_SETTINGS, 0, 0)
                await wire.writer.drain()
                await asyncio.sleep(0.05)
            reading.cancel()


async def long_headers(target: Target) -> None:
    """Calls with headers larger than anybody needs."""
    while target.goes_on:
        with contextlib.suppress(OSError, TimeoutError):
            wire = await target.connect()
            wire.begin()
            for number in range(16):
                stream = 2 * number + 1
                wire.call(stream, "/evenkeel.balancer.v1.BalancerService/Balance", b"", **{"x-large": "y" * 12_000})
            await wire.writer.drain()
        await asyncio.sleep(0.2)


async def trickling_scrapers(target: Target) -> None:
    """Scrapers that send a byte a second, and others that read none of the answer."""
    wires = []
    for number in range(200):
        with contextlib.suppress(OSError, TimeoutError):
            wire = await target.connect(target.metrics_port)
            if number % 2:
                wire.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 4)
            wires.append(wire)
    for byte in b"GET /metrics HTTP/1.1"[: max(1, int(target.seconds))]:
        for wire in wires[::2]:
            with contextlib.suppress(OSError):
                wire.send(bytes([byte]))
        await asyncio.sleep(1.0)


async def plaintext_to_tls(target: Target) -> None:
    """HTTP/2 and HTTP/1 in the clear, where TLS is spoken."""
    while target.goes_on:
        for first in (PREFACE, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 64):
            with contextlib.suppress(OSError, TimeoutError):
                (await target.connect()).send(first * 8)
        await asyncio.sleep(0.05)


async def wrong_chains(target: Target) -> None:
    """Client certificates of a stranger's authority, and none at all."""
    assert target.folder is not None
    while target.goes_on:
        for name in ("stranger", None):
            context = ssl.create_default_context(cafile=str(target.folder / "server-ca.pem"))
            context.set_alpn_protocols(["h2"])
            if name is not None:
                context.load_cert_chain(target.folder / f"{name}.pem", target.folder / f"{name}-key.pem")
            with contextlib.suppress(OSError, TimeoutError):
                wire = await target.connect(tls=context)
                wire.begin()
                await wire.writer.drain()
        await asyncio.sleep(0.05)


async def renegotiation(target: Target) -> None:
    """Clients that ask for another handshake in TLS 1.2, again and again."""
    assert target.folder is not None
    ca, client = target.folder / "server-ca.pem", target.folder / "client"
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{target.port}", "-tls1_2", "-alpn", "h2", "-quiet",
               "-CAfile", str(ca), "-cert", f"{client}.pem", "-key", f"{client}-key.pem"]  # fmt: skip
    while target.goes_on:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError, TimeoutError):
            for _ in range(10):
                process.stdin.write(b"R\n")
                await asyncio.sleep(0.05)
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def attacks() -> Iterator[Callable[[Target], Awaitable[None]]]:
    """Those of a plaintext port."""
    yield from (closed_watches, half_messages, half_handshakes, pings_and_settings, long_headers, trickling_scrapers)


def attacks_on_tls() -> Iterator[Callable[[Target], Awaitable[None]]]:
    """Those of a port with TLS and client certificates."""
    yield from (plaintext_to_tls, wrong_chains, renegotiation, half_handshakes)


def _text(value: str) -> bytes:
    """A literal of HPACK."""
    size = len(value)
    if size < 127:
        return bytes([size]) + value.encode()
    out, size = bytearray([127]), size - 127
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    return bytes([*out, size]) + value.encode()
