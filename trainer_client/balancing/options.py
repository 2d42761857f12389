"""What a user may choose about balancing; rank 0's choice holds for all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from evenkeel.partitioning.problem import MEMORY_CAPS, MOVE_PRICE, SPEEDS, TOLERANCE, Range
from evenkeel.partitioning.registry import STRATEGIES
from evenkeel.partitioning.rounds import RoundOptions
from evenkeel.partitioning.splits import SplitOptions
from trainer_client.checks import is_number, is_whole

if TYPE_CHECKING:  # grpcio is needed only where a service is
    from evenkeel.credentials import Credentials
    from trainer_client.balancing.groups import Ranks

Counts = Literal["equal", "free"]
MAX_WINDOW = 64  # batches; the balancer's own limit


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceOptions:
    """Options of a stream of batches.

    Attributes:
        strategy: Partitioning strategy by name (docs/train/loop.md).
        counts: `equal`: every rank trains floor or ceil of the mean number of samples; `free`: any number.
        min_samples: Samples that each rank trains at least, while the global batch has as many for all ranks: 1 keeps
            ranks from empty batches, which some models cannot compute. It holds in every mode, also where nothing is
            balanced; memory caps come first. The loader's `drop_last` drops global batches that have fewer. 0: a rank
            may get an empty batch.
        tolerance: Share of the lower bound, 0 to 1, by which a load may exceed it when a search stops.
        move_price: Time that moving all samples of a batch would take, as a share of a step with even loads, 0 to 1000:
            the bytes of a rank's batch, over the rate at which ranks exchange (nodes, if there are several), over the
            seconds of a step. Samples move only where the load that they take off is worth more than their move.
            0: moves are free.
        timeout: How long a call of the service may take. It only frees what a call holds: a plan that is not there when
            the lead's loop comes for its batch is made by the lead, so that no step waits for a service.
        depth: Rounds in flight, from the submission of the costs to the training step: batches, or windows.
        window: Batches that are balanced together. With more than 1, samples may be trained in another batch of their
            window than the one they were loaded in, so that those too heavy for their batch meet
            (docs/train/giants.md). Only `BalancedLoader` and `BatchStream.submit_window` fill windows. The host
            holds `depth` windows.
        speeds: Relative speed of each rank, 1e-6 to 1e6, length world size; `None`: all equal.
        memory_caps: What each rank can hold, in the unit of the loader's `memory`, length world size, infinity for a
            rank without a cap; `None`: no caps.
        learn_speeds: Whether ranks that compute more slowly than the others get less to do, as far as the loop measures
            its steps (`StepTimer(device, loader=loader)`, or `BalancedLoader.took`). What is learned multiplies
            `speeds`. Without measured times nothing is learned.
        split: When a sample that outweighs a rank's share is split over several, or fits none: the model's attention
            must be able to work over pieces then (docs/train/giants.md). `None`: samples stay whole.
        require_service: Whether a job that does not reach the service at the start ends there: at once when the cause
            does not pass by itself (authentication, certificates, versions), else after 30 s, or a third of
            `group_timeout` where that is less. Later outages are bridged as ever.
        group_timeout: How long a collective of Evenkeel's own process groups may take before the job fails; at least
            twice `timeout`.
        of_rounds: What a round's plan depends on; follows from the others, as does what comes next.
        patience: Seconds that a round may take at most: a call of the service, its two collectives, and a plan.
    """

    strategy: str = "minimal_move"
    counts: Counts = "equal"
    min_samples: int = 0
    tolerance: float = 1e-3
    move_price: float = 0.01
    timeout: timedelta = timedelta(seconds=2)
    depth: int = 2
    window: int = 1
    speeds: Sequence[float] | None = None
    memory_caps: Sequence[float] | None = None
    learn_speeds: bool = True
    split: SplitOptions | None = None
    require_service: bool = False
    group_timeout: timedelta = timedelta(minutes=10)
    of_rounds: RoundOptions = field(init=False, repr=False, compare=False)
    patience: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        STRATEGIES.check(self.strategy)
        for name, fits, remedy in (
            ("counts", self.counts in get_args(Counts), f"one of {', '.join(get_args(Counts))}"),
            ("min_samples", is_whole(self.min_samples) and 0 <= self.min_samples < 2**31, "a number of samples, or 0"),
            ("tolerance", _is_in(TOLERANCE, self.tolerance), f"a share of the lower bound, {TOLERANCE}"),
            ("move_price", _is_in(MOVE_PRICE, self.move_price), f"a share of a step's time, {MOVE_PRICE}"),
            ("timeout", _is_positive(self.timeout), "a positive timedelta"),
            ("depth", is_whole(self.depth) and self.depth >= 1, "a whole number of at least 1 batch in flight"),
            ("window", is_whole(self.window) and 1 <= self.window <= MAX_WINDOW, f"1 to {MAX_WINDOW} batches"),
            ("learn_speeds", isinstance(self.learn_speeds, bool), "True or False"),
            ("split", self.split is None or isinstance(self.split, SplitOptions), "SplitOptions(), or None"),
            ("require_service", isinstance(self.require_service, bool), "True or False"),
            ("group_timeout", _is_positive(self.group_timeout), "a positive timedelta"),
        ):
            if not fits:
                raise ValueError(f"{name} is {getattr(self, name)!r}; use {remedy}")
        for name, allowed in (("speeds", SPEEDS), ("memory_caps", MEMORY_CAPS)):
            values = getattr(self, name)
            if values is None:
                continue
            if not isinstance(values, Sequence | np.ndarray) or not all(map(_is_real, values)):
                raise ValueError(f"{name} is {values!r}; give a list of one number for each rank")
            for rank, value in enumerate(values):
                if not allowed.holds(value):
                    raise ValueError(f"{name}[{rank}] is {value}; use numbers from {allowed}")
        of_rounds = RoundOptions(
            strategy=self.strategy, counts=self.counts, tolerance=self.tolerance, move_price=self.move_price,
            speeds=() if self.speeds is None else tuple(self.speeds), min_samples=self.min_samples, split=self.split,
            memory_caps=() if self.memory_caps is None else tuple(self.memory_caps),
        )  # fmt: skip
        object.__setattr__(self, "of_rounds", of_rounds)  # made once, read in every round
        object.__setattr__(self, "patience", (self.timeout + 3 * self.collective_timeout).total_seconds())

    @property
    def collective_timeout(self) -> timedelta:
        """How long a collective may take, from its start on this rank."""
        return max(self.group_timeout, 2 * self.timeout)

    def check_world(self, world_size: int) -> None:
        """Checks what depends on the number of ranks.

        Raises:
            ValueError: If `speeds` or `memory_caps` has another length than the world size.
        """
        for name in ("speeds", "memory_caps"):
            values = getattr(self, name)
            if values is not None and len(values) != world_size:
                raise ValueError(f"{name} has {len(values)} entries for {world_size} ranks; give one for each rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """What a stream is made from. Rank 0's address and options hold for all ranks."""

    job: str = "job"
    group: str = "default"  # the name of the ranks that balance together
    loader: str = "train"  # the stream's name
    address: str | None = None  # of the balancer; None: embedded
    balance: bool = True  # False: every sample stays at home
    options: BalanceOptions
    process_group: Ranks | None = None  # the ranks that balance together; None: the default group
    peers: Ranks | None = None  # that train the same batches; see `read_membership`
    credentials: Credentials | None = None  # what calls of the balancer show


def _is_in(allowed: Range, value: Any) -> bool:
    return is_number(value) and allowed.holds(value)


def _is_positive(value: object) -> bool:
    return isinstance(value, timedelta) and value > timedelta(0)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
