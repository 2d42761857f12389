"""Which tests may run beside which, in lanes: each of them is one test after another.

Many tests start services and ranks, mostly wait for them, and have bounds on how long something takes; no two of them
run at the same time, and what runs beside them gives way to them. The others compute without a clock, or start ranks
but set them no tight bounds: each file of them is a lane, and the next one is for whichever worker has none.
"""

import os

TOGETHER = "tests/services/planner/"  # of one browser
# The longest first, so that the workers end together.
OTHERS = (
    TOGETHER,
    "tests/examples/",
    "tests/evenkeel/placement/",
    "tests/evenkeel/",
    "tests/trainer_client/balancing/test_resume",
    "tests/model/",
    "tests/trainer_client/cli/test_plan",
    "tests/services/balancer/test_page.py",
    "tests/trainer_client/embedding/",
    "tests/trainer_client/attention/",
    "tests/test_imports.py",
    "tests/docs/",
    "tests/trainer_client/balancing/sampling/",
    "tests/trainer_client/balancing/pipelines/",
    "tests/test_wheel.py",
    "tests/trainer_client/balancing/test_gradients.py",
    "tests/trainer_client/balancing/redistribution/",
    "tests/trainer_client/balancing/costs/",
    "tests/trainer_client/balancing/test_configuration.py",
    "tests/trainer_client/observing/",
    "tests/trainer_client/planning/",
    "tests/trainer_client/balancing/test_rounds.py",
    "tests/trainer_client/balancing/batches/",
    "tests/trainer_client/balancing/test_reading.py",
    "tests/services/balancer/test_history.py",
    "tests/services/balancer/test_site.py",
    "tests/services/security/test_tokens.py",
    "tests/trainer_client/cli/test_app.py",
    "tests/trainer_client/cli/test_calibrate.py",
    "tests/trainer_client/cli/test_checkpoint.py",
    "tests/deploy/",
)
WAIT_MOST = ("tests/services/", "tests/faults/")


def lane(test: str) -> str:
    """The lane of a test, given its node id."""
    if test.startswith(TOGETHER):
        return TOGETHER
    return test.partition("::")[0] if test.startswith(OTHERS) else "processes"


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
    """When a test comes, given its node id; of the processes first those in whose waits the other lanes compute."""
    for place, path in enumerate(OTHERS):
        if test.startswith(path):
            return 1, place
    return 0, not test.startswith(WAIT_MOST)
