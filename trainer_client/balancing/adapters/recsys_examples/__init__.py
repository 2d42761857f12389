"""Evenkeel behind the batch shufflers of NVIDIA's recsys-examples: its training scripts balance through Evenkeel.

Nothing of theirs is imported before `register_shufflers` is called.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from trainer_client.balancing.balancer import Balancer
from trainer_client.balancing.batches import Arriving, BatchError, BatchSpec
from trainer_client.balancing.batches.containers import is_keyed
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.report import RoundReport
from trainer_client.balancing.rounds import Ticket

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

    The real samples of a batch (below `actual_batch_size`) are spread, and every rank's batch is filled up to its size
    again, jagged fields by samples of length 0. As theirs do, plain tensors come back flat, one row for each real one.

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
        workloads = self.get_workloads(batch, *args, **kwargs)  # type: ignore[attr-defined]  # theirs
        return self._start(batch, pg_group, workloads, indices=False)

    def finish_shuffle(self, batch: Any, handle: Handle, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Phase 2: agrees with all ranks, and moves the samples, on the current stream.

        Args:
            batch: As given to phase 1.
            handle: What phase 1 returned.
            args: Their group and way to move; here it is phase 1's group, and All2All.
            kwargs: The same, by name.

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
        use_all2all: bool = True,  # noqa: ARG002  # there is no other way
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Both phases at once.

        Returns:
            The batch; with the (real samples,) positions in the global batch, and with the workloads of the batch that
            was given, where they are asked for.
        """
        workloads = self.get_workloads(batch, *args, **kwargs)  # type: ignore[attr-defined]  # theirs
        shuffled, indices = self._finish(batch, self._start(batch, pg_group, workloads, indices=return_indices))
        extra = ([indices] if return_indices else []) + ([workloads] if return_workloads else [])
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
        if indices:
            first = dist.get_rank(group) * size
            parts[INDICES] = torch.arange(first, first + size, device=workloads.device)
        rows = {name: _rows(name, value, size) for name, value in parts.items() if torch.is_tensor(value)}
        cut = {name: parts[name][: real * each] for name, each in rows.items()}
        cut |= {name: _resized(value, real) for name, value in parts.items() if is_keyed(value)}
        several = tuple((name, each) for name, each in rows.items() if each > 1)
        # one object for batches of a kind, which are recognised by it
        spec = self._specs.setdefault(several, BatchSpec(rows_per_sample=dict(several)))
        flat, (costs,) = Arriving(cut, spec, [workloads[:real]]).get()
        balancer, stream = self._balancer_of(group), f"{self.name}.indices" if indices else self.name
        ticket = balancer.submit(flat, cost=lambda _: costs, spec=spec, loader=stream)
        return Handle(ticket, balancer, spec, stream)

    def _finish(self, batch: Any, handle: Handle) -> tuple[Any, torch.Tensor | None]:
        moved = handle.balancer.redistribute(None, handle.ticket, spec=handle.spec, loader=handle.stream)
        if moved is None:
            raise RuntimeError(f"the loops of all ranks over {handle.stream!r} have ended, as a rank has left its own")
        self.report = handle.ticket.report
        indices = moved.pop(INDICES, None)
        jagged = next(value for value in moved.values() if is_keyed(value))
        real = jagged.lengths().numel() // len(jagged.keys())
        size = max(int(batch.batch_size), real)
        for name, value in moved.items():
            moved[name] = value.reshape(-1) if torch.is_tensor(value) else _resized(value, size)
        return replace(batch, **moved, batch_size=size, actual_batch_size=real), indices

    def _balancer_of(self, group: Any) -> Balancer:
        if self.balancer is not None:
            return self.balancer
        group = None if group is dist.group.WORLD else group
        if group not in self._balancers:
            self._balancers[group] = Balancer.from_env(options=self.options, process_group=group)
        return self._balancers[group]


def _rows(name: str, value: torch.Tensor, size: int) -> int:
    if value.dim() == 0 or value.shape[0] == 0 or value.shape[0] % size:
        raise BatchError(f"{name!r} has shape {tuple(value.shape)}, no whole number of rows for each of {size} samples")
    return value.shape[0] // size


def _resized(value: Any, size: int) -> Any:
    """A jagged field with so many samples: without those that fill it up, or with more of length 0."""
    lengths = value.lengths().view(len(value.keys()), -1)
    missing = size - lengths.shape[1]
    if not missing:
        return value
    resized = lengths[:, :size] if missing < 0 else torch.nn.functional.pad(lengths, (0, missing))
    return type(value)(
        value.keys(), value.values(), weights=value.weights_or_none(), lengths=resized.reshape(-1), stride=size,
        length_per_key=value.length_per_key_or_none(),
    )  # fmt: skip


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
    """Registers Evenkeel's version of each shuffler that is registered: `evenkeel_hstu` beside `hstu`.

    Call it after what registers theirs has been imported (`utils` in their HSTU example) and before the script creates
    its shuffler.

    Args:
        replace: Also registers it under the shuffler's own name, so that nothing else in a script changes.
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
    ours = {name for name, kind in registered.items() if issubclass(kind, EvenkeelShuffling)}
    theirs = {name: kind for name, kind in registered.items() if name not in {*ours, "identity"}}
    if not theirs and not ours:
        raise RuntimeError(
            "no batch shuffler is registered; first import what registers it, such as utils.hstu_batch_balancer"
        )
    for name, kind in theirs.items():
        shuffler = evenkeel_shuffler(kind, balancer=balancer, options=options)
        for as_name in {name, f"evenkeel_{name}"} if replace else {f"evenkeel_{name}"}:
            if as_name in registered:
                BatchShufflerFactory.unregister(as_name)
            BatchShufflerFactory.register(as_name, shuffler)
            ours.add(as_name)
    return tuple(sorted(ours))
