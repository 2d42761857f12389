"""Between the ranks of a node: framed messages over Unix sockets, on an event loop in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from enum import IntEnum
from typing import Any

_HEADER = struct.Struct("<IB")
_CREDENTIALS = struct.Struct("3i")
_MAX_FRAME_BYTES = 64 << 20
_MAX_UNSENT_BYTES = 256 << 20
_STOP_SECONDS = 1.0


class Kind(IntEnum):
    """What a frame holds."""

    HELLO = 1  # a follower's rank, u32
    SUBMIT = 2  # pb.Submit
    SUSPECT = 3  # u64: which joining of the leader's stream the follower missed an answer on
    JOINED = 4  # u64: the leader's stream has been joined for the so many-th time
    LOST = 5  # text: the leader's stream has ended
    ANSWER = 6  # pb.Answer


class FrameLink(asyncio.Protocol):
    """One end of a connection within a node; used on its event loop only."""

    def __init__(
        self,
        *,
        opened: Callable[[FrameLink], None],
        received: Callable[[FrameLink, Kind, bytes], None],
        closed: Callable[[FrameLink], None],
    ) -> None:
        self._opened = opened
        self._received = received
        self._closed = closed
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def send(self, kind: Kind, payload: bytes) -> None:
        """Queues a frame; an end that takes nothing any more is cut off."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(_HEADER.pack(len(payload), kind) + payload)
        if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self._transport.abort()

    def close(self) -> None:
        """Ends the connection."""
        if self._transport is not None:
            with contextlib.suppress(OSError):  # also where a child of `fork` holds the socket too
                self._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio. A peer that is another user is cut off."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if peer_user(transport.get_extra_info("socket")) != os.getuid():
            transport.abort()
            return
        self._opened(self)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._buffer += data
        begin = 0
        while len(self._buffer) - begin >= _HEADER.size:
            size, number = _HEADER.unpack_from(self._buffer, begin)
            if size > _MAX_FRAME_BYTES or number not in Kind._value2member_map_:
                self.close()
                return
            if len(self._buffer) - begin < _HEADER.size + size:
                break
            payload = bytes(self._buffer[begin + _HEADER.size : begin + _HEADER.size + size])
            begin += _HEADER.size + size
            self._received(self, Kind(number), payload)
        del self._buffer[:begin]

    def connection_lost(self, _exc: Exception | None) -> None:
        """Called by asyncio."""
        self._closed(self)


class LoopThread:
    """An event loop in a thread of its own, from `start` to `stop`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped: asyncio.Event | None = None

    @property
    def is_started(self) -> bool:
        """Whether `start` has been called."""
        return self._thread is not None

    def start(self, main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
        """Runs `main` in the thread; it ends soon after the event that it is given is set."""
        loop, stopped = asyncio.new_event_loop(), asyncio.Event()
        self._loop, self._stopped = loop, stopped

        def run() -> None:
            asyncio.set_event_loop(loop)
            try:
                loop.run_until_complete(main(stopped))
                loop.run_until_complete(asyncio.sleep(0))  # transports close in the next turn
            finally:
                loop.close()

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Calls a function in the thread, soon; never when the thread has ended."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """Ends the thread, within a bounded time."""
        if self._thread is not None and self._stopped is not None:
            self.call(self._stopped.set)
            self._thread.join(_STOP_SECONDS)


def listen() -> tuple[socket.socket, bytes]:
    """A socket for the other ranks of the node, and its address: an abstract one, which leaves no file behind."""
    address = b"\0evenkeel-" + secrets.token_hex(16).encode()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(1024)
    return listener, address


def connect(address: bytes, seconds: float) -> socket.socket:
    """A connection to another rank of the node.

    Raises:
        OSError: If there is none to be had.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(seconds)
        link.connect(address)
        if peer_user(link) != os.getuid():
            raise PermissionError("the other end belongs to another user")
    except BaseException:
        link.close()
        raise
    return link


def peer_user(link: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel says."""
    _, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)
