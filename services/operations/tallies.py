"""Histograms that one thread counts into, many times a second: without locks, and written out only for a scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally:
    """What was observed under one set of labels."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Tallies(Collector):
    """A histogram as Prometheus has it: a tally for each set of labels, and without labels one from the start."""

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], *, buckets: tuple[float, ...], registry: CollectorRegistry
    ) -> None:
        """Registers it.

        Args:
            name: Of the metric.
            text: What it says.
            labels: Their names.
            buckets: Upper bounds, ascending; infinity follows.
            registry: Where it lives.
        """
        self._name, self._text, self._labelnames, self._bounds = name, text, labels, buckets
        self._tallies: dict[tuple[str, ...], Tally] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Tally:
        """The tally of these values of the labels."""
        return self._tallies.setdefault(values, Tally(self._bounds))

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """What it is, for who registers it."""
        yield HistogramMetricFamily(self._name, self._text, labels=self._labelnames)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What a scrape sees."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labelnames)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, tally in list(self._tallies.items()):
            counts = accumulate(list(tally.counts))
            family.add_metric(values, list(zip(names, counts, strict=True)), tally.total)
        yield family
