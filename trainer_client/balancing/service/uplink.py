"""A stream to the balancer, of one rank or of all ranks of a node: kept joined, resubmitting what is not settled."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Protocol

import grpc

from evenkeel.addresses import resolve
from evenkeel.credentials import Credentials
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from trainer_client.balancing.service.joining import join_submits, split_answer
from trainer_client.balancing.service.messages import VersionError, check_version
from trainer_client.balancing.service.outages import Backoff, Cause, is_superseded, of_call, of_refusal

CLOSE_SECONDS = 2.0
_SPARE_DESCRIPTORS = 16

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
    """Keeps a stream to the balancer. Its thread starts with `start`; nothing here blocks the caller for long."""

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
        self._outbox: SimpleQueue[pb.BalanceRequest | None] | None = None  # of the joined stream
        self._epoch = 0
        self._call: grpc.Call | None = None
        self._given_up: grpc.Call | None = None  # what was wrong with it has been told
        self._timed_out: grpc.Call | None = None  # it was not joined in time
        self._thread: threading.Thread | None = None
        self._closed = False
        self._encouraged = False  # another rank has got through
        self._refused = False  # the service has said no
        self._superseded = False  # for good
        self._probed = ""  # the trouble whose cause has been looked for
        self._max_message_bytes = 0  # what the service takes; unknown before it has said so
        self._takes_nodes = False  # and whether it takes the ranks of a node together

    @property
    def ready(self) -> bool:
        """Whether the stream is joined; after `suspect`, whether it has been joined anew."""
        return self._outbox is not None

    @property
    def epoch(self) -> int:
        """How often the stream has been joined."""
        return self._epoch

    def start(self) -> None:
        """Connects in the background, if that is not under way."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="evenkeel-connection", daemon=True)
            self._thread.start()

    def submit(self, *messages: pb.Submit) -> None:
        """Sends submissions now, and again after each reconnect until their rounds are settled."""
        with self._changed:
            open_ones = [message for message in messages if message.round > self._settled]
            for message in open_ones:
                self._unsettled.setdefault(message.round, {})[message.rank] = message
            too_large = self._send(self._outbox, open_ones) if self._outbox is not None else []
        self._refuse(too_large)

    def settle(self, round_number: int) -> None:
        """Forgets a round that all ranks have agreed on; rounds are settled in order."""
        with self._changed:
            self._settled = max(self._settled, round_number)
            self._unsettled.pop(round_number, None)

    def suspect(self, epoch: int | None = None) -> None:
        """Gives the stream up; ready again when another has been joined.

        Args:
            epoch: Which joining is meant: a later one, or one under way, stays as it is. None: whatever there is.
        """
        with self._changed:
            if epoch is not None and (epoch != self._epoch or self._outbox is None):
                return
            self._outbox = None
            self._given_up = call = self._call
        if call is not None:
            call.cancel()

    def encourage(self) -> None:
        """Connects at once if the next attempt is being waited for: another rank has got through."""
        with self._changed:
            self._encouraged = self._outbox is None
            self._changed.notify_all()

    def close(self) -> None:
        """Leaves the session and ends the thread, within a bounded time."""
        with self._changed:
            self._closed = True
            outbox, call = self._outbox, self._call
            self._changed.notify_all()
        if outbox is not None:
            outbox.put(None)  # a clean end of the requests tells the service that the ranks have left
        elif call is not None:
            call.cancel()  # nothing to leave: the stream was not joined yet
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS / 2)
            if self._thread.is_alive() and call is not None:
                call.cancel()
                self._thread.join(CLOSE_SECONDS / 2)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        backoff = Backoff(self._join.world_size // max(1, len(self._join.ranks)))
        while not (self._closed or self._superseded):
            self._refused = False
            try:
                joined = self._serve()
            except Exception as error:  # out of threads or file descriptors, say: it may be better later
                self._listener.noted(f"{type(error).__name__}: {error}")
                joined = False
            pause = backoff.after(joined=joined, refused=self._refused)
            with self._changed:
                if self._changed.wait_for(lambda: self._closed or self._encouraged, pause) and not self._closed:
                    self._changed.wait_for(lambda: self._closed, backoff.encouraged())
                self._encouraged = False

    def _serve(self) -> bool:
        """One stream from join to end; returns whether it was joined."""
        joined, trouble = False, ""
        _require_descriptors()
        outbox: SimpleQueue[pb.BalanceRequest | None] = SimpleQueue()
        outbox.put(pb.BalanceRequest(join=self._join))
        try:
            target, spreading, header = resolve(self._address, self._join.job)
            metadata = self._credentials.metadata(target) + header
            channel = self._credentials.channel(target, [*_CHANNEL_OPTIONS, *spreading])
        except ValueError as error:  # a file that is being renewed may be back at the next attempt
            self._listener.noted(str(error))
            return False
        patience: threading.Timer | None = None
        try:
            call = pb_grpc.BalancerServiceStub(channel).Balance(  # type: ignore[no-untyped-call]
                iter(outbox.get, None), metadata=metadata
            )
            with self._changed:
                self._call = call
                if self._closed:
                    call.cancel()
            # A service that accepts the stream and never answers must not hold it for ever.
            patience = threading.Timer(self._join_timeout, self._lose_patience, (call,))
            patience.daemon = True
            patience.start()
            for response in call:
                kind = response.WhichOneof("response")
                if kind == "joined":
                    patience.cancel()
                    check_version(response.joined)
                    joined = True
                    self._max_message_bytes = response.joined.limits.max_message_bytes
                    self._takes_nodes = response.joined.takes_nodes
                    self._enter(outbox, call)
                elif kind == "answer":
                    self._listener.answered([response.answer])
                elif kind == "answers":
                    self._listener.answered(response.answers.answers)
                    for node in response.answers.nodes:
                        self._answered(node)
                elif kind == "error":
                    self._refused = response.error.code != pb.ERROR_CODE_DRAINING
                    self._superseded = is_superseded(response.error)
                    trouble = response.error.message
                    self._listener.noted(trouble, of_refusal(response.error))
        except VersionError as error:
            self._refused = True
            trouble = str(error)
            self._listener.noted(trouble, Cause(kind="protocol versions", text=trouble))
            call.cancel()
        except grpc.RpcError as error:
            if call is self._timed_out:
                trouble = f"no answer from {self._address} within {self._join_timeout:g} s"
                self._listener.noted(trouble)
            elif call is not self._given_up:
                trouble = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
                self._listener.noted(trouble)
                if not joined and isinstance(error, grpc.Call):
                    self._look_for_cause(error, trouble)
        finally:
            if patience is not None:
                patience.cancel()
            with self._changed:
                if self._outbox is outbox:
                    self._outbox = None
                self._call = None
            outbox.put(None)
            channel.close()
            self._listener.lost(trouble)
        return joined

    def _answered(self, node: pb.AnswerNode) -> None:
        own = self._join.ranks or (self._join.rank,)
        try:
            answers = split_answer(node, own)
        except ValueError as error:  # whatever a service may say, the job goes on, and no rank waits for more
            said = pb.Error(message=f"malformed answer to round {node.round}: {error}")
            answers = [pb.Answer(round=node.round, rank=rank, error=said) for rank in own]
        self._listener.answered(answers)

    def _lose_patience(self, call: grpc.Call) -> None:
        self._timed_out = call
        call.cancel()

    def _look_for_cause(self, error: grpc.Call, trouble: str) -> None:
        """Once for each trouble: a connection that is not there takes as long to try by hand."""
        if trouble == self._probed or self._closed:
            return
        self._probed = trouble
        cause = of_call(error, self._address, self._credentials)
        if cause is not None:
            self._refused = True  # trying often is of no use
            self._listener.noted(str(cause), cause)

    def _enter(self, outbox: SimpleQueue[pb.BalanceRequest | None], call: grpc.Call) -> None:
        with self._changed:
            if self._closed or not call.is_active():  # given up while the service's welcome was under way
                return
            everything = [message for ranks in self._unsettled.values() for message in ranks.values()]
            too_large = self._send(outbox, everything)
            self._outbox = outbox
            self._encouraged = False
            self._epoch += 1
            epoch = self._epoch
        self._listener.joined(epoch)
        self._refuse(too_large)

    def _send(self, outbox: SimpleQueue[pb.BalanceRequest | None], messages: list[pb.Submit]) -> list[pb.Submit]:
        """Sends submissions in as few requests as the service's limit allows; returns those that exceed it alone."""
        if not self._join.ranks:
            return [one for message in messages for one in self._put(outbox, [message])]
        return self._put(outbox, messages) if messages else []

    def _put(self, outbox: SimpleQueue[pb.BalanceRequest | None], messages: list[pb.Submit]) -> list[pb.Submit]:
        request = self._request(messages)
        if not self._max_message_bytes or request.ByteSize() <= self._max_message_bytes:
            outbox.put(request)
            return []
        half = len(messages) // 2
        return [*self._put(outbox, messages[:half]), *self._put(outbox, messages[half:])] if half else messages

    def _request(self, messages: list[pb.Submit]) -> pb.BalanceRequest:
        if not self._join.ranks:
            return pb.BalanceRequest(submit=messages[0])
        if not self._takes_nodes:
            return pb.BalanceRequest(submits=pb.SubmitGroup(submits=messages))
        nodes, odd = join_submits(messages, self._join)
        return pb.BalanceRequest(submits=pb.SubmitGroup(submits=odd, nodes=nodes))

    def _refuse(self, messages: list[pb.Submit]) -> None:
        """Answers here what would end the stream if it were sent."""
        for message in messages:
            said = f"round {message.round} takes {message.ByteSize()} bytes, the service at most "
            said += (
                f"{self._max_message_bytes}; submit fewer samples or fields, or raise the server's max_message_bytes"
            )
            error = pb.Error(field="max_message_bytes", message=said)
            self._listener.answered([pb.Answer(round=message.round, rank=message.rank, error=error)])


def _require_descriptors() -> None:
    """Checks that a new channel can be had: gRPC ends the process when it finds no file descriptor for its own use.

    Raises:
        OSError: If the process is out of file descriptors.
    """
    spare: list[int] = []
    try:
        for _ in range(_SPARE_DESCRIPTORS):
            spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for descriptor in spare:
            os.close(descriptor)
