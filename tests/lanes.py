"""Which tests may run beside which, in lanes: each of them is one test after another.

Many tests start services and ranks, mostly wait for them, and have bounds on how long something takes; no two of them
run at the same time, and what runs beside them gives way to them. Others only compute, in one thread and without a
clock. Of the rest, that start ranks but set them no tight bounds, each further lane takes the next file, and so do
these two when they have no other.
"""

from __future__ import annotations

import os

FUNCTIONS = (
    "tests/evenkeel/partitioning/",
    "tests/evenkeel/key_statistics/",
    "tests/evenkeel/placement/",
    "tests/evenkeel/test_plan_cache.py",
    "tests/model/",
    "tests/services/balancer/test_history.py",
    "tests/services/planner/",
    "tests/services/security/test_tokens.py",
    "tests/test_wheel.py",
    "tests/trainer_client/balancing/batches/",
    "tests/trainer_client/embedding/checkpoint/test_convert.py",
    "tests/trainer_client/embedding/checkpoint/test_optimizers.py",
    "tests/trainer_client/balancing/costs/",
    "tests/trainer_client/balancing/test_reading.py",
    "tests/trainer_client/balancing/sampling/test_samplers.py",
    "tests/examples/test_train_routed.py",
    "tests/examples/test_dynamicemb_tables.py",
    "tests/trainer_client/observing/test_metrics.py",
    "tests/trainer_client/embedding/routing/",
    "tests/trainer_client/balancing/test_configuration.py",
)

# The longest first, so that the lanes end together.
EITHER = (
    "tests/examples/",
    "tests/docs/",
    "tests/trainer_client/cli/test_plan",
    "tests/trainer_client/balancing/test_resume",
    "tests/trainer_client/balancing/test_gradients.py",
    "tests/trainer_client/embedding/",
    "tests/trainer_client/balancing/redistribution/",
    "tests/trainer_client/attention/",
    "tests/trainer_client/balancing/sampling/",
    "tests/trainer_client/balancing/pipelines/",
    "tests/trainer_client/balancing/test_rounds.py",
    "tests/trainer_client/observing/",
    "tests/trainer_client/planning/",
    "tests/trainer_client/cli/test_app.py",
    "tests/trainer_client/cli/test_calibrate.py",
    "tests/trainer_client/cli/test_checkpoint.py",
    "tests/services/balancer/test_page.py",
    "tests/services/balancer/test_site.py",
    "tests/test_imports.py",
    "tests/deploy/",
)
WAIT_MOST = ("tests/services/", "tests/faults/")


def lane(test: str) -> str:
    """The lane of a test, given its node id; of a test for either lane, its file."""
    if test.startswith(FUNCTIONS):
        return "functions"
    return test.partition("::")[0] if test.startswith(EITHER) else "processes"


_gives_way = False


def give_way(test: str) -> None:
    """Has this worker, and all that it starts from now on, run where those with tight bounds leave time.

    Args:
        test: The node id of the test that it begins.
    """
    global _gives_way  # noqa: PLW0603
    if not _gives_way and "PYTEST_XDIST_WORKER" in os.environ and lane(test) != "processes":
        os.nice(5)
        _gives_way = True


def turn(test: str) -> tuple[int, int]:
    """When a test comes, given its node id; of the processes first those in whose waits the other lane computes."""
    if test.startswith(FUNCTIONS):
        return 1, 0
    for place, path in enumerate(EITHER):
        if test.startswith(path):
            return 2, place
    return 0, not test.startswith(WAIT_MOST)
