"""Shufflers of recsys-examples by name, with Evenkeel behind them."""

from __future__ import annotations

from typing import Any

from trainer_client.balancing.balancer import Balancer
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.recsys_examples.shuffler import EvenkeelShuffling

PREFIX = "evenkeel_"
_UNBALANCED = "identity"


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
