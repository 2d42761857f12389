"""In-band errors: what was wrong, where, and what to do about it."""

from dataclasses import dataclass
from enum import IntEnum


class Code(IntEnum):
    """Why something was refused; the numbers are those of the wire."""

    INVALID_ARGUMENT = 1
    VERSION = 2
    RANKS_DIFFER = 3
    JOB_NAME_TAKEN = 4
    SUPERSEDED = 5
    ROUND_OUT_OF_RANGE = 6
    CONFLICTING_SUBMIT = 7
    LIMIT_EXCEEDED = 8
    DRAINING = 9
    NOT_JOINED = 10
    UNAUTHENTICATED = 11
    INTERNAL = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One refused message.

    Attributes:
        code: The kind of error.
        field: The field of the message that was wrong.
        value: What it held, shortened.
        remedy: What to do.
        fatal: The stream ends with this error; otherwise it concerns one round only.
    """

    code: Code
    field: str
    value: str
    remedy: str
    fatal: bool = False

    @property
    def message(self) -> str:
        """One sentence with all of it."""
        name = self.code.name.lower().replace("_", " ")
        return f"{name}: {self.field} is {self.value}; {self.remedy}"


class RefusedError(ValueError):
    """Carries a refusal out of a chain of checks."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def shorten(value: object, limit: int = 120) -> str:
    """`value` as text of at most `limit` characters."""
    text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def out_of_memory(what: str) -> Refusal:
    """There is no room for something more of this caller."""
    return Refusal(
        code=Code.LIMIT_EXCEEDED,
        field="max_memory",
        value=f"in use, or as much of it as one caller may hold, with no room for {what}",
        remedy="wait for answers before submitting more, submit fewer samples, or raise the server's max_memory",
    )


def too_large(size: int, limit: int) -> Refusal:
    """What a rank is to be told of a round does not fit into a message."""
    return Refusal(
        code=Code.LIMIT_EXCEEDED,
        field="max_message_bytes",
        value=f"too little for an answer of {size} bytes, of which {limit} may be sent",
        remedy="submit fewer samples or fields, or raise the server's max_message_bytes",
    )


def conflict(rank: int, round_number: int) -> Refusal:
    """A rank says something else about a round than before."""
    return Refusal(
        code=Code.CONFLICTING_SUBMIT,
        field="round",
        value=f"{round_number}, for which rank {rank} submitted other samples before",
        remedy="resubmit a round unchanged, or go on with the next",
    )


def too_far(rank: int, round_number: int, ahead: int) -> Refusal:
    """A rank goes on to new rounds while too many are undecided."""
    return Refusal(
        code=Code.ROUND_OUT_OF_RANGE,
        field="round",
        value=f"{round_number} while {ahead} rounds of rank {rank} are undecided (max_rounds_ahead)",
        remedy="wait for an answer before submitting further rounds",
    )


def too_high(round_number: int, highest: int, jump: int) -> Refusal:
    """The number of a round is taken for an error."""
    return Refusal(
        code=Code.ROUND_OUT_OF_RANGE,
        field="round",
        value=f"{round_number}, more than {jump} beyond round {highest}",
        remedy="number rounds consecutively",
    )


def too_old(round_number: int, remembered: int, floor: int) -> Refusal:
    """A round whose decision was forgotten."""
    return Refusal(
        code=Code.ROUND_OUT_OF_RANGE,
        field="round",
        value=f"{round_number}, decided or passed before the {remembered} that are remembered",
        remedy=f"go on with a round above {floor}",
    )


def too_often(round_number: int, owed: int) -> Refusal:
    """A round that is asked for again and again."""
    return Refusal(
        code=Code.LIMIT_EXCEEDED,
        field="round",
        value=f"{round_number}, for which {owed} answers are owed already",
        remedy="ask on one stream a rank, and again when that has ended",
    )


def too_many_open(round_number: int, undecided: int) -> Refusal:
    """One more round, of a session whose ranks are in too many."""
    return Refusal(
        code=Code.ROUND_OUT_OF_RANGE,
        field="round",
        value=f"{round_number} while {undecided} rounds of the session are undecided",
        remedy="submit to the rounds that the other ranks are in (twice max_rounds_ahead may be undecided)",
    )
