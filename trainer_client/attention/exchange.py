"""Keys and values on their way to the ranks that share a sample, and their gradients on the way home.

Only ranks that share a sample send anything, each to those it shares with. All of them do so in the same order: that of
the attentions in the model, and in the backward pass the reverse. What an attention sends first is under way while it
computes its own block. Gradients travel when that is done: a rank is ready to receive them when others have computed
them, and a GPU that waits for another one keeps blocks from its own kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_client.attention.pieces import Pieces, Route

_PARTS = 4  # tensors of a route at most, each with a tag of its own


class Exchange:
    """What one attention sends and receives."""

    def __init__(self, pieces: Pieces, like: Sequence[Tensor] = ()) -> None:
        """Sends nothing yet.

        Args:
            pieces: This rank's.
            like: Queries, keys and values, for an exchange that begins with `start_home`.
        """
        self.pieces = pieces
        self._works: list[Any] = []
        self._held: list[Tensor] = []
        self._spread: list[tuple[Tensor, list[Tensor]]] = []
        self._passing: tuple[Tensor, ...] = ()
        self._home: list[Tensor] = []
        self._shapes = tuple(tensor.new_empty(0, *tensor.shape[1:]) for tensor in like)

    def start(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sends keys, values and contextual queries of own pieces; returns what will have arrived after `wait`."""
        keys, contexts = self.pieces.keys, self.pieces.contexts
        self._shapes = tuple(tensor.new_empty(0, *tensor.shape[1:]) for tensor in (query, key, value))
        arrived = (
            key.new_empty(keys.num_arriving, *key.shape[1:]),
            value.new_empty(keys.num_arriving, *value.shape[1:]),
            query.new_empty(contexts.num_arriving, *query.shape[1:]),
        )
        leaving = [*_cut(keys.leaving, key, value), *_cut(contexts.leaving, query, first=2)]
        arriving = [*_cut(keys.arriving, *arrived[:2]), *_cut(contexts.arriving, arrived[2], first=2)]
        self._post(leaving, arriving)
        self._passing = arrived[:2]
        return arrived

    def wait(self) -> None:
        """Waits until all has arrived, and passes on what other ranks of the node need; on a GPU its stream waits."""
        self._wait()
        on, passing, self._passing = self.pieces.passed_on, self._passing, ()
        self._post(list(_cut(on.leaving, *passing)), list(_cut(on.arriving, *passing)))
        self._wait()

    def start_home(self, key: Tensor, value: Tensor, query: Tensor) -> None:
        """Sends the gradients of what had arrived to where it came from."""
        keys, contexts = self.pieces.keys, self.pieces.contexts
        query_like, key_like, value_like = self._shapes
        sums = self._collected(key, value)
        leaving = [
            *(
                (sums.get((route.begin, part), rows), route, part)
                for rows, route, part in _cut(keys.arriving, key, value)
            ),
            *_cut(contexts.arriving, query, first=2),
        ]
        arriving = [*_empty(keys.leaving, key_like, value_like), *_empty(contexts.leaving, query_like, first=2)]
        self._home = [tensor for tensor, _, _ in arriving]
        self._post(leaving, arriving)

    def _collected(self, key: Tensor, value: Tensor) -> dict[tuple[int, int], Tensor]:
        """The gradients of rows that were passed on, summed over this rank and those that got them from here."""
        on = self.pieces.passed_on
        back = list(_empty(on.leaving, *self._shapes[1:]))
        self._post(list(_cut(on.arriving, key, value)), back)
        self._wait()
        sums: dict[tuple[int, int], Tensor] = {}
        for found, route, part in back:
            place = route.begin, part
            if place not in sums:
                sums[place] = (key, value)[part].narrow(0, route.begin, route.size).clone()
            sums[place].add_(found)
        return sums

    def finish_home(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of own rows, summed over the ranks that had them: of queries, keys, values."""
        self._wait()
        home, self._home = iter(self._home), []
        keys, contexts = self.pieces.keys.leaving, self.pieces.contexts.leaving
        query_like, key_like, value_like = self._shapes
        rows = self.pieces.num_rows
        key, value = (like.new_zeros(rows, *like.shape[1:]) if keys else None for like in (key_like, value_like))
        query = query_like.new_zeros(rows, *query_like.shape[1:]) if contexts else None
        for route in keys:
            for total in (key, value):
                assert total is not None
                total.narrow(0, route.begin, route.size).add_(next(home))
        for route in contexts:
            assert query is not None
            query.narrow(0, route.begin, route.size).add_(next(home))
        return query, key, value

    def swap(self, sent: Sequence[Tensor], received: Sequence[Tensor], *, home: bool) -> None:
        """Sends what contextual queries found, or its gradients home, and waits for it."""
        routes = self.pieces.partials
        leaving, arriving = (routes.arriving, routes.leaving) if home else (routes.leaving, routes.arriving)
        self._post(list(_cut(leaving, *sent)), list(_cut(arriving, *received)))
        self._wait()

    def _post(self, leaving: list[tuple[Tensor, Route, int]], arriving: list[tuple[Tensor, Route, int]]) -> None:
        """Sends and receives, all that goes to a rank or comes from one as a message for each kind of rows."""
        group = self.pieces.group
        operations = []
        for function, moves in ((dist.isend, leaving), (dist.irecv, arriving)):
            together: dict[tuple[int, int], list[tuple[Tensor, Route]]] = {}
            for tensor, route, part in moves:
                together.setdefault((route.peer, part), []).append((tensor, route))
            for (peer, part), found in together.items():
                tensors, tag = [tensor for tensor, _ in found], found[0][1].tag
                message = tensors[0]
                if len(tensors) > 1 and function is dist.isend:
                    message = torch.cat(tensors)
                elif len(tensors) > 1:
                    message = message.new_empty(sum(tensor.shape[0] for tensor in tensors), *message.shape[1:])
                    self._spread.append((message, tensors))
                assert group is not None
                source = dist.get_global_rank(group, peer)
                operations.append(dist.P2POp(function, message, source, group, tag * _PARTS + part))
        self._held = [operation.tensor for operation in operations]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        for message, tensors in self._spread:
            torch.split_with_sizes_copy(message, [tensor.shape[0] for tensor in tensors], out=tensors)
        self._works, self._held, self._spread = [], [], []


def _cut(routes: list[Route], *tensors: Tensor, first: int = 0) -> Iterator[tuple[Tensor, Route, int]]:
    for route in routes:
        for part, tensor in enumerate(tensors, first):
            yield tensor.narrow(0, route.begin, route.size), route, part


def _empty(routes: list[Route], *like: Tensor, first: int = 0) -> Iterator[tuple[Tensor, Route, int]]:
    for route in routes:
        for part, tensor in enumerate(like, first):
            yield tensor.new_empty(route.size, *tensor.shape[1:]), route, part


def _filled(gradient: Tensor | None, like: tuple[Any, ...]) -> Tensor:
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient.contiguous()


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


class _Start(torch.autograd.Function):
    """Begins the exchange. The first output holds nothing: it orders what follows, where a rank receives nothing."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        arriving = exchange.start(query, key, value)
        ctx.kinds = _kinds((arriving[0], arriving[1], arriving[2]))
        return query.new_empty(0), *arriving

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # After the backward pass of own blocks: a GPU that waits for another one would keep blocks from it.
        filled = [_filled(gradient, kind) for gradient, kind in zip(gradients[1:], ctx.kinds, strict=True)]
        ctx.exchange.start_home(*filled)
        return None, *ctx.exchange.finish_home()


class _Wait(torch.autograd.Function):
    """Ends the exchange; in the backward pass it orders that of the gradients, which is in `_Start`, behind itself."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *arriving: Tensor) -> tuple[Tensor, ...]:
        ctx.kinds = _kinds(arriving)
        ctx.set_materialize_grads(False)
        exchange.wait()
        return tuple(tensor.view_as(tensor) for tensor in arriving)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *(_filled(gradient, kind) for gradient, kind in zip(gradients, ctx.kinds, strict=True))


class _Return(torch.autograd.Function):
    """Sends home what contextual queries found elsewhere: outputs and, with softmax, logarithms of sums."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, token: Tensor, *found: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.kinds = exchange, _kinds(found)
        ctx.set_materialize_grads(False)
        count = exchange.pieces.partials.num_arriving
        received = tuple(tensor.new_empty(count, *tensor.shape[1:]) for tensor in found)
        exchange.swap([tensor.contiguous() for tensor in found], received, home=False)
        ctx.received = _kinds(received)
        return token.view_as(token), *received

    @staticmethod
    def backward(ctx: Any, token: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        sent = [_filled(gradient, kind) for gradient, kind in zip(gradients, ctx.received, strict=True)]
        home = tuple(_filled(None, kind) for kind in ctx.kinds)
        ctx.exchange.swap(sent, home, home=True)
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


def start(exchange: Exchange, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """A token, then keys, values and contextual queries that are arriving."""
    result: tuple[Tensor, ...] = _Start.apply(exchange, query, key, value)  # type: ignore[no-untyped-call]
    return result


def wait(exchange: Exchange, *arriving: Tensor) -> tuple[Tensor, ...]:
    """The same, when they have arrived."""
    result: tuple[Tensor, ...] = _Wait.apply(exchange, *arriving)  # type: ignore[no-untyped-call]
    return result


def give_back(exchange: Exchange, token: Tensor, *found: Tensor) -> tuple[Tensor, ...]:
    """A token, then what contextual queries of this rank found elsewhere."""
    result: tuple[Tensor, ...] = _Return.apply(exchange, token, *found)  # type: ignore[no-untyped-call]
    return result


def anchor(rows: Tensor, token: Tensor) -> Tensor:
    """The rows, with the exchange as a part of their graph."""
    result: Tensor = _Anchor.apply(rows, token)  # type: ignore[no-untyped-call]
    return result
