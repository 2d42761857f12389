"""Files of tables, requests, plans, profiles and measurements that commands read: YAML or JSON."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from evenkeel.placement import InvalidInputError
from evenkeel.placement.fields import parse_json

_MOST = 256 << 20
"""Bytes of a file that is read: more than any request that a service takes."""


def read(path: Path, holds: str = "a list of tables, a request or a plan") -> object:
    """The content of a file, which should hold `holds`."""
    kind = "JSON" if path.suffix == ".json" else "YAML"
    text = _text(path, holds)
    try:
        return parse_json(text, str(path)) if kind == "JSON" else _yaml(path, text)
    except InvalidInputError:
        raise
    except RecursionError:
        raise InvalidInputError(str(path), text[:40], "holds itself, or too much in itself", "write it flat") from None
    except ValueError as error:
        raise InvalidInputError(str(path), text[:40], f"is no {kind}: {error}", "correct the file") from None


def _text(path: Path, holds: str) -> str:
    with path.open("rb") as file:
        content = file.read(_MOST + 1)
    if len(content) > _MOST:
        what = f"holds more than {_MOST >> 20} MiB"
        raise InvalidInputError(str(path), f"{content[:8]!r}", what, f"name a file with {holds}")
    if not content.strip():
        raise InvalidInputError(str(path), "", "is empty", f"write {holds} into it")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        shown = repr(error.object[error.start : error.start + 8])
        raise InvalidInputError(str(path), shown, "is no UTF-8 text", "save the file as UTF-8") from None


def _yaml(path: Path, text: str) -> object:
    if text.lstrip().startswith(("{", "[")):  # JSON of another name: YAML knows not all of its escapes
        with contextlib.suppress(json.JSONDecodeError):
            return parse_json(text, str(path))
    import yaml

    class Loader(yaml.SafeLoader):
        """Takes no field twice."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            names: set[str] = set()
            for key, _ in node.value:
                name = str(key.value) if isinstance(key, yaml.ScalarNode) else ""
                if name and name in names:
                    what = f"is there twice in one object, the second time in line {key.start_mark.line + 1}"
                    raise InvalidInputError(f"{path}: {name}", name, what, "keep one of them")
                names.add(name)
            made: dict[object, object] = super().construct_mapping(node, deep)
            return made

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
