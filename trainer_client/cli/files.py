"""Files that `evenkeel plan` reads and writes, and the numbers in them."""

from __future__ import annotations

import contextlib
import json
import re
from decimal import Decimal
from pathlib import Path

from evenkeel.placement import InvalidInputError

_MOST = 256 << 20
"""Bytes of a file that is read: more than any request that a service takes."""
_UNITS = {"": 1, **dict(zip("KMBGT", (10**3, 10**6, 10**9, 10**9, 10**12), strict=True))}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_QUANTITY = re.compile(r"([-+]?[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,2})?)(K|M|B|G|T|KiB|MiB|GiB|TiB)?$")


def quantity(text: str) -> int | float | None:
    """The number that a text such as `400M`, `4e8`, `1.5B` or `139GiB` says, whole where it is; `None` for others."""
    found = _QUANTITY.match(text)
    if found is None:
        return None
    number = Decimal(found[1].replace("_", "")) * _UNITS[found[2] or ""]
    return int(number) if number == number.to_integral_value() else float(number)


def read(path: Path, holds: str = "a list of tables, a request or a plan") -> object:
    """The content of a YAML or JSON file, which should hold `holds`.

    Raises:
        InvalidInputError: If it cannot be read, or is neither YAML nor JSON.
    """
    text = _text(path, holds)
    try:
        return _json(path, text) if path.suffix == ".json" else _yaml(path, text)
    except RecursionError:
        raise InvalidInputError(str(path), text[:40], "holds itself, or too much in itself", "write it flat") from None
    except ValueError as error:
        if isinstance(error, InvalidInputError):
            raise
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise InvalidInputError(str(path), text[:40], f"is no {kind}: {error}", "correct the file") from None


def _text(path: Path, holds: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST + 1)
    except OSError as error:
        raise InvalidInputError(str(path), error.strerror, "cannot be read", "name a file that can") from None
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


def _json(path: Path, text: str) -> object:
    def construct(pairs: list[tuple[str, object]]) -> dict[str, object]:
        made: dict[str, object] = {}
        for name, value in pairs:
            if name in made:
                raise InvalidInputError(f"{path}: {name}", name, "is there twice in one object", "keep one of them")
            made[name] = value
        return made

    found: object = json.loads(text, object_pairs_hook=construct)
    return found


def _yaml(path: Path, text: str) -> object:
    if text.lstrip().startswith(("{", "[")):  # JSON of another name: YAML knows not all of its escapes
        with contextlib.suppress(json.JSONDecodeError):
            return _json(path, text)
    try:
        import yaml
    except ModuleNotFoundError:
        remedy = "install pyyaml, or give a .json file"
        raise InvalidInputError(str(path), path.suffix, "needs pyyaml to be read", remedy) from None

    class Loader(yaml.SafeLoader):
        """Takes 400M, 4e8 and 139GiB for numbers, and no field twice."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            seen: set[str] = set()
            for key, _ in node.value:
                name = str(key.value) if isinstance(key, yaml.ScalarNode) else ""
                if name and name in seen:
                    what = f"is there twice in one object, the second time in line {key.start_mark.line + 1}"
                    raise InvalidInputError(f"{path}: {name}", name, what, "keep one of them")
                seen.add(name)
            made: dict[object, object] = super().construct_mapping(node, deep)
            return made

    def construct(loader: Loader, node: yaml.ScalarNode) -> int | float:
        number = quantity(str(loader.construct_scalar(node)))
        assert number is not None, "the resolver matches what can be read"
        return number

    Loader.add_implicit_resolver("!quantity", _QUANTITY, list("-+0123456789"))
    Loader.add_constructor("!quantity", construct)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise InvalidInputError(str(path), text[:40], f"is no YAML: {error}", "correct the file") from None


def write(flag: str, path: Path, text: str) -> str:
    """Writes a file; why it could not be written, if so, and what to do."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        why = error.strerror or error
        return f"{flag}: {path}: {why}; name a file in a folder that is there and may be written"
    return ""
