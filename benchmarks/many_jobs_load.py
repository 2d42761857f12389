"""Jobs for the benchmark of many jobs: thousands of gRPC streams in one thread, HTTP/2 spoken frame by frame.

A library's client takes as much time for a message as the server does, and on two cores would be what is measured.
Here requests are encoded beforehand, and of what comes back no more is read than the frames and whose answers they are.
Each stream has a connection of its own, as those of ranks and of nodes have, and each node an address of its own.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from benchmarks.rendezvous_load import METHOD, Load, join_bytes, stream_body, stream_request
from evenkeel.protocol import balancer_pb2 as pb

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW = 4  # the setting
_LARGE = (1 << 31) - 1
_FRAME_BYTES = 16_384
_STREAM = 1  # the only one of its connection
_JOINS_AT_ONCE = 128
_HEAD = struct.Struct(">I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What jobs of a kind are like.

    Attributes:
        name: Their names begin with it.
        count: How many there are.
        ranks: Of each.
        samples: A rank and round.
        fields: Jagged fields of a sample.
        per_stream: Ranks that share a stream.
        step: Seconds from the beginning of a round to that of the next; 0: as soon as all answers are there.
    """

    name: str
    count: int
    ranks: int = 8
    samples: int = 128
    fields: int = 4
    per_stream: int = 1
    step: float = 0.0


@dataclass(slots=True)
class Job:
    """A job at work.

    Attributes:
        shape: What it is like.
        number: Among all.
        streams: Its streams.
        bodies: What each of them submits to every round.
        round: That it is in.
        began: When that was to begin.
        missing: Streams that wait for answers.
        times: When each round began and how long it took, in seconds.
    """

    shape: Shape
    number: int
    streams: list[Stream] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    round: int = -1
    began: float = 0.0
    missing: int = 0
    times: list[tuple[float, float]] = field(default_factory=list)


class StreamError(Exception):
    """A stream ended, or brought what is no answer."""


class Stream:
    """One stream on a connection of its own."""

    def __init__(self, job: Job, port: int, address: str, join: bytes) -> None:
        self.job = job
        self.joined = False
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(address, 0))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self._in = b""
        self._message = b""
        self._room = [65_535, 65_535]  # of the connection, of the stream
        self._initial = 65_535
        self._waiting = b""  # for room
        self._out = b""  # for the kernel
        fields = {":method": "POST", ":scheme": "http", ":path": METHOD, ":authority": "localhost",
                  "content-type": "application/grpc", "te": "trailers"}  # fmt: skip
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        self._out = (
            _PREFACE
            + _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, _LARGE))
            + _frame(_WINDOW, 0, 0, _HEAD.pack(_LARGE - 65_535))
            + _frame(_HEADERS, _END_HEADERS, _STREAM, block)
        )
        self.send(join)

    def send(self, message: bytes) -> None:
        """Sends a message, as far as there is room for it now."""
        self._waiting += b"\0" + _HEAD.pack(len(message)) + message
        self._push()

    def end(self) -> None:
        """Ends the requests, as a rank does that has finished."""
        self._out += _frame(_DATA, _END_STREAM, _STREAM, b"")
        self.flush()

    @property
    def wants_to_write(self) -> bool:
        """Whether the kernel has not taken everything."""
        return bool(self._out)

    def flush(self) -> None:
        """Hands over to the kernel what it takes."""
        if self._out:
            with contextlib.suppress(BlockingIOError):
                sent = self.sock.send(self._out)
                self._out = self._out[sent:]

    def read(self) -> list[bytes]:
        """The messages that have come.

        Raises:
            StreamError: If the stream has ended.
        """
        try:
            data = self.sock.recv(1 << 18)
        except BlockingIOError:
            return []
        except OSError as error:
            raise StreamError(str(error)) from error
        if not data:
            raise StreamError("the connection was closed")
        data = self._in + data
        messages: list[bytes] = []
        place, end = 0, len(data)
        while end - place >= 9:
            size = int.from_bytes(data[place : place + 3], "big")
            if end - place < 9 + size:
                break
            kind, flags = data[place + 3], data[place + 4]
            content = data[place + 9 : place + 9 + size]
            if kind == _DATA:
                self._take(content, messages)
            elif kind != _HEADERS or flags & _END_STREAM:
                self._control(kind, flags, data[place + 5 : place + 9], content)
            place += 9 + size
        self._in = data[place:]
        return messages

    def _take(self, content: bytes, messages: list[bytes]) -> None:
        data = self._message + content
        while len(data) >= 5:
            size = int.from_bytes(data[1:5], "big")
            if len(data) < 5 + size:
                break
            messages.append(data[5 : 5 + size])
            data = data[5 + size :]
        self._message = data

    def _control(self, kind: int, flags: int, stream: bytes, content: bytes) -> None:
        if kind == _WINDOW:
            self._room[int.from_bytes(stream, "big") == _STREAM] += int.from_bytes(content, "big")
            self._push()
        elif kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(content), 6):
                name, value = struct.unpack_from(">HI", content, at)
                if name == _INITIAL_WINDOW:
                    self._room[1] += value - self._initial
                    self._initial = value
            self._out += _frame(_SETTINGS, _ACK, 0, b"")
            self._push()
        elif kind == _PING and not flags & _ACK:
            self._out += _frame(_PING, _ACK, 0, content)
            self._push()
        elif kind in (_HEADERS, _RST, _GOAWAY):
            raise StreamError(f"frame {kind}: {content[:200]!r}")

    def _push(self) -> None:
        parts = [self._out]
        place, waiting = 0, self._waiting
        room = min(self._room)
        while place < len(waiting) and room > 0:
            part = waiting[place : place + min(room, _FRAME_BYTES)]
            parts += (_frame_head(_DATA, 0, _STREAM, len(part)), part)
            place += len(part)
            room -= len(part)
        self._room[0] -= place
        self._room[1] -= place
        self._waiting = waiting[place:]
        self._out = b"".join(parts)
        self.flush()


