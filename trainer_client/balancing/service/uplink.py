"""A stream to the balancer, of one rank or of all ranks of a node: kept joined, resubmitting what is not settled."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import grpc

from evenkeel.addresses import resolve
from evenkeel.credentials import Credentials
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from trainer_client.balancing.service.attempts import Attempt, require_descriptors
from trainer_client.balancing.service.joining import split_answer
from trainer_client.balancing.service.messages import VersionError, check_version, not_trained
from trainer_client.balancing.service.outages import Backoff, Cause, is_superseded, of_call, of_refusal

CLOSE_SECONDS = 2.0
_TOLD_AGAIN = 32  # rounds that were not followed, on a new stream

_CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Each attempt opens a connection of its own: a shared subchannel would sit out the backoff of an earlier one.
    ("grpc.use_local_subchannel_pool", 1),
]


class Listener(Protocol):
    """What is told about a stream, from the stream's thread; never holds it up."""

    def answered(self, answers: Sequence[pb.Answer]) -> None:
        """Answers to rounds have come."""

    def joined(self, epoch: int) -> None:
        """The stream has been joined, for the `epoch`-th time."""

    def lost(self, trouble: str) -> None:
        """The stream has ended; another is opened after a while."""

    def noted(self, trouble: str, cause: Cause | None = None) -> None:
        """Something went wrong; by a cause that does not pass by itself, if one is given."""


