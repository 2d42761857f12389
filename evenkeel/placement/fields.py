"""What values the fields of a dataclass may have, said once: in its annotations.

`check_fields` holds whoever makes an object to them, `decode` whoever sends one as JSON, with errors that name the
field; both take `"40M"` and `"12GiB"` where a number is wanted. Whoever describes the fields (the service's OpenAPI
document) reads the same annotations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import string
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from functools import cache
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

T = TypeVar("T")
_MOST_DIGITS = 400
_UNITS = {"": 1, **dict(zip("KMBGT", (10**3, 10**6, 10**9, 10**9, 10**12), strict=True))}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_QUANTITY = re.compile(
    r"([-+]?[0-9][0-9_]{0,40}(?:\.[0-9]{0,40})?(?:[eE][-+]?[0-9]{1,2})?)(K|M|B|G|T|KiB|MiB|GiB|TiB)?$"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


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


def parse_json(text: str | bytes, where: str = "") -> Any:
    """The value of a JSON text.

    Args:
        text: The text.
        where: What errors begin with, such as a file's name.

    Raises:
        InvalidInputError: If an object has a field twice.
        ValueError: If it is no JSON.
        RecursionError: If it is too deep.
    """
    doubled: dict[int, tuple[dict[str, Any], str]] = {}  # by identity; an object that is held here keeps its own

    def construct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in pairs:
            if name in made:
                doubled.setdefault(id(made), (made, name))
            made[name] = value
        return made

    value = json.loads(text, object_pairs_hook=construct, parse_int=_whole)
    if doubled:
        _refuse_doubles(value, doubled, f"{where}: " if where else "")
    return value


def _whole(digits: str) -> int | float:
    """A whole number; one of more digits than any double has is infinite, as it is with an exponent."""
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)


def _refuse_doubles(value: object, doubled: Mapping[int, tuple[object, str]], path: str) -> None:
    """Refuses a JSON value with an object that has a field twice; one that another value has replaced is in none."""
    if id(value) in doubled:
        _, name = doubled[id(value)]
        raise InvalidInputError(f"{path}{name}", name, "is there twice in one object", "keep one of them")
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_doubles(item, doubled, f"{path}{name}.")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _refuse_doubles(item, doubled, f"{path.removesuffix('.')}[{number}].")


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

    def holds(self, value: Any) -> Any:
        """Whether a number, or each of an array, is in the range. NaN is in none."""
        return (self.low <= value) & (value <= self.high) & ((value != self.low) | (not self.above))

    def check(self, value: Any, path: str) -> None:
        """Raises `InvalidInputError` unless the number is in the range."""
        whole = isinstance(value, int)
        low, high = (self.low, self.high) if whole else (f"{self.low:g}", f"{self.high:g}")
        given = f"above {low}, at most {high}" if self.above else f"from {low} to {high}"
        remedy = f"give a {'whole ' * whole}number {given}"
        require(bool(self.holds(value)), path, value, "is out of range", remedy)


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some whole numbers or words.

    Attributes:
        values: Those.
    """

    values: tuple[int, ...] | tuple[str, ...]

    def check(self, value: Any, path: str) -> None:
        """Raises `InvalidInputError` unless the value is one of them."""
        require(value in self.values, path, value, "is unknown", f"use one of: {', '.join(map(str, self.values))}")


@dataclass(frozen=True, slots=True)
class Length:
    """How many characters or items there may be.

    Attributes:
        low: The fewest.
        high: The most.
    """

    low: int
    high: int

    def check(self, value: Any, path: str) -> None:
        """Raises `InvalidInputError` unless there are as many."""
        what = "characters" if isinstance(value, str) else "items"
        number, remedy = 1 if isinstance(value, Enum) else len(value), f"give {self.low} to {self.high} {what}"
        require(self.low <= number <= self.high, path, number, f"has {number} {what}", remedy)


Share: TypeAlias = typing.Annotated[float, Range(0, 1)]


@cache
def hints(cls: type) -> dict[str, Any]:
    """The annotations of a dataclass, bounds included."""
    return typing.get_type_hints(cls, include_extras=True)


def check_fields(value: Any) -> None:
    """Holds the fields of a dataclass to their annotations; names of enumerations become members.

    Raises:
        InvalidInputError: If a field has a value that it may not have.
    """
    for name, hint in hints(cast(Any, type(value))).items():
        if name in value.__dataclass_fields__ and typing.get_origin(hint) is not typing.ClassVar:
            object.__setattr__(value, name, _value(hint, getattr(value, name), name))


