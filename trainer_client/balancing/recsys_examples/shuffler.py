"""Shufflers of recsys-examples with Evenkeel behind them: their two phases, and their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from trainer_client.balancing.balancer import Balancer
from trainer_client.balancing.batches import Arriving, BatchError, BatchSpec
from trainer_client.balancing.batches.fields import is_keyed_jagged_tensor
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.report import RoundReport
from trainer_client.balancing.stream import Ticket

PREFIX = "evenkeel_"
_UNBALANCED = "identity"
INDICES = "global_indices"  # beside the fields of a batch, where a caller asks for them


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A batch between its two phases; opaque to pipelines."""

    ticket: Ticket
    balancer: Balancer
    spec: BatchSpec
    stream: str


class EvenkeelShuffling:
    """What comes before a shuffler class of recsys-examples to balance through Evenkeel; see `evenkeel_shuffler`.

    Samples that only fill a batch up (from `actual_batch_size` to `batch_size`) stay where they are: the real ones are
    spread, and every rank's batch is filled up to its size again, jagged fields by samples of length 0. As theirs do,
    fields of plain tensors come back flat, one row for each real sample.

    Attributes:
        balancer: What balances; None: one from the environment for each process group.
        options: How, where there is no `balancer`.
        name: Of the stream of batches; two shufflers that are in use at the same time need different ones.
        report: What balancing did for the batch that phase 2 returned last; None before the first.
    """

    balancer: Balancer | None = None
    options: BalanceOptions | None = None
    name: str = "train"
    report: RoundReport | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._balancers: dict[Any, Balancer] = {}
        self._specs: dict[tuple[tuple[str, int], ...], BatchSpec] = {}

    def get_workloads(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """(batch_size,) predicted work of each sample: the shuffler's own."""
        return super().get_workloads(batch, *args, **kwargs)  # type: ignore[misc]

    def start_shuffle_async(self, batch: Any, pg_group: Any = None, *args: Any, **kwargs: Any) -> Handle:
        """Phase 1: announces a batch. Waits for its lengths and workloads to be on the host, and for no other rank.

        Args:
            batch: The loader's, on its device.
            pg_group: The ranks that balance together; default: all.
            args: What else `get_workloads` takes.
            kwargs: The same, by name.

        Returns:
            For `finish_shuffle`. Several batches may be in flight; phase 2 takes them in the order of phase 1.
        """
        return self._start(batch, pg_group, self.get_workloads(batch, *args, **kwargs), indices=False)

    def finish_shuffle(
        self,
        batch: Any,
        handle: Handle,
        pg_group: Any = None,  # noqa: ARG002  # as phase 1 was told
        use_all2all: bool = True,  # noqa: ARG002  # there is no other way
    ) -> Any:
        """Phase 2: agrees with all ranks, and moves the samples, on the current stream.

        Args:
            batch: As given to phase 1.
            handle: What phase 1 returned.
            pg_group: As given to phase 1.
            use_all2all: Evenkeel always moves by All2All.

        Raises:
            RuntimeError: If another rank has left its loop, after which no batches are exchanged any more.
        """
        return self._finish(batch, handle)[0]

    def shuffle(
        self,
        batch: Any,
        pg_group: Any = None,
        return_indices: bool = False,
        return_workloads: bool = False,
        use_all2all: bool = True,  # noqa: ARG002
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Both phases at once.

        Returns:
            The batch; with the (real samples,) positions in the global batch, and with the workloads of the batch that
            was given, where they are asked for.
        """
        workloads = self.get_workloads(batch, *args, **kwargs)
        shuffled, indices = self._finish(batch, self._start(batch, pg_group, workloads, indices=return_indices))
        extra = [*([indices] if return_indices else []), *([workloads] if return_workloads else [])]
        return (shuffled, *extra) if extra else shuffled

    def close(self) -> None:
        """Ends what balances for this shuffler, unless it was given; at exit that happens by itself."""
        for balancer in self._balancers.values():
            balancer.close()
        self._balancers.clear()

    def _start(self, batch: Any, group: Any, workloads: torch.Tensor, *, indices: bool) -> Handle:
        size = int(batch.batch_size)
        real = size if batch.actual_batch_size is None else int(batch.actual_batch_size)
        if tuple(workloads.shape) != (size,):
            raise BatchError(f"get_workloads returned shape {tuple(workloads.shape)}; give one for each of {size} rows")
        parts = {field.name: getattr(batch, field.name) for field in fields(batch)}
        parts = {name: value for name, value in parts.items() if _travels(value)}
        if indices:
            first = dist.get_rank(group) * size
            parts[INDICES] = torch.arange(first, first + size, device=workloads.device)
        rows = tuple((name, _rows(name, value, size)) for name, value in parts.items() if torch.is_tensor(value))
        cut = {name: _cut(value, dict(rows), name, size, real) for name, value in parts.items()}
        spec = self._spec(tuple((name, each) for name, each in rows if each > 1))
        flat, (costs,) = Arriving(cut, spec, [workloads[:real]]).get()
        balancer, stream = self._balancer_of(group), f"{self.name}.indices" if indices else self.name
        ticket = balancer.submit(flat, cost=lambda _: costs, spec=spec, loader=stream)
        return Handle(ticket, balancer, spec, stream)

    def _finish(self, batch: Any, handle: Handle) -> tuple[Any, torch.Tensor | None]:
        moved = handle.balancer.redistribute(None, handle.ticket, spec=handle.spec, loader=handle.stream)
        if moved is None:
            raise RuntimeError(f"the loops of all ranks over {handle.stream!r} have ended, as a rank has left its own")
        self.report = handle.ticket.report  # which redistributing has waited for
        indices = moved.pop(INDICES, None)
        jagged = next(value for value in moved.values() if is_keyed_jagged_tensor(value))
        real = jagged.lengths().numel() // len(jagged.keys())
        size = max(int(batch.batch_size), real)
        filled = {
            name: value.reshape(-1) if torch.is_tensor(value) else _fill(value, size) for name, value in moved.items()
        }
        return replace(batch, **filled, batch_size=size, actual_batch_size=real), indices

    def _balancer_of(self, group: Any) -> Balancer:
        if self.balancer is not None:
            return self.balancer
        group = None if group is dist.group.WORLD else group
        if group not in self._balancers:
            self._balancers[group] = Balancer.from_env(options=self.options, process_group=group)
        return self._balancers[group]

    def _spec(self, rows: tuple[tuple[str, int], ...]) -> BatchSpec:
        """One object for batches of a kind, which are recognised by it."""
        return self._specs.setdefault(rows, BatchSpec(rows_per_sample=dict(rows)))


def _travels(value: Any) -> bool:
    return torch.is_tensor(value) or is_keyed_jagged_tensor(value)


def _rows(name: str, value: torch.Tensor, size: int) -> int:
    if value.dim() == 0 or value.shape[0] == 0 or value.shape[0] % size:
        raise BatchError(f"{name!r} has shape {tuple(value.shape)}, no whole number of rows for each of {size} samples")
    return value.shape[0] // size


def _cut(value: Any, rows: Mapping[str, int], name: str, size: int, real: int) -> Any:
    """Without what fills a batch up: of a jagged field those are lengths of 0, and no values."""
    if real == size:
        return value
    if torch.is_tensor(value):
        return value[: real * rows[name]]
    lengths = value.lengths().view(len(value.keys()), size)[:, :real]
    return _jagged(value, lengths, real)


def _fill(value: Any, size: int) -> Any:
    """A jagged field with samples of length 0 up to `size`."""
    lengths = value.lengths().view(len(value.keys()), -1)
    missing = size - lengths.shape[1]
    if not missing:
        return value
    return _jagged(value, torch.cat([lengths, lengths.new_zeros(lengths.shape[0], missing)], dim=1), size)


def _jagged(value: Any, lengths: torch.Tensor, size: int) -> Any:
    return type(value)(
        value.keys(),
        value.values(),
        weights=value.weights_or_none(),
        lengths=lengths.reshape(-1),
        stride=size,
        length_per_key=value.length_per_key_or_none(),
    )


def evenkeel_shuffler(
    base: type[Any], *, balancer: Balancer | None = None, options: BalanceOptions | None = None
) -> type[Any]:
    """A shuffler class with the constructor and the workloads of `base`, and Evenkeel's balancing.

    Args:
        base: A class derived from `BaseTaskBalancedBatchShuffler` that says the workloads, such as
            `HASTUBalancedBatchShuffler`.
        balancer: Used for all batches; default: what the environment says (`Balancer.from_env`), over the group that
            the pipeline gives.
        options: How to balance, where there is no `balancer`. With `counts="free"` a batch may get larger than the
            loader's.

    Raises:
        ValueError: If options are given for a balancer that has its own.
    """
    if balancer is not None and options is not None:
        raise ValueError("options are given beside a balancer, which has its own; give one of them")
    return type(f"Evenkeel{base.__name__}", (EvenkeelShuffling, base), {"balancer": balancer, "options": options})


def register_shufflers(
    *, replace: bool = False, balancer: Balancer | None = None, options: BalanceOptions | None = None
) -> tuple[str, ...]:
    """Registers Evenkeel's twin of each shuffler that is registered: `evenkeel_hstu` beside `hstu`.

    Call it after what registers theirs has been imported (`utils` in their HSTU example) and before the script creates
    its shuffler.

    Args:
        replace: Also puts the twin in the shuffler's own place, so that nothing else in a script changes.
        balancer: See `evenkeel_shuffler`.
        options: See `evenkeel_shuffler`.

    Returns:
        The names that stand for Evenkeel now.

    Raises:
        RuntimeError: If no shuffler is registered yet.
        ModuleNotFoundError: If `commons` of recsys-examples is not on the path.
    """
    from commons.distributed.batch_shuffler_factory import BatchShufflerFactory

    registered: dict[str, type[Any]] = BatchShufflerFactory.list_available()
    theirs = {
        name: kind
        for name, kind in registered.items()
        if name != _UNBALANCED and not issubclass(kind, EvenkeelShuffling)
    }
    ours = [name for name, kind in registered.items() if issubclass(kind, EvenkeelShuffling)]
    if not theirs and not ours:
        raise RuntimeError(
            "no batch shuffler is registered; first import what registers it, such as utils.hstu_batch_balancer"
        )
    for name, kind in theirs.items():
        twin = evenkeel_shuffler(kind, balancer=balancer, options=options)
        places = [name] if replace else []
        if not name.startswith(PREFIX):
            places.append(PREFIX + name)
        for place in places:
            if place in registered:
                BatchShufflerFactory.unregister(place)
            BatchShufflerFactory.register(place, twin)
            ours.append(place)
    return tuple(sorted(set(ours)))
