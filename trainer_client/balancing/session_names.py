"""The name of one incarnation of a stream: which run of a job is speaking."""

from __future__ import annotations

import os
import secrets
import socket
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_openings: Counter[tuple[str, str, str]] = Counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionName:
    """What names a session at the service.

    Attributes:
        job: The training job.
        group: The data-parallel group of ranks that balances together.
        loader: The stream of batches.
        run_id: One launch of the job; equal across the launcher's restarts.
        restart_count: The launcher's restarts so far.
        opening: Drawn for each incarnation: a launcher may start a run again without counting a restart, when its
            members change or with the run id of an earlier launch.
    """

    job: str
    group: str
    loader: str
    run_id: str
    restart_count: int
    opening: int


def name_session(job: str, group: str, loader: str) -> SessionName:
    """Names a new incarnation of a stream; called on rank 0, which broadcasts it.

    The launcher's run id is used where there is one. torchrun without `--rdzv-id` gives none, but its agent outlives
    restarts, so the agent's process names the run. Otherwise an id is drawn. A stream opened again by the same
    processes is another incarnation, so a count of openings is part of the id.
    """
    key = (job, group, loader)
    _openings[key] += 1
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if run_id in ("", "none"):
        run_id = _agent_id() if "TORCHELASTIC_RESTART_COUNT" in os.environ else uuid.uuid4().hex
    if _openings[key] > 1:
        run_id = f"{run_id}/{_openings[key]}"
    return SessionName(
        job=job,
        group=group,
        loader=loader,
        run_id=run_id,
        restart_count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        opening=secrets.randbits(63) | 1,
    )


def _agent_id() -> str:
    parent = os.getppid()
    try:
        # Field 22 of /proc/PID/stat, counted after the parenthesised name: the start time, unlike a PID never reused.
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return uuid.uuid4().hex
    return f"{socket.gethostname()}-{parent}-{started}"
