"""What an operator can set: by flag, else by environment variable (`EVENKEEL_PLANNER_…`), else by file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic_settings import SettingsConfigDict

from services.operations.settings import ServiceSettings, load

PREFIX = "EVENKEEL_PLANNER_"


class Settings(ServiceSettings):
    """Plans where each embedding table should live, over HTTP."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    port: int = Field(default=8080, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    requests_per_second: PositiveFloat = 50.0
    """Requests that one address may send, on average; more are refused with 429."""

    workers: PositiveInt = Field(default_factory=lambda: min(4, os.cpu_count() or 1))
    """Requests that are solved at the same time; by default one per core, at most 4."""
    queue_size: int = Field(default=64, ge=0)
    """Requests that may wait for a worker; more are refused with 503."""
    max_wait_seconds: PositiveFloat = 30.0
    """Longest that a request waits for a worker; then it is refused with 503."""
    worker_memory_bytes: PositiveInt = 800 << 20
    """Memory that a request may take, beside some 150 MB of a worker's code."""
    max_body_bytes: PositiveInt = 8 << 20
    """Largest request body; larger ones are refused with 413."""
    max_held_body_bytes: PositiveInt = 256 << 20
    """Bytes of request bodies that are held at a time; beyond, requests are refused with 503."""
    max_tables: PositiveInt = 5000
    """Most tables of a request."""
    max_time_limit_seconds: PositiveFloat = 60.0
    """Longest time limit that a request may ask for; longer ones are cut to it."""
    plan_cache: Path | None = None
    """Folder in which proved plans are kept, 256 MiB at most: the same request gets its plan again; unset: none."""
    drain_seconds: PositiveFloat = 10.0
    """Time that running requests have after SIGTERM."""


def load_settings(arguments: Sequence[str]) -> Settings:
    """Settings from flags, environment and file; see `services.operations.settings.load`."""
    return load(Settings, "python -m services.planner", arguments)
