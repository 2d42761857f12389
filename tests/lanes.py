"""Which tests may run beside which: two lanes, each of them one test after another.

Many tests start services and ranks, mostly wait for them, and have bounds on how long something takes; no two of them
run at the same time. Others only compute, in one thread and without a clock: they take the time in which those wait.
"""

from __future__ import annotations

FUNCTIONS = (
    "tests/benchmarks/test_kernels_fuzz.py",
    "tests/benchmarks/test_make_bench.py",
    "tests/evenkeel/partitioning/",
    "tests/evenkeel/placement/",
    "tests/docs/test_docstrings.py",
    "tests/docs/test_prose.py",
    "tests/model/",
    "tests/services/balancer/test_session_model.py",
    "tests/services/planner/",
    "tests/services/security/test_tokens.py",
    "tests/benchmarks/test_optimizers.py",
    "tests/test_wheel.py",
    "tests/trainer_client/balancing/batches/",
    "tests/trainer_client/embedding/checkpoint/test_convert.py",
    "tests/trainer_client/embedding/checkpoint/test_optimizers.py",
    "tests/trainer_client/balancing/costs/",
    "tests/trainer_client/balancing/sampling/test_order.py",
    "tests/trainer_client/balancing/sampling/test_counted.py",
    "tests/examples/datasets/",
    "tests/examples/test_train_routed.py",
    "tests/trainer_client/embedding/tables/test_dynamicemb.py",
    "tests/trainer_client/observing/fitting/test_solve.py",
    "tests/trainer_client/observing/measurement/test_balance_log.py",
    "tests/trainer_client/observing/measurement/test_tracker.py",
    "tests/trainer_client/observing/metrics/",
    "tests/trainer_client/planning/test_histograms.py",
    "tests/trainer_client/planning/test_proposer.py",
    "tests/trainer_client/embedding/routing/",
    "tests/trainer_client/balancing/test_configuration.py",
)

WAIT_MOST = ("tests/services/", "tests/faults/")


def lane(test: str) -> str:
    """The lane of a test, given its node id."""
    return "functions" if test.startswith(FUNCTIONS) else "processes"


def waits_little(test: str) -> bool:
    """Whether a test comes after those in whose waits the other lane computes."""
    return not test.startswith(WAIT_MOST)
