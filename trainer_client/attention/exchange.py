"""Keys and values on their way to the ranks that share a sample, and their gradients on the way home.

Only ranks that share a sample send anything, each to those it shares with. All of them do so in the same order: that of
the attentions in the model, and in the backward pass the reverse. What an attention sends first is under way while it
computes its own block. Gradients travel when that is done: a rank is ready to receive them when others have computed
them, and a GPU that waits for another one keeps blocks from its own kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_client.attention.pieces import Phase, Pieces, Route


def _by_message(routes: Sequence[Route], num_parts: int) -> dict[tuple[int, int], list[Route]]:
    """A message has all rows of a part between two ranks."""
    messages: dict[tuple[int, int], list[Route]] = {}
    for route in routes:
        if route.part < num_parts:
            messages.setdefault((route.peer, route.part), []).append(route)
    return messages


def _stretch(tensors: Sequence[Tensor], route: Route) -> Tensor:
    return tensors[route.part].narrow(0, route.begin, route.size)


class _Transfer:
    """A phase under way, forward or back; `wait` brings what came into its rows, or adds it to them."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        phase: Phase,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        *,
        back: bool = False,
    ) -> None:
        leaving, arriving = (phase.arriving, phase.leaving) if back else (phase.leaving, phase.arriving)
        self._targets, self._add = targets, back
        self._received: list[tuple[Tensor, list[Route]]] = []
        operations = []
        for (peer, part), routes in _by_message(leaving, len(sources)).items():
            rows = [_stretch(sources, route) for route in routes]
            message = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows)
            operations.append(dist.P2POp(dist.isend, message, group=group, tag=part, group_peer=peer))
        for (peer, part), routes in _by_message(arriving, len(targets)).items():
            if len(routes) == 1 and not back:
                message = _stretch(targets, routes[0])
            else:
                message = targets[part].new_empty(sum(route.size for route in routes), *targets[part].shape[1:])
                self._received.append((message, routes))
            operations.append(dist.P2POp(dist.irecv, message, group=group, tag=part, group_peer=peer))
        self._messages = [operation.tensor for operation in operations]  # kept until they are sent
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for message, routes in self._received:
            for route, rows in zip(routes, message.split([route.size for route in routes]), strict=True):  # type: ignore[no-untyped-call]
                target = _stretch(self._targets, route)
                target.add_(rows) if self._add else target.copy_(rows)
        self._messages, self._received = [], []


class Exchange:
    """What one attention sends and receives."""

    def __init__(self, pieces: Pieces, key: Tensor, value: Tensor, query: Tensor) -> None:
        self.pieces = pieces
        self._like = key, value, query
        self._arriving: tuple[Tensor, ...] = ()
        self._transfer: _Transfer | None = None

    def start(self, key: Tensor, value: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sends keys, values and contextual queries of this rank; returns what will have arrived after `wait`."""
        pieces = self.pieces
        counts = pieces.num_keys, pieces.num_keys, pieces.num_contexts
        arriving = [_like(tensor, count) for tensor, count in zip((key, value, query), counts, strict=True)]
        self._transfer = _Transfer(pieces.group, pieces.shares, (key, value, query), arriving)
        self._arriving = key, value, query = tuple(arriving)
        return key, value, query

    def wait(self) -> None:
        """Waits until all has arrived, and passes on what other ranks of the node need; on a GPU its stream waits."""
        assert self._transfer is not None
        self._transfer.wait()
        _Transfer(self.pieces.group, self.pieces.relayed, self._arriving, self._arriving).wait()
        self._transfer, self._arriving = None, ()

    def start_home(self, key: Tensor, value: Tensor, query: Tensor) -> None:
        """Sends the gradients of what had arrived to where it came from; what was passed on is summed before."""
        pieces = self.pieces
        relayed = (key.clone(), value.clone()) if pieces.relayed.leaving else (key, value)
        _Transfer(pieces.group, pieces.relayed, (key, value), relayed, back=True).wait()
        sent = {route.part for route in pieces.shares.leaving}
        self._home = [
            _like(tensor, pieces.num_rows if part in sent else 0, zero=True) for part, tensor in enumerate(self._like)
        ]
        self._transfer = _Transfer(pieces.group, pieces.shares, (*relayed, query), self._home, back=True)

    def finish_home(self) -> tuple[Tensor | None, ...]:
        """The gradients of this rank's rows, summed over the ranks that had them: of keys, values, queries."""
        assert self._transfer is not None
        self._transfer.wait()
        home, self._home, self._transfer = self._home, [], None
        return tuple(gradient if gradient.shape[0] else None for gradient in home)

    def send_results(self, sent: Sequence[Tensor], received: Sequence[Tensor], *, back: bool) -> None:
        """Sends results of contextual queries, or their gradients home, and waits for it."""
        _Transfer(self.pieces.group, self.pieces.returned, sent, received, back=back).wait()


def _like(tensor: Tensor, rows: int, *, zero: bool = False) -> Tensor:
    shape = rows, *tensor.shape[1:]
    return tensor.new_zeros(shape) if zero else tensor.new_empty(shape)


class _Start(torch.autograd.Function):
    """Begins the exchange. The first output holds nothing: it orders what follows, where a rank receives nothing."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, key: Tensor, value: Tensor, query: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return query.new_empty(0), *exchange.start(key, value, query)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # After the backward pass of own blocks: a GPU that waits for another one would keep blocks from it.
        key, value, query = (gradient.contiguous() for gradient in gradients[1:])
        ctx.exchange.start_home(key, value, query)
        return None, *ctx.exchange.finish_home()


class _Wait(torch.autograd.Function):
    """Ends the exchange; in the backward pass it orders that of the gradients, which is in `_Start`, behind itself."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *arriving: Tensor) -> tuple[Tensor, ...]:
        del ctx
        exchange.wait()
        return tuple(tensor.view_as(tensor) for tensor in arriving)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        del ctx
        return None, *gradients


class _Return(torch.autograd.Function):
    """Sends results of contextual queries home: outputs and, with softmax, logarithms of sums."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, token: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.num_rows = exchange, results[0].shape[0]
        received = tuple(_like(tensor, exchange.pieces.num_returned) for tensor in results)
        exchange.send_results([tensor.contiguous() for tensor in results], received, back=False)
        return token.view_as(token), *received

    @staticmethod
    def backward(ctx: Any, token: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        home = tuple(_like(gradient, ctx.num_rows, zero=True) for gradient in gradients)
        ctx.exchange.send_results([gradient.contiguous() for gradient in gradients], home, back=True)
        return None, token, *home


class _Anchor(torch.autograd.Function):
    """The same rows, tied to the exchange: their gradient starts that of what was sent, also where nothing arrived.

    It saves a tensor, so that activation checkpointing runs the forward pass of all ranks again before any gradient
    travels, not on some ranks before and on some after.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (token,) = ctx.saved_tensors
        return gradients[0], torch.zeros_like(token)


start: Any = _Start.apply  # gives a token, then keys, values and contextual queries that are arriving
wait: Any = _Wait.apply  # the same, when they have arrived
send_results: Any = _Return.apply  # a token, then results of this rank's contextual queries
anchor: Any = _Anchor.apply  # rows with the exchange as a part of their graph
