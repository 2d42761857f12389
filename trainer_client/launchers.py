"""What a job's launcher says of it: its name, which run it is, and how often that was started again."""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evenkeel.restarts import MAX_STARTS, restart_number

_NAME_CHARACTERS = 120
_UNNUMBERED_STEPS = 0xFFFFFFF0  # Slurm's numbers for the batch script and for interactive steps begin here


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of a job.

    Attributes:
        job: The job's name as the launcher knows it; empty: it has none.
        run_id: The run, equal whenever it is started again; drawn where no launcher names it.
        restart_count: Grows with each start of the run, see `evenkeel.restarts`.
    """

    job: str
    run_id: str
    restart_count: int


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """What the launcher of this process says: `EVENKEEL_…` go first, then Ray Train, Slurm and torchrun.

    torchrun counts from 0 again whenever it is started: below another launcher, both counts make one.

    Args:
        environment: Variables to look at; None: the process's own.

    Raises:
        ValueError: If a variable holds what cannot be used; the message names it.
    """
    variables = os.environ if environment is None else environment
    job, run_id = (variables.get(name, "").strip() for name in ("EVENKEEL_JOB", "EVENKEEL_RUN_ID"))
    starts = _count(variables, "EVENKEEL_RESTART_COUNT")
    if ray := _ray_run():
        # Ray starts workers again without telling them how often: the clock tells which start is the later one.
        counted = int(time.time()) if starts is None else restart_number(starts)
        return Launch(job=job or ray[0], run_id=run_id or ray[1], restart_count=counted)
    slurm_job, slurm_run = _slurm_run(variables)
    if slurm_job and starts is None:
        starts = _count(variables, "SLURM_RESTART_COUNT")
    elastic = _count(variables, "TORCHELASTIC_RESTART_COUNT")
    return Launch(
        job=job or slurm_job,
        run_id=run_id or slurm_run or _torchrun_run(variables, is_agent=elastic is not None),
        restart_count=restart_number(starts or 0, elastic or 0),
    )


def local_rank(environment: Mapping[str, str] | None = None) -> int:
    """This rank's number on its machine, as torchrun, Ray Train or Slurm gives it; 0 where none does.

    Raises:
        ValueError: If it is no number.
    """
    variables = os.environ if environment is None else environment
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if value := variables.get(name):
            if not (value.isascii() and value.isdecimal()):
                raise ValueError(f"{name} is {value!r}; give the number of this rank on its machine, from 0 on")
            return int(value)
    return 0


def _ray_run() -> tuple[str, str] | None:
    """Name and id of the run of Ray Train that this process is a worker of; None if it is none."""
    ray, train = sys.modules.get("ray"), sys.modules.get("ray.train")
    if ray is None or train is None or not ray.is_initialized():
        return None
    try:
        name = train.get_context().get_experiment_name()
    except Exception:  # Ray has an error of its own for whoever is no worker, and another in each of its versions
        return None
    run = f"ray-{ray.get_runtime_context().get_job_id()}-{name}"
    return (name[:_NAME_CHARACTERS], run[:_NAME_CHARACTERS]) if name else None


def _slurm_run(variables: Mapping[str, str]) -> tuple[str, str]:
    """Name and id of the step of a Slurm job, empty without; the steps of one allocation are different jobs."""
    job_id, step = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_STEP_ID", "")
    if not job_id:
        return "", ""
    if not step.isdecimal() or int(step) >= _UNNUMBERED_STEPS:
        step = "0"
    name = variables.get("SLURM_JOB_NAME", "")[:_NAME_CHARACTERS] or "slurm"
    return f"{name}-{job_id}" if step == "0" else f"{name}-{job_id}.{step}", f"slurm-{job_id}.{step}"


def _torchrun_run(variables: Mapping[str, str], *, is_agent: bool) -> str:
    """Torchrun's id of the run; without `--rdzv-id` its agent, which outlives restarts; else one that is drawn."""
    run_id = variables.get("TORCHELASTIC_RUN_ID", "")
    if run_id not in ("", "none"):
        return run_id
    if is_agent:
        try:
            # Field 22 of /proc/PID/stat, counted after the parenthesised name: the start time; PIDs are used again.
            started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        except (OSError, IndexError):
            return uuid.uuid4().hex
        return f"{socket.gethostname()}-{os.getppid()}-{started}"
    return uuid.uuid4().hex


def _count(variables: Mapping[str, str], name: str) -> int | None:
    value = variables.get(name, "").strip()
    if not value:
        return None
    if not (value.isascii() and value.isdecimal() and int(value) <= MAX_STARTS):
        raise ValueError(f"{name} is {value!r}; give the number of restarts so far, 0 to {MAX_STARTS}")
    return int(value)
