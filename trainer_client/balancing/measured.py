"""What this rank measures of its batches, until its next contribution takes it along."""

from __future__ import annotations

import math
import threading
from collections import deque

import numpy as np
from numpy.typing import NDArray

from trainer_client.balancing.contribution import NO_MEASURE, Measure
from trainer_client.balancing.costs.learned import LearnedCost

_MOST_ROWS = 1000
_FIRST_ROWS = 10  # batches with times until the lead first hears of them, and then as many as the fit's options say


class Measured:
    """The batches of this rank whose time is known, since the lead last heard of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.batches, self._sums = 0, Measure()
        self._rows: deque[NDArray[np.float64]] = deque(maxlen=_MOST_ROWS)
        self._enough = _FIRST_ROWS
        self.learns: LearnedCost | None = None  # the cost that is learned from them; None: it is given

    def add(
        self,
        load: float,
        seconds: float,
        late: float = 0.0,
        loading: float = 0.0,
        loop: float = 0.0,
        *,
        terms: NDArray[np.float64] | None = None,
    ) -> None:
        """Notes a batch, as `BalancedLoader.took`; nothing of one without load, or with a time that is none."""
        values = (load, seconds, late, loading, loop)
        try:
            if not (min(values[:2]) > 0 and min(values[2:]) >= 0 and all(map(math.isfinite, values))):
                return
        except (TypeError, ValueError, RuntimeError):  # no numbers, or tensors of several
            return
        new = Measure(*map(float, values))
        with self._lock:
            self.batches += 1
            self._sums = Measure(*(before + more for before, more in zip(self._sums, new, strict=True)))
            if terms is not None:
                self._rows.append(np.append(terms, 1e3 * new.seconds))

    def take(self) -> Measure:
        """The mean of the batches noted since the last call; zeros if there were none."""
        if not self.batches:
            return NO_MEASURE
        with self._lock:
            number, sums = self.batches, self._sums
            self.batches, self._sums = 0, Measure()
        return Measure(*(value / number for value in sums))

    def take_rows(self) -> NDArray[np.float64] | None:
        """(batches, terms + 1) summed terms and milliseconds of enough batches; None while there are fewer."""
        if self.learns is None or len(self._rows) < self._enough:
            return None
        with self._lock:
            rows, self._rows = np.stack(list(self._rows)), deque(maxlen=_MOST_ROWS)
        self._enough = self.learns.options.every
        return rows
