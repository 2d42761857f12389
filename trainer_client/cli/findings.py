"""What `evenkeel doctor` finds."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Status(StrEnum):
    """How bad it is; the value is the colour."""

    OK = "green"
    WARN = "yellow"
    FAIL = "red"
    SKIP = "dim"


class Finding(NamedTuple):
    """One line of the report: what was looked at, how bad it is, what was found, and what to do if anything."""

    check: str
    status: Status
    text: str
    remedy: str = ""
