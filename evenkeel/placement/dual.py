"""The Lagrangian dual over two budgets: the best lower bound that prices on HBM and host memory give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np
import numpy.typing as npt

from evenkeel.placement.highs import Highs

FloatArray = npt.NDArray[np.float64]

# A price is in units of (all of the cost) per (all of a budget): far above any that an optimum needs.
_MAX_PRICE = 1e5


@dataclass(slots=True)
class DualPoint:
    """The dual at one pair of prices.

    Attributes:
        prices: Price of each budget.
        value: A lower bound on every feasible cost.
        excess: Use less budget of the minimiser at these prices: a supergradient.
    """

    prices: FloatArray
    value: float
    excess: FloatArray


@dataclass(slots=True)
class Dual:
    """All points visited, best first known as `best`.

    Attributes:
        points: Those.
        weights: Of each point in the mixture of minimisers that the optimum is, as far as it is known.
    """

    points: list[DualPoint] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    @property
    def best(self) -> DualPoint:
        """The point of the highest lower bound."""
        return max(self.points, key=lambda point: point.value)


def maximise_dual(
    evaluate: Callable[[FloatArray], DualPoint],
    scale: FloatArray,
    *,
    starts: Sequence[FloatArray] = (),
    tolerance: float = 1e-7,
    iterations: int = 60,
    cutoff: float = np.inf,
    is_over: Callable[[], bool] = lambda: False,
) -> Dual:
    """Kelley's cutting planes on the concave, piecewise linear dual of two budgets.

    Args:
        evaluate: The dual at given prices.
        scale: Natural size of each price.
        starts: Prices to begin with; none, where there are none.
        tolerance: Relative distance to the model at which to stop.
        iterations: Evaluations at most.
        cutoff: Stop as soon as the bound is at least this.
        is_over: Asked before every evaluation but the first; once true, what was visited is returned.
    """
    dual = Dual()
    for start in starts or (np.zeros(2),):
        if any(np.array_equal(start, point.prices) for point in dual.points):
            continue
        dual.points.append(evaluate(start))
        dual.weights.append(0.0)
        last = dual.points[-1]
        if last.value >= cutoff or (np.all(last.excess <= 0) and not start.any()):
            return dual
    model = Highs()
    model.setOptionValue("presolve", "off")
    infinity = highspy.kHighsInf
    model.addCol(-1.0, -infinity, infinity, 0, np.array([], dtype=np.int32), np.array([], dtype=np.float64))
    for _ in range(2):
        model.addCol(0.0, 0.0, _MAX_PRICE, 0, np.array([], dtype=np.int32), np.array([], dtype=np.float64))
    columns = np.arange(3, dtype=np.int32)
    added = 0
    while len(dual.points) < iterations and not is_over():
        for point in dual.points[added:]:
            # theta <= value + excess . (prices - here), with prices in units of their scale.
            slope = point.excess * scale
            row = np.array([1.0, -slope[0], -slope[1]])
            model.addRow(-infinity, point.value - float(point.excess @ point.prices), 3, columns, row)
        added = len(dual.points)
        model.run()
        solution = model.getSolution()
        upper = solution.col_value[0]
        dual.weights = np.abs(solution.row_dual).tolist()
        best = dual.best.value
        if upper - best <= tolerance * max(abs(best), abs(upper), 1e-12) or best >= cutoff:
            break
        prices = np.maximum(0.0, np.array(solution.col_value[1:])) * scale
        if starts and any(np.array_equal(prices, point.prices) for point in dual.points):
            break
        dual.points.append(evaluate(prices))
        dual.weights.append(0.0)
    return dual
