"""What values a field may have, said once: in the annotations of the dataclasses.

`check_bounds` refuses others, and whoever describes the fields (the service's OpenAPI document) reads the same ones.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from typing import Any, TypeAlias, cast

import numpy as np

from evenkeel.placement.invalid_input import require

Check: TypeAlias = Callable[[Any, str], None]


@dataclass(frozen=True, slots=True)
class Range:
    """A finite number between two others, both included.

    Attributes:
        low: The smallest.
        high: The largest.
        above: Whether it must be above `low` instead.
    """

    low: float
    high: float
    above: bool = False

    def check(self, value: Any, name: str, *, whole: bool) -> None:
        """Raises `InvalidInputError` unless the value is such a number."""
        ok = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        ok = ok and self.low <= value <= self.high and not (self.above and value == self.low)  # NaN is in no range
        low, high = (self.low, self.high) if whole else (f"{self.low:g}", f"{self.high:g}")
        kind = "whole number" if whole else "number"
        given = f"above {low}, at most {high}" if self.above else f"from {low} to {high}"
        require(ok, name, value, "is out of range", f"give a {kind} {given}")


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some whole numbers or words.

    Attributes:
        values: Those.
    """

    values: tuple[int, ...] | tuple[str, ...]

    def check(self, value: Any, name: str) -> None:
        """Raises `InvalidInputError` unless the value is one of them."""
        require(value in self.values, name, value, "is unknown", f"use one of: {', '.join(map(str, self.values))}")


@dataclass(frozen=True, slots=True)
class Length:
    """How many characters or items there may be.

    Attributes:
        low: The fewest.
        high: The most.
    """

    low: int
    high: int

    def check(self, value: Any, name: str) -> None:
        """Raises `InvalidInputError` unless there are as many."""
        what = "characters" if isinstance(value, str) else "items"
        number, remedy = len(value), f"give {self.low} to {self.high} {what}"
        require(self.low <= number <= self.high, name, number, f"has {number} {what}", remedy)


Share: TypeAlias = typing.Annotated[float, Range(0, 1)]


def check_bounds(value: Any) -> None:
    """Checks the fields of a dataclass against the bounds in its annotations; names of enumerations become members.

    Raises:
        InvalidInputError: If a field is outside of them, or is no member of its enumeration.
    """
    for name, kind, alone, several in _enumerations(cast(Any, type(value))):
        given = getattr(value, name)
        if given is None or (isinstance(given, kind) and alone):
            continue
        if several and isinstance(given, list | tuple):
            members: Any = tuple(_member(kind, item, f"{name}[{index}]") for index, item in enumerate(given))
        else:
            members = _member(kind, given, name)
            members = members if alone else (members,)
        object.__setattr__(value, name, members)
    for name, check in _checks(cast(Any, type(value))):
        check(getattr(value, name), name)


@cache
def _enumerations(cls: type) -> tuple[tuple[str, type[Enum], bool, bool], ...]:
    """Fields that hold members of an enumeration: name, which one, and whether one or several of them."""
    found = []
    for field in fields(cast(Any, cls)):
        parts = list(_alternatives(hints(cls)[field.name]))
        one = next((part for part in parts if _is_enumeration(part)), None)
        many = next((typing.get_args(p)[0] for p in parts if typing.get_origin(p) is tuple), None)
        many = many if _is_enumeration(many) else None
        if one or many:
            found.append((field.name, cast("type[Enum]", one or many), one is not None, many is not None))
    return tuple(found)


def _alternatives(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        yield from typing.get_args(hint)
    else:
        yield hint


def _is_enumeration(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _member(kind: type[Enum], given: Any, name: str) -> Enum:
    if isinstance(given, kind):
        return given
    known = [str(member.value) for member in kind]
    require(isinstance(given, str) and given in known, name, given, "is unknown", f"use one of: {', '.join(known)}")
    return kind(given)


@cache
def hints(cls: type) -> dict[str, Any]:
    """The annotations of a dataclass, bounds included."""
    return typing.get_type_hints(cls, include_extras=True)


@cache
def _checks(cls: type) -> tuple[tuple[str, Check], ...]:
    found = ((field.name, _check(hints(cls)[field.name])) for field in fields(cast(Any, cls)))
    return tuple((name, check) for name, check in found if check is not None)


def _check(hint: Any) -> Check | None:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _bounded(arguments[0], arguments[1:])
    if origin in (typing.Union, types.UnionType):
        inner = next((check for check in map(_check, arguments) if check is not None), None)
        if inner is None:
            return None
        some = inner
        return lambda value, name: None if value is None else some(value, name)
    if origin is tuple:
        several = len(arguments) == 2 and arguments[1] is Ellipsis
        items = [_check(argument) for argument in (arguments[:1] if several else arguments)]
        span = next((bound for bound in typing.get_args(arguments[0]) if isinstance(bound, Range)), None)
        return None if all(item is None for item in items) else _each(items, several, span if several else None)
    return None


def _bounded(base: Any, bounds: tuple[Any, ...]) -> Check:
    inner = _check(base)

    def check(value: Any, name: str) -> None:
        for bound in bounds:
            if isinstance(bound, Range):
                bound.check(value, name, whole=base is int)
            else:
                bound.check(value, name)
        if inner is not None:
            inner(value, name)

    return check


def _each(checks: list[Check | None], several: bool, span: Range | None) -> Check:
    def check(value: Any, name: str) -> None:
        if span is not None and all(type(item) is float for item in value):
            numbers = np.array(value)
            if np.all((numbers >= span.low) & (numbers <= span.high) & ~(span.above & (numbers == span.low))):
                return
        for index, item in enumerate(value):
            one = checks[0] if several else checks[index]
            if one is not None:
                one(item, f"{name}[{index}]")

    return check