class Fleet:
    """Jobs that go through rounds at one balancer."""

    def __init__(self, shapes: list[Shape], port: int, *, echo: bool = False, seed: int = 1) -> None:
        """Opens all streams.

        Args:
            shapes: The jobs.
            port: Of the balancer.
            echo: It is the floor, which answers each message with one.
            seed: Of lengths and of when steps begin.
        """
        self._poll = selectors.DefaultSelector()
        self._echo = echo
        self._random = random.Random(seed)
        self._ends = 0.0
        self._due: list[tuple[float, int]] = []
        self.jobs: list[Job] = []
        bodies: dict[tuple[int, int, int, int], list[bytes]] = {}
        node = 0
        for shape in shapes:
            load = Load(
                port=port, ranks=range(shape.ranks), world_size=shape.ranks, samples=shape.samples, fields=shape.fields,
                rounds=0, node_size=8, seed=seed, ranks_per_stream=shape.per_stream,
            )  # fmt: skip
            key = (shape.ranks, shape.samples, shape.fields, shape.per_stream)
            groups = [load.ranks[at : at + shape.per_stream] for at in range(0, shape.ranks, shape.per_stream)]
            if key not in bodies:
                bodies[key] = [stream_body(load, ranks) for ranks in groups]
            for number in range(shape.count):
                job = Job(shape, len(self.jobs), bodies=bodies[key])
                named = replace(load, job=f"{shape.name}-{number}")
                for ranks in groups:
                    address = f"127.1.{node >> 8}.{node & 255}"
                    self._open(job, port, address, join_bytes(named, ranks))
                    node += ranks[-1] % 8 == 7
                self.jobs.append(job)
        self._until(lambda: all(stream.joined for job in self.jobs for stream in job.streams), 60.0)

    def run(self, seconds: float) -> None:
        """Lets the jobs go through rounds for some seconds, and finishes those that have begun then."""
        now = time.monotonic()
        self._ends = now + seconds
        for number, job in enumerate(self.jobs):
            job.times.clear()
            heapq.heappush(self._due, (now + self._random.random() * job.shape.step, number))
        while time.monotonic() < self._ends:
            self._turn()
        self._due.clear()
        self._until(lambda: not any(job.missing for job in self.jobs), 60.0)

    def close(self) -> None:
        """Ends all streams."""
        for job in self.jobs:
            for stream in job.streams:
                with contextlib.suppress(OSError):
                    stream.end()
        time.sleep(0.2)
        for job in self.jobs:
            for stream in job.streams:
                stream.sock.close()
        self._poll.close()

    # ------------------------------------------------------------------ inside

    def _open(self, job: Job, port: int, address: str, join: bytes) -> None:
        stream = Stream(job, port, address, join)
        job.streams.append(stream)
        self._poll.register(stream.sock, selectors.EVENT_READ, stream)
        waiting = sum(not one.joined for one in job.streams[-_JOINS_AT_ONCE:])
        if waiting >= _JOINS_AT_ONCE or len(job.streams) == -(-job.shape.ranks // job.shape.per_stream):
            self._until(lambda: all(one.joined for one in job.streams), 60.0)

    def _until(self, is_so: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds:g} s")
            self._turn()

    def _turn(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            at, number = heapq.heappop(self._due)
            self._begin(number, at)
        timeout = 0.05 if not self._due else min(0.05, max(0.0, self._due[0][0] - now))
        for key, events in self._poll.select(timeout):
            stream: Stream = key.data
            if events & selectors.EVENT_WRITE:
                stream.flush()
            if events & selectors.EVENT_READ:
                for message in stream.read():
                    self._took(stream, message)
            self._watch(stream, bool(events & selectors.EVENT_WRITE))

    def _watch(self, stream: Stream, watched: bool) -> None:
        if stream.wants_to_write != watched:
            writing = selectors.EVENT_WRITE if stream.wants_to_write else 0
            self._poll.modify(stream.sock, selectors.EVENT_READ | writing, stream)

    def _begin(self, number: int, at: float) -> None:
        job = self.jobs[number]
        job.round += 1
        job.began = at
        job.missing = len(job.streams)
        of_node = job.shape.per_stream > 1
        for stream, body in zip(job.streams, job.bodies, strict=True):
            stream.send(stream_request(body, job.round, of_node=of_node))
            self._watch(stream, watched=False)

    def _took(self, stream: Stream, message: bytes) -> None:
        job = stream.job
        if not stream.joined:
            stream.joined = True
            return
        if not self._echo and message[0] not in _ANSWERS:
            raise StreamError(f"{message[:300]!r}")
        job.missing -= 1
        if job.missing:
            return
        now = time.monotonic()
        job.times.append((job.began, now - job.began))
        if now < self._ends:
            at = now if not job.shape.step else job.began + job.shape.step
            heapq.heappush(self._due, (at, job.number))


def _text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


def _frame_head(kind: int, flags: int, stream: int, size: int) -> bytes:
    return _HEAD.pack(size << 8 | kind) + bytes((flags,)) + _HEAD.pack(stream)


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return _frame_head(kind, flags, stream, len(content)) + content


_RESPONSES = pb.BalanceResponse.DESCRIPTOR.fields_by_name
_ANSWERS = frozenset(_RESPONSES[name].number << 3 | 2 for name in ("answer", "answers"))
