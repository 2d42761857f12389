"""The error that every bad input to the planner raises."""

from __future__ import annotations


class InvalidInputError(ValueError):
    """A value that the planner cannot use.

    Attributes:
        field: Path of the offending field, such as `tables[3].rows`.
        value: The value as given.
        problem: What is wrong with it.
        remedy: What to give instead.
    """

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        super().__init__(f"{field}: {problem} (got {shown}); {remedy}")

    def __reduce__(self) -> tuple[type[InvalidInputError], tuple[str, object, str, str]]:
        """Goes from one process to another."""
        return type(self), (self.field, self.value, self.problem, self.remedy)

    def under(self, prefix: str) -> InvalidInputError:
        """The same error seen from the object that holds the field."""
        joint = "" if self.field.startswith("[") or not prefix else "."
        return InvalidInputError(f"{prefix}{joint}{self.field}", self.value, self.problem, self.remedy)


class TimeIsUpError(InvalidInputError):
    """The time limit was over before there was anything to answer."""


def require(condition: bool, field: str, value: object, problem: str, remedy: str) -> None:
    """Raise `InvalidInputError` unless `condition` holds."""
    if not condition:
        raise InvalidInputError(field, value, problem, remedy)
