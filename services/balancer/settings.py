"""What an operator can set: by flag, else by environment variable (`EVENKEEL_BALANCER_…`), else by file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic_settings import SettingsConfigDict

from services.balancer.access import AccessOptions
from services.balancer.limits import Limits
from services.operations.settings import ServiceSettings, load

PREFIX = "EVENKEEL_BALANCER_"


class Settings(ServiceSettings):
    """Balances the batches of training jobs: all ranks of a job meet here once per batch."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    port: int = Field(default=50051, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    calls_per_second: PositiveFloat = AccessOptions().calls_per_second
    """Calls and streams that one address may start, on average."""
    messages_per_second: PositiveFloat = AccessOptions().messages_per_second
    """Messages of one stream, on average; more are read late."""
    max_connections: PositiveInt = 8192
    """Connections at a time."""
    handshake_seconds: PositiveFloat = 10.0
    """Time in which a new connection must have completed its handshake."""
    reflection: bool = False
    """Whether clients may ask for the service's definition."""

    trace_endpoint: str | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP, http://collector:4318) for the rounds that ranks trace."""

    strategy: str = "minimal_move"
    """Partitioning strategy of sessions that name none."""
    workers: PositiveInt = Field(default_factory=lambda: min(4, os.cpu_count() or 1))
    """Processes for long partitions, beside one that takes short ones only; by default one per core, at most 4."""
    worker_memory_bytes: PositiveInt = 2 << 30
    """Memory that one partition may take; a round that wants more is decided IDENTITY."""
    queue_size: PositiveInt = 1024
    """Partitions that may wait for a worker; of more, the job with most of them loses its latest: decided IDENTITY."""
    partition_timeout_seconds: PositiveFloat = Limits().partition_timeout
    """Time that a partition may take; then its round is decided IDENTITY and its process killed."""

    round_timeout_seconds: PositiveFloat = Limits().round_timeout
    """Deadline of a round whose ranks name none, from its first submission."""
    max_round_timeout_seconds: PositiveFloat = Limits().max_round_timeout
    """Longest deadline that a rank may ask for."""
    session_expiry_seconds: PositiveFloat = Limits().session_expiry
    """Silence after which a session is forgotten, or may be replaced by another run of the same name."""
    abandoned_expiry_seconds: PositiveFloat = Limits().abandoned_expiry
    """Time without any stream after which a session may be replaced by another run of the same name: after a crash."""
    join_timeout_seconds: PositiveFloat = 10.0
    """Time from a stream's start to its Join."""
    drain_seconds: float = Field(default=3.0, ge=0)
    """Time after a stop signal in which rounds go on and ranks may join another balancer; it ends when all have."""
    grace_seconds: PositiveFloat = 6.0
    """Time after a stop signal in which everything ends."""

    max_sessions: PositiveInt = Limits().max_sessions
    """Sessions at a time. No token (without tokens: no address) may hold more of them than are left free."""
    max_streams: PositiveInt = 8192
    """Streams at a time, of all sessions, shared alike."""
    max_calls: PositiveInt = 512
    """Rounds by unary calls at a time, shared alike."""
    max_ranks: PositiveInt = Limits().max_ranks
    """Ranks of one session."""
    max_samples_per_rank: PositiveInt = Limits().max_samples_per_rank
    """Samples of one rank in one round."""
    max_fields: PositiveInt = Limits().max_fields
    """Fields of a batch's schema."""
    max_rounds_ahead: PositiveInt = Limits().max_rounds_ahead
    """Undecided rounds that one rank may have submitted to."""
    remembered_rounds: PositiveInt = Limits().remembered_rounds
    """Decisions of a session that are given again to whoever asks."""
    max_memory: PositiveInt = Limits().max_memory
    """Bytes that submissions, plans and streams of all jobs may take together, beside 0.3 GB for the process itself.
    No token (without tokens: no address) may hold more than is left free, no job more than is left to its caller."""
    max_message_bytes: PositiveInt = 4 << 20
    """Size of one message, uncompressed. Reading 4 MiB keeps everybody else waiting for some 10 ms."""
    keepalive_seconds: PositiveFloat = 30.0
    """Time between the server's own pings to an idle client."""
    keepalive_timeout_seconds: PositiveFloat = 10.0
    """Time after which a ping without an answer ends the connection."""
    min_ping_seconds: PositiveFloat = 5.0
    """Shortest interval of keepalive pings that clients may use, also without calls."""

    def access(self) -> AccessOptions:
        """How much a caller may do."""
        return AccessOptions(calls_per_second=self.calls_per_second, messages_per_second=self.messages_per_second)

    def limits(self) -> Limits:
        """The part that the round protocol needs."""
        return Limits(
            max_sessions=self.max_sessions,
            max_ranks=self.max_ranks,
            max_samples_per_rank=self.max_samples_per_rank,
            max_fields=self.max_fields,
            max_rounds_ahead=self.max_rounds_ahead,
            remembered_rounds=self.remembered_rounds,
            max_memory=self.max_memory,
            round_timeout=self.round_timeout_seconds,
            max_round_timeout=self.max_round_timeout_seconds,
            partition_timeout=self.partition_timeout_seconds,
            session_expiry=self.session_expiry_seconds,
            abandoned_expiry=self.abandoned_expiry_seconds,
        )


def load_settings(arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from flags, environment and file; see `services.operations.settings.load`."""
    return load(Settings, "python -m services.balancer", arguments, environment)
