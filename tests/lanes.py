"""Which tests may run beside which, in lanes: each of them is one test after another.

Many tests start services and ranks, mostly wait for them, and have bounds on how long something takes; no two of them
run at the same time, and what runs beside them gives way to them. All others have no tight bounds, and go file by
file to whichever lane is free.
"""

from __future__ import annotations

import os

# The longest first, so that the lanes end together; what is not named here is a process with bounds.
FILES = (
    "tests/evenkeel/partitioning/test_fuzz.py",
    "tests/examples/resume/",
    "tests/model/",
    "tests/evenkeel/placement/test_search.py",
    "tests/services/planner/test_page.py",
    "tests/trainer_client/planning/test_round_trip.py",
    "tests/evenkeel/partitioning/test_compile.py",
    "tests/trainer_client/cli/test_plan",
    "tests/trainer_client/balancing/test_resume",
    "tests/examples/",
    "tests/trainer_client/attention/",
    "tests/trainer_client/balancing/test_rounds.py",
    "tests/trainer_client/balancing/test_gradients.py",
    "tests/evenkeel/placement/",
    "tests/services/balancer/test_site.py",
    "tests/docs/",
    "tests/trainer_client/balancing/test_windows.py",
    "tests/test_imports.py",
    "tests/trainer_client/embedding/",
    "tests/test_wheel.py",
    "tests/trainer_client/balancing/redistribution/",
    "tests/trainer_client/balancing/sampling/",
    "tests/trainer_client/balancing/pipelines/",
    "tests/trainer_client/balancing/test_unbalanced_rounds.py",
    "tests/trainer_client/observing/",
    "tests/trainer_client/planning/",
    "tests/trainer_client/cli/test_app.py",
    "tests/trainer_client/cli/test_calibrate.py",
    "tests/trainer_client/cli/test_checkpoint.py",
    "tests/services/balancer/test_page.py",
    "tests/deploy/",
    "tests/evenkeel/partitioning/",
    "tests/evenkeel/key_statistics/",
    "tests/evenkeel/test_plan_cache.py",
    "tests/services/balancer/test_history.py",
    "tests/services/planner/test_page_files.py",
    "tests/services/security/test_tokens.py",
    "tests/trainer_client/balancing/batches/",
    "tests/trainer_client/balancing/costs/",
    "tests/trainer_client/balancing/test_splitting.py",
    "tests/trainer_client/balancing/test_fingerprints.py",
    "tests/trainer_client/balancing/test_configuration.py",
)
WAIT_MOST = ("tests/services/", "tests/faults/")


def lane(test: str) -> str:
    """The lane of a test, given its node id; of one without bounds, its file."""
    return test.partition("::")[0] if test.startswith(FILES) else "processes"


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
    """When a test comes, given its node id; of those with bounds first what waits most, while others compute."""
    for place, path in enumerate(FILES):
        if test.startswith(path):
            return 1, place
    return 0, not test.startswith(WAIT_MOST)
