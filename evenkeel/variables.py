"""The environment variables that trainers and the command line read, and those that are likely misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

_PREFIX = "EVENKEEL_"
_OF_OTHERS = ("EVENKEEL_BALANCER_", "EVENKEEL_PLANNER_")  # the services', which read their own
KNOWN = (
    "BALANCER", "CACHE_DIR", "JOB", "METRICS_ADVERTISE", "METRICS_HOST", "METRICS_PORT", "METRICS_TARGETS", "NODE",
    "PLANNER", "TLS", "TLS_CA", "TLS_CERTIFICATE", "TLS_KEY", "TOKEN_FILE", "TRACE_ENDPOINT", "TRACE_EVERY",
)  # fmt: skip


def misspelt(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that nothing reads, and the one that each is likely meant to be."""
    found: dict[str, str] = {}
    for name in environment:
        rest = name.removeprefix(_PREFIX)
        if rest == name or rest in KNOWN or name.startswith(_OF_OTHERS):
            continue
        near = difflib.get_close_matches(rest, KNOWN, n=1, cutoff=0.75)
        if near:
            found[name] = _PREFIX + near[0]
    return found
