"""What an operator can set: by flag, else by environment variable (`EVENKEEL_BALANCER_…`), else by file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic_settings import SettingsConfigDict

from evenkeel.protocol.plan_round import RoundLimits
from services.operations.settings import ServiceSettings, load

PREFIX = "EVENKEEL_BALANCER_"


class Settings(ServiceSettings):
    """Balances the batches of training jobs: the lead of each asks here once per round."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    port: int = Field(default=50051, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    reflection: bool = False
    """Whether clients may ask for the service's definition."""

    workers: PositiveInt = Field(default_factory=lambda: os.cpu_count() or 1)
    """Processes that plan; by default one per core."""
    partition_timeout_seconds: PositiveFloat = 2.0
    """Time that planning a round may take; then the call fails and its process is replaced."""
    grace_seconds: PositiveFloat = 6.0
    """Time after a stop signal in which calls under way may end."""

    max_ranks: PositiveInt = RoundLimits().max_ranks
    """Ranks of a round."""
    max_samples: PositiveInt = RoundLimits().max_samples
    """Samples of all ranks of a round."""
    max_batches: PositiveInt = RoundLimits().max_batches
    """Batches of a round."""
    max_message_bytes: PositiveInt = 64 << 20
    """Size of one request or response."""
    max_calls: PositiveInt = 512
    """Calls at a time of a token; of an address where there are no tokens."""
    max_calls_of_all: PositiveInt = 4096
    """Calls at a time of everybody; more are refused by gRPC."""
    max_bytes_in_flight: PositiveInt = 512 << 20
    """Size of all requests under way together."""
    max_connections: PositiveInt = 8192
    """Connections at a time."""
    handshake_seconds: PositiveFloat = 10.0
    """Time in which a new connection must have completed its handshake."""
    keepalive_seconds: PositiveFloat = 30.0
    """Time between the server's own pings to an idle client."""
    keepalive_timeout_seconds: PositiveFloat = 10.0
    """Time after which a ping without an answer ends the connection."""
    min_ping_seconds: PositiveFloat = 5.0
    """Shortest interval of keepalive pings that clients may use, also without calls."""

    def limits(self) -> RoundLimits:
        """How large a round may be."""
        return RoundLimits(max_ranks=self.max_ranks, max_samples=self.max_samples, max_batches=self.max_batches)


def load_settings(arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from flags, environment and file; see `services.operations.settings.load`."""
    return load(Settings, "python -m services.balancer", arguments, environment)
