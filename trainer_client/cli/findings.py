"""What a check of `evenkeel doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: What was looked at.
        status: How bad it is.
        text: What was found.
        remedy: What to do; empty when there is nothing to do.
    """

    check: str
    status: Status
    text: str
    remedy: str = ""
