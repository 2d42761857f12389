"""A name server for tests, over UDP and TCP, that answers questions for addresses as a test wants it to."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

NXDOMAIN = 3
_A = 1
_MOST_IN_A_DATAGRAM = 25

Reply = Sequence[str] | bytes | int | None
"""IPv4 addresses; bytes to send as they are; an error's number; None: say nothing."""


class NameServer:
    """Answers every name alike.

    Attributes:
        port: Of both sockets.
        reply: From the number of a question to what is answered.
        questions: How many have come.
    """

    def __init__(self, reply: Callable[[int], Reply]) -> None:
        self.reply, self.questions = reply, 0
        self._stream = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._stream.getsockname()[1]
        self._datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._datagrams.bind(("127.0.0.1", self.port))
        for serve in (self._serve_datagrams, self._serve_stream):
            threading.Thread(target=serve, daemon=True).start()

    def __enter__(self) -> NameServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in (self._datagrams, self._stream):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _serve_datagrams(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                question, peer = self._datagrams.recvfrom(4096)
                if not question:  # the end
                    return
                answer = self._answer(question, _MOST_IN_A_DATAGRAM)
                if answer is not None:
                    self._datagrams.sendto(answer, peer)

    def _serve_stream(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._stream.accept()
                with peer, peer.makefile("rb") as read, contextlib.suppress(OSError, struct.error):
                    peer.settimeout(5)
                    answer = self._answer(read.read(struct.unpack(">H", read.read(2))[0]), 1 << 16)
                    if answer is not None:
                        peer.sendall(struct.pack(">H", len(answer)) + answer)

    def _answer(self, question: bytes, most: int) -> bytes | None:
        self.questions += 1
        reply = self.reply(self.questions)
        if reply is None or isinstance(reply, bytes):
            return reply
        end = question.index(b"\0", 12) + 5
        (kind,) = struct.unpack(">H", question[end - 4 : end - 2])
        error = reply if isinstance(reply, int) else 0
        places = [] if isinstance(reply, int) or kind != _A else list(reply)
        truncated = 0x0200 if len(places) > most else 0
        records = (
            [] if truncated else [b"\xc0\x0c" + struct.pack(">HHIH", _A, 1, 0, 4) + socket.inet_aton(p) for p in places]
        )
        counts = struct.pack(">HHHHH", 0x8180 | truncated | error, 1, len(records), 0, 0)
        return question[:2] + counts + question[12:end] + b"".join(records)
