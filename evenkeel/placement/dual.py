"""The Lagrangian dual over two budgets: the best lower bound that prices on HBM and host memory give."""

from __future__ import annotations

from collections.abc import Callable
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
    """All points visited, best first known as `best`."""

    points: list[DualPoint] = field(default_factory=list)

    @property
    def best(self) -> DualPoint:
        """The point of the highest lower bound."""
        return max(self.points, key=lambda point: point.value)


def maximise_dual(
    evaluate: Callable[[FloatArray], DualPoint],
    scale: FloatArray,
    *,
    tolerance: float = 1e-7,
    iterations: int = 60,
    cutoff: float = np.inf,
    is_over: Callable[[], bool] = lambda: False,
) -> Dual:
    """Kelley's cutting planes on the concave, piecewise linear dual of two budgets.

    Args:
        evaluate: The dual at given prices.
        scale: Natural size of each price.
        tolerance: Relative distance to the model at which to stop.
        iterations: Evaluations at most.
        cutoff: Stop as soon as the bound is at least this.
        is_over: Asked before every evaluation but the first; once true, what was visited is returned.
    """
    dual = Dual()
    dual.points.append(evaluate(np.zeros(2)))
    if np.all(dual.points[0].excess <= 0) or dual.points[0].value >= cutoff:
        return dual
    model = Highs()
    model.setOptionValue("presolve", "off")
    infinity = highspy.kHighsInf
    model.addCol(-1.0, -infinity, infinity, 0, np.array([], dtype=np.int32), np.array([], dtype=np.float64))
    for _ in range(2):
        model.addCol(0.0, 0.0, _MAX_PRICE, 0, np.array([], dtype=np.int32), np.array([], dtype=np.float64))
    columns = np.arange(3, dtype=np.int32)
    while len(dual.points) < iterations and not is_over():
        last = dual.points[-1]
        # theta <= value + excess . (prices - here), with prices in units of their scale.
        slope = last.excess * scale
        row = np.array([1.0, -slope[0], -slope[1]])
        model.addRow(-infinity, last.value - float(last.excess @ last.prices), 3, columns, row)
        model.run()
        solution = model.getSolution().col_value
        upper = solution[0]
        best = dual.best.value
        if upper - best <= tolerance * max(abs(best), abs(upper), 1e-12) or best >= cutoff:
            break
        prices = np.maximum(0.0, np.array(solution[1:])) * scale
        dual.points.append(evaluate(prices))
    return dual
