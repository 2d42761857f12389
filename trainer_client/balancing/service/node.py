"""One stream for all ranks of a node: the node's leader speaks to the balancer, its followers to the leader.

To a follower, the leader is a part of the way to the service: what is lost, late or cut on it is a missed answer like
any other. Each side resubmits what is not settled after a reconnect.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from evenkeel.protocol import balancer_pb2 as pb
from trainer_client.balancing.service.frames import FrameLink, Kind, LoopThread, connect
from trainer_client.balancing.service.outages import Backoff, Cause
from trainer_client.balancing.service.uplink import Listener, Uplink

_RANK, _EPOCH = struct.Struct("<I"), struct.Struct("<Q")
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeat:
    """A rank's place in a node that shares a stream.

    Attributes:
        rank: The rank.
        ranks: All ranks of the node, ascending; the first is the leader.
        address: Where the leader listens.
        listener: The leader's socket, on the leader.
        linger: Seconds for which the leader holds a round's submissions back for ranks that are late.
    """

    rank: int
    ranks: tuple[int, ...]
    address: bytes
    listener: socket.socket | None
    linger: float

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader."""
        return self.rank == self.ranks[0]


class Inbox(Protocol):
    """What a rank is told."""

    def answered(self, answers: Sequence[pb.Answer]) -> None:
        """Answers to its rounds have come."""

    def noted(self, trouble: str, cause: Cause | None = None) -> None:
        """Something went wrong; by a cause that does not pass by itself, if one is given."""


class NodeLeader:
    """The leader's side: gathers the submissions of the node's ranks, hands their answers out."""

    def __init__(self, seat: NodeSeat, inbox: Inbox, open_uplink: Callable[[Listener], Uplink]) -> None:
        assert seat.listener is not None
        self._seat = seat
        self._inbox = inbox
        self._listener = seat.listener
        self._uplink = open_uplink(self)
        self._thread = LoopThread("evenkeel-node-leader")
        # Used in the thread only.
        self._followers: dict[FrameLink, int] = {}
        self._gathering: dict[int, dict[int, tuple[float, pb.Submit]]] = {}  # with when each came
        self._sent = -1  # rounds up to here have been sent, late submissions to them go at once

    @property
    def ready(self) -> bool:
        """Whether the stream is joined; after `suspect`, whether it has been joined anew."""
        return self._uplink.ready

    def start(self) -> None:
        """Connects and listens in the background, if that is not under way."""
        if not self._thread.is_started:
            self._thread.start(self._serve)
            self._uplink.start()

    def submit(self, message: pb.Submit) -> None:
        """Sends the leader's own part in a round, with those of the other ranks."""
        self.start()
        self._thread.call(self._gather, message)

    def settle(self, round_number: int, unfollowed: pb.Unfollowed | None, following: int) -> None:
        """Forgets rounds, which all ranks have agreed on, for all ranks of the node."""
        self._uplink.settle(round_number, unfollowed, following)

    def suspect(self) -> None:
        """Gives the stream up after a missed round."""
        self._uplink.suspect(self._uplink.epoch)

    def encourage(self) -> None:
        """Connects at once if the next attempt is being waited for: another rank has got through."""
        self._uplink.encourage()

    def close(self) -> None:
        """Leaves the session for the whole node, within a bounded time."""
        self._uplink.close()
        self._thread.stop()
        self._listener.close()

    # ------------------------------------------------------------------ told by the stream

    def answered(self, answers: Sequence[pb.Answer]) -> None:
        """Hands answers out."""
        own = [answer for answer in answers if answer.rank == self._seat.rank]
        others = [answer for answer in answers if answer.rank != self._seat.rank]
        if others:
            self._thread.call(self._hand_out, others)
        if own:
            self._inbox.answered(own)

    def joined(self, epoch: int) -> None:
        """Tells the followers."""
        self._thread.call(self._tell, Kind.JOINED, _EPOCH.pack(epoch))

    def lost(self, trouble: str) -> None:
        """Tells the followers."""
        self._thread.call(self._tell, Kind.LOST, trouble.encode())

    def noted(self, trouble: str, cause: Cause | None = None) -> None:
        """Tells the leader's own rank."""
        self._inbox.noted(trouble, cause)

    # ------------------------------------------------------------------ in the thread

    async def _serve(self, stopped: asyncio.Event) -> None:
        def link() -> FrameLink:
            return FrameLink(opened=_ignore, received=self._receive, closed=self._forget)

        server = await asyncio.get_running_loop().create_unix_server(link, sock=self._listener)
        await stopped.wait()
        server.close()
        for follower in list(self._followers):
            follower.close()

    def _receive(self, link: FrameLink, kind: Kind, payload: bytes) -> None:
        try:
            if kind is Kind.HELLO:
                self._greet(link, *_RANK.unpack(payload))
            elif kind is Kind.SUBMIT:
                message = pb.Submit.FromString(payload)
                if message.rank == self._followers.get(link, -1):
                    self._gather(message)
            elif kind is Kind.SUSPECT:
                self._uplink.suspect(*_EPOCH.unpack(payload))
        except (DecodeError, struct.error):
            link.close()

    def _greet(self, link: FrameLink, rank: int) -> None:
        if rank not in self._seat.ranks[1:]:
            link.close()
            return
        self._followers[link] = rank
        if self._uplink.ready:
            link.send(Kind.JOINED, _EPOCH.pack(self._uplink.epoch))

    def _forget(self, link: FrameLink) -> None:
        self._followers.pop(link, None)

    def _tell(self, kind: Kind, payload: bytes) -> None:
        for follower in self._followers:
            follower.send(kind, payload)

    def _hand_out(self, answers: Sequence[pb.Answer]) -> None:
        links = {rank: link for link, rank in self._followers.items()}
        for answer in answers:
            if answer.rank in links:
                links[answer.rank].send(Kind.ANSWER, answer.SerializeToString())

    def _gather(self, message: pb.Submit) -> None:
        number, loop = message.round, asyncio.get_running_loop()
        if number <= self._sent:
            self._uplink.submit(message)
            return
        if number not in self._gathering:
            self._gathering[number] = {}
            loop.call_later(self._seat.linger, self._send, number)
        self._gathering[number].setdefault(message.rank, (loop.time(), message))
        if len(self._gathering[number]) == len(self._seat.ranks):
            self._send(number)

    def _send(self, number: int) -> None:
        """Sends a round, complete or not, and those before it."""
        self._sent = max(self._sent, number)
        due = sorted(earlier for earlier in self._gathering if earlier <= number)
        now, messages = asyncio.get_running_loop().time(), list[pb.Submit]()
        for earlier in due:
            for came, message in self._gathering.pop(earlier).values():
                message.held = int(1e6 * (now - came))  # so that who came last is known also where all come together
                messages.append(message)
        if messages:
            self._uplink.submit(*messages)