class Uplink:
    """Keeps a stream to the balancer. Its thread starts with `start`; nothing here blocks the caller for long.

    A balancer that leaves is kept until another one has been joined by all ranks of the session: while it still
    answers, a second thread joins the other one. The round from which on they ask that one is the balancer's word.
    """

    def __init__(
        self,
        address: str,
        join: pb.Join,
        listener: Listener,
        *,
        join_timeout: float,
        credentials: Credentials | None = None,
    ) -> None:
        self._address = address
        self._credentials = credentials if credentials is not None else Credentials()
        self._join = join
        self._listener = listener
        self._join_timeout = join_timeout
        self._changed = threading.Condition()
        self._unsettled: dict[int, dict[int, pb.Submit]] = {}  # by round, then rank
        self._settled = -1  # rounds up to here have been agreed on
        self._unfollowed: deque[pb.Unfollowed] = deque(maxlen=_TOLD_AGAIN)
        self._streams: set[Attempt] = set()  # that have begun and not ended
        self._current: Attempt | None = None  # gets the rounds
        self._next: Attempt | None = None  # joined, and gets them when the current one's balancer has left
        self._old: Attempt | None = None  # gets the rounds before its `ends_at`
        self._left = ""  # what the balancer has said that left, while no other has been joined
        self._epoch = 0
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._encouraged = False  # another rank has got through
        self._superseded = False  # for good
        self._probed = ""  # the trouble whose cause has been looked for

    @property
    def ready(self) -> bool:
        """Whether the stream is joined; after `suspect`, whether it has been joined anew."""
        return self._current is not None

    @property
    def epoch(self) -> int:
        """How often the stream has been joined."""
        return self._epoch

    def start(self) -> None:
        """Connects in the background, if that is not under way."""
        if not self._threads:
            self._begin()

    def submit(self, *messages: pb.Submit) -> None:
        """Sends submissions now, and again after each reconnect until their rounds are settled."""
        with self._changed:
            open_ones = [message for message in messages if message.round > self._settled]
            for message in open_ones:
                self._unsettled.setdefault(message.round, {})[message.rank] = message
            refused = self._send(open_ones)
        self._answer(refused)

    def settle(self, round_number: int, unfollowed: pb.Unfollowed | None, following: int) -> None:
        """Forgets a round that all ranks have agreed on; `following` is next, and nobody trains those between.

        Rounds are settled in order; `unfollowed` tells why they did not do what the service has decided, if so.
        """
        with self._changed:
            self._settled = max(self._settled, following - 1)
            if self._unsettled.pop(round_number, None) and unfollowed is not None:
                self._unfollowed.append(unfollowed)
            for number in range(round_number + 1, following):
                self._unsettled.pop(number, None)
                self._unfollowed.append(not_trained(number))
            self._leave_old()
            if following > round_number + 1 and self._current is not None:  # the loop is over: it may be the last one
                self._tell(self._current)
                self._current.tell_now()

    def suspect(self, epoch: int | None = None) -> None:
        """Gives the stream up; ready again when another has been joined.

        Args:
            epoch: Which joining is meant: a later one, or one under way, stays as it is. None: whatever there is.
        """
        with self._changed:
            if epoch is not None and (epoch != self._epoch or self._current is None):
                return
            suspected = [one for one in self._streams if one is not self._next and (epoch is None or one.joined)]
            self._current = self._old = None
        for stream in suspected:
            stream.give_up()

    def encourage(self) -> None:
        """Connects at once if the next attempt is being waited for: another rank has got through."""
        with self._changed:
            self._encouraged = self._current is None
            self._changed.notify_all()

    def close(self) -> None:
        """Leaves the session and ends the threads, within a bounded time."""
        with self._changed:
            self._closed = True
            streams, threads = list(self._streams), list(self._threads)
            self._changed.notify_all()
            for stream in streams:
                self._tell(stream)
        for stream in streams:
            if stream.joined:
                stream.end()  # a clean end of the requests tells the service that the ranks have left
            elif stream.call is not None:
                stream.call.cancel()  # nothing to leave: the stream was not joined yet
        for patience in (CLOSE_SECONDS / 2, CLOSE_SECONDS / 2):
            deadline = time.monotonic() + patience
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            if not any(thread.is_alive() for thread in threads):
                break
            for stream in streams:
                if stream.call is not None:
                    stream.call.cancel()

    # ------------------------------------------------------------------ the threads

    def _begin(self) -> None:
        with self._changed:
            if not self._closed:
                thread = threading.Thread(target=self._run, name="evenkeel-connection", daemon=True)
                thread.start()
                self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def _run(self) -> None:
        backoff = Backoff(self._join.world_size // max(1, len(self._join.ranks)))
        while not (self._closed or self._superseded):
            stream = Attempt(self._join)
            try:
                self._serve(stream)
            except Exception as error:  # out of threads or file descriptors, say: it may be better later
                self._listener.noted(f"{type(error).__name__}: {error}")
            if stream.leaving:
                return  # another thread goes on
            pause = backoff.after(joined=stream.joined, refused=stream.refused)
            with self._changed:
                if self._changed.wait_for(lambda: self._closed or self._encouraged, pause) and not self._closed:
                    self._changed.wait_for(lambda: self._closed, backoff.encouraged())
                self._encouraged = False

    def _serve(self, stream: Attempt) -> None:
        """A stream from join to end."""
        trouble, left = "", ""
        require_descriptors()
        try:
            target, spreading, header = resolve(self._address, self._join.job)
            metadata = self._credentials.metadata(target) + header
            channel = self._credentials.channel(target, [*_CHANNEL_OPTIONS, *spreading])
        except ValueError as error:  # a file that is being renewed may be back at the next attempt
            self._listener.noted(str(error))
            return
        patience: threading.Timer | None = None
        try:
            call = pb_grpc.BalancerServiceStub(channel).Balance(  # type: ignore[no-untyped-call]
                iter(stream.outbox.get, None), metadata=metadata
            )
            with self._changed:
                stream.call = call
                self._streams.add(stream)
                if self._closed:
                    call.cancel()
            # A service that accepts the stream and never answers must not hold it for ever.
            patience = threading.Timer(self._join_timeout, self._lose_patience, (stream,))
            patience.daemon = True
            patience.start()
            for response in call:
                kind = response.WhichOneof("response")
                if kind == "joined":
                    patience.cancel()
                    check_version(response.joined)
                    stream.max_message_bytes = response.joined.limits.max_message_bytes
                    stream.takes_nodes = response.joined.takes_nodes
                    stream.joined = True
                    self._enter(stream)
                elif kind == "answer":
                    self._take(stream, [response.answer])
                elif kind == "answers":
                    self._take(stream, response.answers.answers)
                    for node in response.answers.nodes:
                        self._take(stream, self._split(node))
                elif kind == "leaving":
                    self._follow(stream, response.leaving)
                elif kind == "error":
                    trouble = response.error.message
                    if response.error.code == pb.ERROR_CODE_DRAINING:
                        left = trouble
                    else:
                        stream.refused = True
                    self._superseded = is_superseded(response.error)
                    self._listener.noted(trouble, of_refusal(response.error))
        except VersionError as error:
            stream.refused = True
            trouble = str(error)
            self._listener.noted(trouble, Cause(kind="protocol versions", text=trouble))
            call.cancel()
        except grpc.RpcError as error:
            if stream.timed_out:
                trouble = f"no answer from {self._address} within {self._join_timeout:g} s"
                self._listener.noted(trouble)
            elif not stream.given_up:
                trouble = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
                self._listener.noted(trouble)
                if not stream.joined and isinstance(error, grpc.Call):
                    self._look_for_cause(stream, error, trouble)
        finally:
            if patience is not None:
                patience.cancel()
            stream.outbox.put(None)
            channel.close()
            self._end(stream, trouble, left)

    def _enter(self, stream: Attempt) -> None:
        """A stream has been joined: it gets the rounds, or will when all ranks leave the one that has them."""
        with self._changed:
            # given up while the service's welcome was under way
            if self._closed or stream.given_up or stream.call is None or not stream.call.is_active():
                return
            if self._current is not None:
                self._next = stream
                self._current.outbox.put(pb.BalanceRequest(elsewhere=pb.Elsewhere()))
                return
            epoch, refused = self._go_to(stream)
        self._listener.joined(epoch)
        self._answer(refused)

    def _follow(self, stream: Attempt, said: pb.Leaving) -> None:
        """The balancer leaves: look for another one, or go there from a round on."""
        if not stream.leaving:
            self._begin()
            stream.leaving = True
        if not said.HasField("from_round"):
            return
        epoch, refused = 0, list[pb.Answer]()
        with self._changed:
            stream.ends_at = said.from_round
            if self._current is not stream:
                return
            self._old, self._current, following, self._next = stream, None, self._next, None
            self._leave_old()
            if following is not None:
                epoch, refused = self._go_to(following)
        if following is not None:
            self._listener.joined(epoch)
        else:
            self._listener.lost("")
        self._answer(refused)

    def _leave_old(self) -> None:
        """Ends the stream to the balancer that has left, once all ranks have agreed on its last round."""
        if self._old is not None and self._settled + 1 >= self._old.ends_at:
            self._tell(self._old)
            self._old.end()
            self._old = None

    def _go_to(self, stream: Attempt) -> tuple[int, list[pb.Answer]]:
        """From now on a stream gets the rounds, beginning with what is not settled; its epoch and what it cannot."""
        self._current = stream
        self._encouraged = False
        self._left = ""
        self._epoch += 1
        begin = -1 if self._old is None else self._old.ends_at
        open_ones = [one for number, ranks in self._unsettled.items() if number >= begin for one in ranks.values()]
        return self._epoch, self._send(open_ones)

    def _end(self, stream: Attempt, trouble: str, left: str) -> None:
        """A stream has ended: the one that has been joined meanwhile gets the rounds."""
        epoch, refused = 0, list[pb.Answer]()
        with self._changed:
            self._streams.discard(stream)
            if self._next is stream:
                self._next = None
            if self._old is stream:
                self._old = None
            if self._current is stream:
                self._current = None
            if self._current is None and self._next is not None:
                following, self._next = self._next, None
                epoch, refused = self._go_to(following)
            elif self._current is None and left:
                # Nobody is there whom a repeat could reach in time: the ranks need not wait for it.
                self._left = left
                refused = self._send([one for ranks in self._unsettled.values() for one in ranks.values()])
            ready = self._current is not None
        if epoch:
            self._listener.joined(epoch)
        elif not ready:
            self._listener.lost(trouble)
        self._answer(refused)

    def _take(self, stream: Attempt, answers: Sequence[pb.Answer]) -> None:
        if stream.ends_at < math.inf:
            answers = [answer for answer in answers if answer.round < stream.ends_at]
        self._listener.answered(answers)

    def _split(self, node: pb.AnswerNode) -> list[pb.Answer]:
        own = self._join.ranks or (self._join.rank,)
        try:
            return split_answer(node, own)
        except ValueError as error:  # whatever a service may say, the job goes on, and no rank waits for more
            said = pb.Error(message=f"malformed answer to round {node.round}: {error}")
            return [pb.Answer(round=node.round, rank=rank, error=said) for rank in own]

    def _answer(self, answers: list[pb.Answer]) -> None:
        if answers:
            self._listener.answered(answers)

    @staticmethod
    def _lose_patience(stream: Attempt) -> None:
        stream.timed_out = True
        if stream.call is not None:
            stream.call.cancel()

    def _look_for_cause(self, stream: Attempt, error: grpc.Call, trouble: str) -> None:
        """Once for each trouble: a connection that is not there takes as long to try by hand."""
        if trouble == self._probed or self._closed:
            return
        self._probed = trouble
        cause = of_call(error, self._address, self._credentials)
        if cause is not None:
            stream.refused = True  # trying often is of no use
            self._listener.noted(str(cause), cause)

    def _send(self, messages: list[pb.Submit]) -> list[pb.Answer]:
        """Sends submissions, if there is a stream for them; returns the answers to those that are sent to nobody."""
        old, refused = self._old, list[pb.Answer]()
        if old is not None:
            self._tell(old)
            refused = old.put([one for one in messages if one.round < old.ends_at])
            messages = [one for one in messages if one.round >= old.ends_at]
        if self._current is not None:
            self._tell(self._current)
            return refused + self._current.put(messages)
        if self._left:
            said = pb.Error(code=pb.ERROR_CODE_DRAINING, message=self._left)
            refused += [pb.Answer(round=one.round, rank=one.rank, error=said) for one in messages]
        return refused

    def _tell(self, stream: Attempt) -> None:
        """Lets a stream's next request say what the ranks did, which all know: that of rank 0 is enough."""
        if self._join.rank == 0:
            new = [one for one in self._unfollowed if one.round > stream.told]
            stream.tell(pb.Told(agreed=self._settled + 1, unfollowed=new))
