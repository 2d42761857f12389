"""A relay between a lead and the balancer, to lose, hold, repeat, refuse or forge single calls."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import grpc

Ask: TypeAlias = Callable[[bytes], bytes]
"""Asks the balancer."""
Hook: TypeAlias = Callable[[bytes, Ask], bytes]
"""From a request, and how to ask the balancer, to the response; it may sleep, and it may raise `Refused`."""


class Refused(Exception):  # noqa: N818
    """Ends a call with a status; the argument is its `grpc.StatusCode`."""


def pass_on(request: bytes, ask: Ask) -> bytes:
    """Harms nothing."""
    return ask(request)


class Relay(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Forwards unary calls to a balancer.

    Attributes:
        target: The port of the balancer.
        hook: Answers `PlanRound`; other methods are passed on.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.hook: Hook = pass_on
        # Calls that the lead has given up end only when their hooks do: leave room.
        self._server = grpc.server(ThreadPoolExecutor(64), handlers=[self], options=[("grpc.so_reuseport", 0)])
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def heal(self) -> None:
        """Passes everything on."""
        self.hook = pass_on

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method: str = details.method
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._answer(method, request, context))

    def _answer(self, method: str, request: bytes, context: Any) -> bytes:
        metadata = [(key, value) for key, value in context.invocation_metadata() if key.startswith("evenkeel-")]

        def ask(request: bytes) -> bytes:
            options = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(f"127.0.0.1:{self.target}", options=options) as channel:
                call = channel.unary_unary(method)
                return bytes(call(request, timeout=max(0.01, context.time_remaining()), metadata=metadata))

        try:
            return self.hook(request, ask) if method.endswith("/PlanRound") else ask(request)
        except Refused as refused:
            context.abort(refused.args[0], "refused by the relay")
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())
        raise AssertionError("unreachable")

    def __enter__(self) -> Relay:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait(5)
