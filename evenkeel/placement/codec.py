"""Lossless conversion between the planner's dataclasses and plain JSON values, with errors that name the field."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from evenkeel.placement.invalid_input import InvalidInputError, require

T = TypeVar("T")


def encode(value: object) -> Any:
    """Dataclasses, enums and tuples as dictionaries, strings and lists. A union's member writes its `kind`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
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
    given = dict(typing.cast(Mapping[str, object], value))
    if getattr(cls, "kind", None) is not None:
        given.pop("kind", None)
    hints = _hints(typing.cast(Any, cls))
    known = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls))}
    for name, item in given.items():
        require(name in known, _join(path, name), item, "is unknown", f"use one of: {', '.join(known)}")
    arguments = {}
    for name, info in known.items():
        if name in given:
            arguments[name] = _convert(hints[name], given[name], _join(path, name))
        else:
            missing = info.default is dataclasses.MISSING and info.default_factory is dataclasses.MISSING
            require(not missing, _join(path, name), None, "is missing", "give it")
    try:
        return cls(**arguments)
    except InvalidInputError as error:
        raise error.under(path) from None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _convert(hint: Any, value: object, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, value, path)
    if origin is tuple:
        require(isinstance(value, list | tuple), path, value, "is no list", "give a list")
        items = list(typing.cast(list[object], value))
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            if arguments[0] is float and set(map(type, items)) <= {float, int}:
                return _numbers(items, path)
            return tuple(_convert(arguments[0], item, f"{path}[{index}]") for index, item in enumerate(items))
        require(len(items) == len(arguments), path, value, "has the wrong length", f"give {len(arguments)} items")
        pairs = enumerate(zip(arguments, items, strict=True))
        return tuple(_convert(kind, item, f"{path}[{index}]") for index, (kind, item) in pairs)
    if origin in (dict, Mapping) or hint is dict:
        require(isinstance(value, Mapping), path, value, "is no object", "give its fields by name")
        pairs_of = typing.cast(Mapping[str, object], value).items()
        return {key: _convert(arguments[1], item, _join(path, key)) for key, item in pairs_of}
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast(type, hint), value, path)
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = [member.value for member in hint]
        known = isinstance(value, str) and value in choices
        require(known, path, value, "is unknown", f"use one of: {', '.join(map(str, choices))}")
        return hint(value)
    return _scalar(hint, value, path)


def _numbers(items: list[Any], path: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, items))
    except OverflowError:
        return tuple(_scalar(float, item, f"{path}[{index}]") for index, item in enumerate(items))


def _scalar(hint: Any, value: object, path: str) -> Any:
    if hint is float:
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        require(ok, path, value, "is no number", "give a number")
        try:
            return float(typing.cast(float, value))
        except OverflowError:
            raise InvalidInputError(path, value, "is too large for a number", "give a number below 1e308") from None
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)  # JSON knows no difference between 1e9 and 1000000000
    if hint in (int, str, bool):
        ok = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
        wanted = {int: "a whole number", str: "a string", bool: "true or false"}[hint]
        require(ok, path, value, f"is not {wanted}", f"give {wanted}")
    if hint is str:
        try:
            typing.cast(str, value).encode()
        except UnicodeEncodeError:
            raise InvalidInputError(path, value, "holds half a character", "send valid Unicode") from None
    return value


def _union(members: tuple[Any, ...], value: object, path: str) -> Any:
    if value is None and type(None) in members:
        return None
    rest = [member for member in members if member is not type(None)]
    classes = {getattr(member, "kind", None): member for member in rest}
    if isinstance(value, Mapping) and None not in classes:
        kind = value.get("kind")
        known = isinstance(kind, str) and kind in classes
        require(known, _join(path, "kind"), kind, "is unknown", f"use one of: {', '.join(sorted(map(str, classes)))}")
        return decode(classes[kind], value, path)
    for member in rest:
        if isinstance(value, list | tuple) and typing.get_origin(member) is tuple:
            return _convert(member, value, path)
        if isinstance(value, str) and member is str:
            return value
        if isinstance(value, Mapping) and dataclasses.is_dataclass(member):
            return decode(typing.cast(type, member), value, path)
    return _convert(rest[0] if len(rest) == 1 or not isinstance(value, int | float) else rest[-1], value, path)
