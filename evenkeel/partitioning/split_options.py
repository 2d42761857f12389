"""When samples are split over ranks, and what the exchange of their keys and values takes."""

from __future__ import annotations

from dataclasses import dataclass

from evenkeel.partitioning.ranges import SPLIT_ABOVE, SPLIT_PRICE

STEP_SECONDS = 0.0065
"""What a step of 8 layers took more on two H200 because a sample was split in it, beside the exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOptions:
    """When samples are split over ranks.

    A sample is split only where no assignment of whole samples comes near an even division of the batch, or where it
    fits no rank's memory cap; and only where that takes less time, the exchange of keys and values included.

    Attributes:
        above: By how much of an even division the lower bound of whole samples must exceed it, 0 to 1000.
        within: What it takes to send the keys and values of one position to one rank of the same node, and to get their
            gradients back, in units of cost: their bytes, over the rate of the exchange, times the cost that a rank
            computes in a second.
        between: The same to another node, where they go once: to each of its ranks that see them an equal share, which
            it passes on to the others at the price inside a node.
        fixed: What a step takes more because samples are split in it, beside all that, in units of cost: launches,
            smaller kernels, ranks that wait for each other in each layer.
    """

    above: float = 0.05
    within: float = 0.0
    between: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed, unit in (
            ("above", SPLIT_ABOVE, "a share of an even division"),
            ("within", SPLIT_PRICE, "units of cost"),
            ("between", SPLIT_PRICE, "units of cost"),
            ("fixed", SPLIT_PRICE, "units of cost"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not allowed.holds(value):
                raise ValueError(f"split.{name} is {value!r}; use {unit}, {allowed}")

    @classmethod
    def at_rates(
        cls,
        *,
        position_bytes: float,
        within: float,
        between: float,
        cost_per_second: float,
        step_seconds: float = STEP_SECONDS,
        above: float = 0.05,
    ) -> SplitOptions:
        """Prices of the exchange from what it sends and how fast.

        Args:
            position_bytes: Bytes of a position's keys and values in all layers, and of their gradients: with L layers
                and H heads of width D, 4 * L * H * D numbers.
            within: Bytes per second of a rank, to ranks of the same node.
            between: The same to other nodes, by its own network adapter.
            cost_per_second: Units of cost that a rank computes in a second; with costs in FLOPs, FLOP per second.
            step_seconds: What a step takes more because samples are split in it, beside the exchange.
            above: See the attributes.

        Raises:
            ValueError: If a number is out of range.
        """
        for name, value in (("within", within), ("between", between)):
            if not value > 0:
                raise ValueError(f"{name} is {value!r}; use bytes per second, above 0")
        if not step_seconds >= 0:
            raise ValueError(f"step_seconds is {step_seconds!r}; use seconds, 0 or more")
        worth = float(position_bytes) * float(cost_per_second)
        fixed = float(step_seconds) * float(cost_per_second)
        return cls(above=above, within=worth / within, between=worth / between, fixed=fixed)