class NodeFollower:
    """The other ranks' side: sends submissions to the leader and takes answers from it."""

    def __init__(self, seat: NodeSeat, inbox: Inbox) -> None:
        self._seat = seat
        self._inbox = inbox
        self._thread = LoopThread("evenkeel-node-follower")
        self._joined = 0  # which joining of the leader's stream holds; 0: none
        self._suspected = 0  # and which must not be trusted any more
        # Used in the thread only.
        self._unsettled: dict[int, bytes] = {}
        self._settled = -1
        self._link: FrameLink | None = None

    @property
    def ready(self) -> bool:
        """Whether the leader's stream is joined; after `suspect`, whether it has been joined anew."""
        return self._joined > self._suspected

    def start(self) -> None:
        """Connects to the leader in the background, if that is not under way."""
        if not self._thread.is_started:
            self._thread.start(self._serve)

    def submit(self, message: pb.Submit) -> None:
        """Sends a round to the leader now, and again after each reconnect until it is settled."""
        self.start()
        self._thread.call(self._send, message.round, message.SerializeToString())

    def settle(self, round_number: int, unfollowed: pb.Unfollowed | None, following: int) -> None:  # noqa: ARG002
        """Forgets rounds that all ranks have agreed on; rank 0, who tells the service, follows nobody."""
        self._thread.call(self._forget, following - 1)

    def suspect(self) -> None:
        """Asks the leader for a fresh stream after a missed round."""
        if self._joined > self._suspected:
            self._suspected = self._joined
            self._thread.call(self._complain, self._suspected)

    def encourage(self) -> None:
        """The leader has heard of it too, and connects for the whole node."""

    def close(self) -> None:
        """Ends the thread, within a bounded time; the leader leaves the session for the whole node."""
        self._thread.stop()

    # ------------------------------------------------------------------ in the thread

    async def _serve(self, stopped: asyncio.Event) -> None:
        loop, backoff = asyncio.get_running_loop(), Backoff(1)
        while not stopped.is_set():
            ended = asyncio.Event()
            try:
                link = await self._connect(ended)
            except OSError as error:
                self._inbox.noted(f"the node's leader, rank {self._seat.ranks[0]}, cannot be reached: {error}")
                reached = False
            else:
                reached = True
                await _first_of(ended, stopped)
                self._link, self._joined = None, 0
                link.close()
            if not stopped.is_set():
                pause = asyncio.Event()
                loop.call_later(backoff.after(joined=reached, refused=False), pause.set)
                await _first_of(pause, stopped)

    async def _connect(self, ended: asyncio.Event) -> FrameLink:
        def closed(_link: FrameLink) -> None:
            ended.set()

        link = FrameLink(opened=self._enter, received=self._receive, closed=closed)
        socket = connect(self._seat.address, _CONNECT_SECONDS)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=socket)
        return link

    def _enter(self, link: FrameLink) -> None:
        self._link = link
        link.send(Kind.HELLO, _RANK.pack(self._seat.rank))
        for payload in self._unsettled.values():
            link.send(Kind.SUBMIT, payload)

    def _receive(self, _link: FrameLink, kind: Kind, payload: bytes) -> None:
        if kind is Kind.JOINED:
            (self._joined,) = _EPOCH.unpack(payload)
        elif kind is Kind.LOST:
            self._joined = 0
            if payload:
                self._inbox.noted(payload.decode())
        elif kind is Kind.ANSWER:
            self._inbox.answered([pb.Answer.FromString(payload)])

    def _send(self, number: int, payload: bytes) -> None:
        if number <= self._settled:
            return
        self._unsettled[number] = payload
        if self._link is not None:
            self._link.send(Kind.SUBMIT, payload)

    def _forget(self, number: int) -> None:
        """Forgets the rounds up to this one."""
        self._settled = max(self._settled, number)
        for earlier in [one for one in self._unsettled if one <= number]:
            del self._unsettled[earlier]

    def _complain(self, epoch: int) -> None:
        if self._link is not None:
            self._link.send(Kind.SUSPECT, _EPOCH.pack(epoch))


def _ignore(_link: FrameLink) -> None:
    """A link says who it is with its first frame."""


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
