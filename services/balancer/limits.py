"""What a balancer allows, as one immutable value that every decision gets handed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds and durations of the round protocol. Durations are in seconds.

    Attributes:
        max_sessions: Sessions at a time.
        max_ranks: Ranks of one session.
        max_samples_per_rank: Samples of one submission.
        max_window: Batches of one round.
        max_fields: Fields of a batch's schema.
        max_rounds_ahead: Undecided rounds that one rank may have submitted to.
        max_round_jump: Distance of a round from the highest decided one beyond which its number is taken for an error.
        max_text: Characters of a name.
        max_memory: What sessions and streams may take together. No caller may hold more than is left free, no job more
            than is left to its caller.
        remembered_rounds: Decisions that a session can give again; fewer when memory is short.
        round_timeout: Deadline of a round whose ranks name none.
        max_round_timeout: Longest deadline that a rank may ask for.
        partition_timeout: Longest time a partition may take before it is given up.
        session_expiry: Silence after which a session may be replaced by another run, and is forgotten.
        abandoned_expiry: Time without any stream after which a session may be replaced by another run. Longer than
            ranks take to connect again, so that a break of the network costs no job its name.
    """

    max_sessions: int = 1024
    max_ranks: int = 4096
    max_samples_per_rank: int = 65_536
    max_window: int = 64
    max_fields: int = 4096
    max_rounds_ahead: int = 64
    max_round_jump: int = 1_000_000
    max_text: int = 256
    max_memory: int = 2 << 30
    remembered_rounds: int = 64
    round_timeout: float = 1.0
    max_round_timeout: float = 60.0
    partition_timeout: float = 2.0
    session_expiry: float = 120.0
    abandoned_expiry: float = 10.0

    @property
    def max_open_rounds(self) -> int:
        """Undecided rounds of a session: ranks may be as far apart as one of them may be ahead."""
        return 2 * self.max_rounds_ahead
