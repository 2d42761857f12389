"""A short run of the search for optimizers that do not go on as they would have."""

from __future__ import annotations

from collections import Counter

from benchmarks.optimizers import candidates, is_fine, search


def test_every_optimizer_of_pytorch_goes_on_alike_or_is_refused_by_name() -> None:
    cases = list(search("cpu", quick=True, tables=("roundrobin",)))
    assert {case.optimizer for case in cases} == candidates().keys()
    assert [case for case in cases if not is_fine(case)] == []
    refused = {case.optimizer for case in cases if case.outcome.startswith("refused")}
    assert refused == {"Adafactor", "LBFGS"}
    assert Counter(case.outcome for case in cases)["same bits"] > 60
