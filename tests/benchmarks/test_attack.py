"""A short attack beside an honest job, and SIGTERM while watches are held open."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.attack import measure, measure_exit

pytestmark = pytest.mark.timeout(400)  # compiles its kernels first, if nothing has yet
QUIET = Console(file=io.StringIO())


def test_an_honest_job_misses_no_round_beside_hostile_ones() -> None:
    names = ("distinct_rounds", "undecided_rounds")
    for result in measure(names, secure=False, seconds=1.0, calm=0.3, pace=10.0, out=QUIET):
        assert result.missed == 0, result
        assert result.rounds > 0, result


def test_it_stops_within_its_grace_while_watches_take_nothing() -> None:
    (stopped,) = measure_exit(["closed_watches"], out=QUIET)
    assert stopped["exit_code"] == 0
