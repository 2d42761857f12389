"""A relay between ranks and the balancer that knows the protocol, to lose, hold, repeat or forge single messages."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import grpc

from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc

Submits = Callable[[int, pb.Submit], Iterable[pb.Submit]]
Answers = Callable[[int, pb.Answer], Iterable[pb.Answer]]
SubmitGroups = Callable[[int, pb.SubmitGroup], Iterable[pb.SubmitGroup]]
AnswerGroups = Callable[[int, pb.AnswerGroup], Iterable[pb.AnswerGroup]]


class Relay(pb_grpc.BalancerServiceServicer):
    """Forwards streams to a balancer; what a test assigns to `submits` and so on sees every message first.

    Attributes:
        target: The port of the balancer.
        joins: Sees each stream that begins; it may wait, which holds the stream.
        submits: From a rank and its submission to what is passed on.
        answers: From a rank and an answer to what is passed on; it may sleep, which holds this rank's stream.
        submit_groups: From the leader of a node and what it submits to what is passed on.
        answer_groups: From the leader of a node and what it is answered to what is passed on; it may sleep, too.
        seen: What tests count.
        lock: For tests whose functions share state: streams have threads of their own.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.seen: Counter[str] = Counter()
        self.lock = threading.Lock()
        self._contexts: dict[int, Any] = {}
        self.joins: Callable[[int], None]
        self.submits: Submits
        self.answers: Answers
        self.submit_groups: SubmitGroups
        self.answer_groups: AnswerGroups
        self.heal()
        # Streams of ranks that gave up end only when the balancer's side does: leave room.
        self._server = grpc.server(ThreadPoolExecutor(64), options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_BalancerServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def heal(self) -> None:
        """Passes everything on."""
        self.joins = lambda _rank: None
        self.submits = lambda _rank, submit: [submit]
        self.answers = lambda _rank, answer: [answer]
        self.submit_groups = lambda _rank, group: [group]
        self.answer_groups = lambda _rank, group: [group]

    def cancel(self, rank: int) -> None:
        """Cancels the stream of a rank, on both sides."""
        self._contexts[rank].cancel()

    def Balance(self, requests: Iterator[pb.BalanceRequest], context: Any) -> Iterator[pb.BalanceResponse]:  # noqa: N802
        first = next(requests)
        rank = first.join.rank
        self.joins(rank)
        self._contexts[rank] = context
        outgoing: SimpleQueue[pb.BalanceRequest | None] = SimpleQueue()
        outgoing.put(first)
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{self.target}", options=options) as channel:
            call = pb_grpc.BalancerServiceStub(channel).Balance(iter(outgoing.get, None))  # type: ignore[no-untyped-call]

            def forward() -> None:
                try:
                    for request in requests:
                        if request.HasField("told"):  # whatever becomes of what it comes with
                            outgoing.put(pb.BalanceRequest(submits=pb.SubmitGroup(), told=request.told))
                        if request.WhichOneof("request") == "submits":
                            for submits in self.submit_groups(rank, request.submits):
                                outgoing.put(pb.BalanceRequest(submits=submits))
                            continue
                        if request.WhichOneof("request") == "elsewhere":
                            outgoing.put(request)
                            continue
                        for submit in self.submits(rank, request.submit):
                            outgoing.put(pb.BalanceRequest(submit=submit))
                    outgoing.put(None)
                except Exception:  # the rank has cancelled
                    call.cancel()

            if not context.add_callback(call.cancel):
                return
            threading.Thread(target=forward, daemon=True).start()
            try:
                for response in call:
                    kind = response.WhichOneof("response")
                    if kind == "answer":
                        for answer in self.answers(rank, response.answer):
                            yield pb.BalanceResponse(answer=answer)
                    elif kind == "answers":
                        for answers in self.answer_groups(rank, response.answers):
                            yield pb.BalanceResponse(answers=answers)
                    else:
                        yield response
            except grpc.RpcError as error:
                context.abort(grpc.StatusCode.UNAVAILABLE, f"relay: {error.code()}")
            finally:
                outgoing.put(None)

    def __enter__(self) -> Relay:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(0).wait(5)
