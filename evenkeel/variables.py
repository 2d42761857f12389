"""The environment variables that trainers and the command line read, and those that are likely misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

_PREFIX = "EVENKEEL_"
_OF_OTHERS = ("EVENKEEL_BALANCER_", "EVENKEEL_PLANNER_")  # the services', which read their own
KNOWN = {
    "BALANCER": "Where the balancer is: `host:port`, `IP:port,IP:port`, `embedded` (the default) or `off`.",
    "CACHE_DIR": "Folder of compiled kernels; by default beside the package, then `~/.cache/numba`.",
    "JOB": "Name of the training job, where the program gives none; by default as Ray Train or Slurm has it.",
    "METRICS_ADVERTISE": "Host under which Prometheus finds a rank's metrics; by default this machine's name.",
    "METRICS_HOST": "Address on which `RankExporter.from_env` serves a rank's metrics; 127.0.0.1 by default.",
    "METRICS_PORT": "Port of local rank 0's metrics, one more for each next; 0: any free one; unset: no exporter.",
    "METRICS_TARGETS": "Folder into which a rank's exporter writes its address, for Prometheus to watch.",
    "NODE": "Name of this machine; ranks of the same name are on one node. By default the host's name.",
    "PAGES": "Addresses of the balancers' pages for `evenkeel top`, with commas between; 127.0.0.1:9101 by default.",
    "PLAN_CACHE": "Folder in which `evenkeel plan` and `plan_model` keep proved plans, to give them again.",
    "PLANNER": "URL of the planner that `evenkeel plan`, `plan_model` and `evenkeel doctor` ask; `embedded`: none.",
    "RESTART_COUNT": "How often the run was started again; by default what Slurm and torchrun count.",
    "RUN_ID": "Name of this run of the job, the same whenever it is started again; by default the launcher's.",
    "TLS": "1: connect with TLS and the system's authorities. Implied by the next three.",
    "TLS_CA": "PEM file of the authorities that may have signed a service's certificate.",
    "TLS_CERTIFICATE": "PEM file of the client's own certificate, for services that require one (mTLS).",
    "TLS_KEY": "PEM file of that certificate's private key.",
    "TOKEN_FILE": "File that holds the bearer token and nothing else.",
}
"""What each is for, by name without the prefix."""


def misspelt(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that nothing reads, and the one that each is likely meant to be."""
    result: dict[str, str] = {}
    for name in environment:
        rest = name.removeprefix(_PREFIX)
        if rest == name or rest in KNOWN or name.startswith(_OF_OTHERS):
            continue
        near = difflib.get_close_matches(rest, KNOWN, n=1, cutoff=0.75)
        if near:
            result[name] = _PREFIX + near[0]
    return result
