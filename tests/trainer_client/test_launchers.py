"""Each launcher's own variables, and what they make of a job's name, run and restarts."""

import pytest

from evenkeel.restarts import restart_text
from trainer_client import Balancer
from trainer_client.launchers import Launch, local_rank, read_launch

# What each gives a rank, as far as it is read.
SLURM = {
    "SLURM_JOBID": "4711", "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "a-train", "SLURM_LOCALID": "3",
    "SLURM_PROCID": "3", "SLURM_STEPID": "0", "SLURM_STEP_ID": "0",
}  # fmt: skip
TORCHRUN = {"LOCAL_RANK": "5", "RANK": "5", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "none"}
# What a pod of a JobSet, also one of Kubeflow's Trainer, takes from its labels in deploy/kubernetes/trainers.
JOBSET = {
    "EVENKEEL_JOB": "a-train", "EVENKEEL_RUN_ID": "5a8f2c1e-0d6b-4a53-9d0c-0d8f6c6f1f11", "EVENKEEL_RESTART_COUNT": "1",
    "JOB_COMPLETION_INDEX": "0", "PET_NODE_RANK": "0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        (SLURM, Launch(job="a-train-4711", run_id="slurm-4711.0", restart_count=0)),
        ({**SLURM, "SLURM_RESTART_COUNT": "2"}, Launch(job="a-train-4711", run_id="slurm-4711.0", restart_count=20000)),
        # Another step of the allocation may run beside the first.
        ({**SLURM, "SLURM_STEP_ID": "1"}, Launch(job="a-train-4711.1", run_id="slurm-4711.1", restart_count=0)),
        # The batch script itself, and `srun --pty`.
        ({**SLURM, "SLURM_STEP_ID": "4294967291"}, Launch(job="a-train-4711", run_id="slurm-4711.0", restart_count=0)),
        ({**SLURM, **TORCHRUN}, Launch(job="a-train-4711", run_id="slurm-4711.0", restart_count=2)),
        (
            {**SLURM, **TORCHRUN, "SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RESTART_COUNT": "0"},
            Launch(job="a-train-4711", run_id="slurm-4711.0", restart_count=10000),
        ),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "r7"}, Launch(job="", run_id="r7", restart_count=2)),
        (JOBSET, Launch(job="a-train", run_id=JOBSET["EVENKEEL_RUN_ID"], restart_count=10000)),
        (
            {**TORCHRUN, **JOBSET},
            Launch(job="a-train", run_id=JOBSET["EVENKEEL_RUN_ID"], restart_count=10002),
        ),
        ({**SLURM, "EVENKEEL_JOB": "mine"}, Launch(job="mine", run_id="slurm-4711.0", restart_count=0)),
    ],
)
def test_a_launcher_names_the_job_its_run_and_its_restarts(environment: dict[str, str], launch: Launch) -> None:
    assert read_launch(environment) == launch


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ({"EVENKEEL_RESTART_COUNT": "3"}, "3"), ({"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "7"}, "1"),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, "2"), ({"EVENKEEL_RESTART_COUNT": "99999"}, "99999"), ({}, "0"),
        ({"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "7", "TORCHELASTIC_RESTART_COUNT": "2"}, "1.2"),
    ],
)  # fmt: skip
def test_people_read_the_restarts_that_the_launcher_counted(counts: dict[str, str], shown: str) -> None:
    assert restart_text(read_launch(counts).restart_count) == shown
    assert restart_text(1_700_000_000) == "2023-11-14 22:13:20 UTC", "where a clock counts"


def test_the_number_on_the_machine_is_the_launchers() -> None:
    assert (local_rank(SLURM), local_rank({**SLURM, **TORCHRUN}), local_rank({})) == (3, 5, 0)
    with pytest.raises(ValueError, match="LOCAL_RANK is 'x'; give the number"):
        local_rank({"LOCAL_RANK": "x"})


def test_what_is_wrong_is_refused_by_name_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("-1", "two", "1e3", "100000"):
        monkeypatch.setenv("EVENKEEL_RESTART_COUNT", value)
        for make in (Balancer.from_env, Balancer.embedded):
            with pytest.raises(ValueError, match=f"EVENKEEL_RESTART_COUNT is '{value}'; give the number of restarts"):
                make()