class Checked:
    """A dataclass whose fields are held to their annotations."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)


def encode(value: object) -> Any:
    """Dataclasses, enums and tuples as dictionaries, strings and lists. A union's member writes its `kind`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        kind = getattr(type(value), "kind", None)
        return fields if kind is None else {"kind": kind, **fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode(cls: type[T], value: object, path: str = "") -> T:
    """The dataclass `cls` from plain JSON values.

    Raises:
        InvalidInputError: If a field is unknown, missing, of the wrong type or refused by the dataclass.
    """
    require(isinstance(value, Mapping), path or "request", value, "is no object", "give its fields by name")
    given = dict(cast(Mapping[str, object], value))
    if getattr(cls, "kind", None) is not None:
        given.pop("kind", None)
    known = {field.name: field for field in dataclasses.fields(cast(Any, cls))}
    for name, item in given.items():
        require(name in known, _join(path, name), item, "is unknown", f"use one of: {', '.join(known)}")
    for name, field in known.items():
        missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        require(name in given or not missing, _join(path, name), None, "is missing", "give it")
    arguments = {
        name: _value(hints(cast(Any, cls))[name], given[name], _join(path, name)) for name in known if name in given
    }
    try:
        return cls(**arguments)
    except InvalidInputError as error:
        raise error.under(path) from None


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _value(hint: Any, value: Any, path: str) -> Any:
    """The value as the annotation has it: numbers of their type, lists as tuples, objects as dataclasses."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        for bound in arguments[1:]:  # of too many items none is looked at
            if isinstance(bound, Length) and isinstance(value, list | tuple):
                bound.check(value, path)
        found = _value(arguments[0], value, path)
        for bound in arguments[1:]:
            bound.check(found, path)
        return found
    if origin in (typing.Union, types.UnionType):
        return None if value is None and type(None) in arguments else _member(arguments, value, path)
    if origin is tuple:
        require(isinstance(value, list | tuple), path, value, "is no list", "give a list")
        return _items(arguments, value, path)
    if origin is dict:
        require(isinstance(value, Mapping), path, value, "is no object", "give its fields by name")
        return {key: _value(arguments[1], item, _join(path, key)) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, cast(type, hint)) else decode(cast(type, hint), value, path)
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = [str(member.value) for member in hint]
        known = isinstance(value, str) and value in choices
        require(known, path, value, "is unknown", f"use one of: {', '.join(choices)}")
        return hint(value)
    return _scalar(hint, value, path)


def _items(hints: tuple[Any, ...], items: Sequence[Any], path: str) -> tuple[Any, ...]:
    if hints[1:] != (Ellipsis,):
        require(len(items) == len(hints), path, items, "has the wrong length", f"give {len(hints)} items")
        pairs = enumerate(zip(hints, items, strict=True))
        return tuple(_value(hint, item, f"{path}[{index}]") for index, (hint, item) in pairs)
    base, *bounds = typing.get_args(hints[0]) if typing.get_origin(hints[0]) is typing.Annotated else hints[:1]
    if base is float and set(map(type, items)) <= {float, int}:  # one by one these would take long
        with contextlib.suppress(OverflowError):
            numbers = np.array(items, dtype=np.float64)
            if all(bound.holds(numbers).all() for bound in bounds):
                return tuple(numbers.tolist())
    return tuple(_value(hints[0], item, f"{path}[{index}]") for index, item in enumerate(items))


def _member(hints: tuple[Any, ...], value: Any, path: str) -> Any:
    """The value as one of a union: by its `kind`, or by what it looks like."""
    members = [member for member in hints if member is not type(None)]
    kinds = {getattr(member, "kind", None): member for member in members}
    if isinstance(value, Mapping) and None not in kinds:
        kind = value.get("kind")
        known = isinstance(kind, str) and kind in kinds
        require(known, _join(path, "kind"), kind, "is unknown", f"use one of: {', '.join(sorted(map(str, kinds)))}")
        return decode(kinds[kind], value, path)
    if isinstance(value, tuple(member for member in members if isinstance(member, type))):
        return value
    for member in members:
        is_list = typing.get_origin(member) is tuple
        if is_list == isinstance(value, list | tuple) and (
            is_list or dataclasses.is_dataclass(member) == isinstance(value, Mapping)
        ):
            return _value(member, value, path)
    return _value(members[0], value, path)


def quantity(text: str) -> int | float | None:
    """The number that a text such as `400M`, `4e8`, `1.5B` or `139GiB` says, whole where it is; `None` for others."""
    found = _QUANTITY.match(text)
    if found is None:
        return None
    number = Decimal(found[1].replace("_", "")) * _UNITS[found[2] or ""]
    return int(number) if number == number.to_integral_value() else float(number)


def _scalar(hint: Any, value: Any, path: str) -> Any:
    if hint in (int, float) and isinstance(value, str) and not set(value).isdisjoint(string.ascii_letters):
        number = quantity(value)  # digits in quotes stay a text, which no number is
        value = value if number is None else number
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    quotes = ', without quotes unless it has a unit, as "400M" or "12GiB"' if isinstance(value, str) else ""
    if hint is float:
        require(is_number, path, value, "is no number", f"give a number{quotes}")
        try:
            return float(value)
        except OverflowError:
            raise InvalidInputError(path, value, "is too large for a number", "give a number below 1e308") from None
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)  # JSON knows no difference between 1e9 and 1000000000
    wanted = {int: "a whole number", str: "a string", bool: "true or false"}[hint]
    ok = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    require(ok, path, value, f"is not {wanted}", f"give {wanted}{quotes if hint is int else ''}")
    if hint is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidInputError(path, value, "holds half a character", "send valid Unicode") from None
        what = "holds a control character, such as the end of a line"
        require(_CONTROL.search(value) is None, path, value, what, "leave it out")
    return value
