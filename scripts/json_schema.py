"""JSON schemas of dataclasses, from their annotations, as `evenkeel.placement.fields.decode` reads them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

from evenkeel.placement.fields import Length, OneOf, Range, encode, hints

_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean"}
_ENTRY = re.compile(r"^    (\w+): (.*)$")
_REFERENCE = "#/components/schemas/"


def add_schema(cls: type, schemas: dict[str, Any]) -> dict[str, Any]:
    """Adds the schema of a dataclass, and of all that it holds, to the schemas of a document."""
    if cls.__name__ not in schemas:
        entry = schemas[cls.__name__] = {"title": cls.__name__, "type": "object", "additionalProperties": False}
        described = describe(cls)
        properties: dict[str, Any] = {}
        required = []
        if (kind := getattr(cls, "kind", None)) is not None:
            properties["kind"] = {"const": kind, "type": "string"}
            required.append("kind")
        for field in dataclasses.fields(cls):
            found = _schema(hints(cls)[field.name], schemas)
            if field.default is not dataclasses.MISSING:
                found = {**found, "default": encode(field.default)}
            elif field.default_factory is not dataclasses.MISSING:
                found = {**found, "default": encode(field.default_factory())}
            else:
                required.append(field.name)
            properties[field.name] = {**found, "description": described[field.name]}
        entry |= {"description": described[""], "properties": properties, "required": required}
    return {"$ref": _REFERENCE + cls.__name__}


def describe(cls: type) -> dict[str, str]:
    """What the docstring of a dataclass and of those that it extends says of each attribute; of itself under ""."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        text, _, entries = inspect.cleandoc(base.__doc__ or "").partition("\n\nAttributes:\n")
        docs[""] = text
        current = ""
        for line in entries.splitlines():
            if entry := _ENTRY.match(line):
                current = entry[1]
                docs[current] = entry[2]
            elif current and line.startswith("     "):
                docs[current] += f" {line.strip()}"
    return docs


def _schema(hint: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        found = _schema(arguments[0], schemas)
        for bound in arguments[1:]:
            found = {**found, **_limits(bound, found.get("type", "array"))}
        return found
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, schemas)
    if origin is tuple:
        if arguments[1:] == (Ellipsis,):
            return {"type": "array", "items": _schema(arguments[0], schemas)}
        number = len(arguments)
        items = [_schema(argument, schemas) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": number, "maxItems": number}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema(arguments[1], schemas)}
    if dataclasses.is_dataclass(hint):
        return add_schema(typing.cast(type, hint), schemas)
    if issubclass(hint, Enum):
        return {"type": "string", "enum": [member.value for member in hint]}
    return {"type": _SCALARS[hint]}


def _limits(bound: Any, kind: str) -> dict[str, Any]:
    match bound:
        case Range(low, high, above):
            return {"exclusiveMinimum" if above else "minimum": low, "maximum": high}
        case OneOf(values):
            return {"enum": list(values)}
        case Length(low, high):
            what = "Length" if kind == "string" else "Items"
            return {f"min{what}": low, f"max{what}": high}
    raise AssertionError(bound)


def _union(members: tuple[Any, ...], schemas: dict[str, Any]) -> dict[str, Any]:
    found = [_schema(member, schemas) for member in members if member is not type(None)]
    if len(found) < len(members):
        return {"anyOf": [*found, {"type": "null"}]}
    kinds = [getattr(member, "kind", None) for member in members]
    if None in kinds:
        return {"anyOf": found}
    mapping = {kind: one["$ref"] for kind, one in zip(kinds, found, strict=True)}
    return {"oneOf": found, "discriminator": {"propertyName": "kind", "mapping": mapping}}
