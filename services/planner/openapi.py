"""The OpenAPI document: completed from the core's docstrings, written to a file, compared with it.

python -m services.planner.openapi services/planner/openapi.json [--check]
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

import evenkeel.placement.compare
import evenkeel.placement.hardware
import evenkeel.placement.plan
import evenkeel.placement.what_if
from services.planner import schemas

_MODULES = (
    evenkeel.placement.plan,
    evenkeel.placement.compare,
    evenkeel.placement.what_if,
    evenkeel.placement.hardware,
    schemas,
)
_ENTRY = re.compile(r"^    (\w+): (.*)$")


def attribute_docs(cls: type) -> dict[str, str]:
    """What the `Attributes:` section of a docstring says of each attribute."""
    lines = inspect.cleandoc(cls.__doc__ or "").splitlines()
    docs: dict[str, str] = {}
    current = None
    inside = False
    for line in lines:
        if line == "Attributes:":
            inside = True
        elif inside and (entry := _ENTRY.match(line)):
            current = entry[1]
            docs[current] = entry[2]
        elif inside and current and line.startswith("     "):
            docs[current] += f" {line.strip()}"
    return docs


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """Adds what the core's docstrings say to the schemas of its dataclasses."""
    classes = {
        name: cls
        for module in _MODULES
        for name, cls in vars(module).items()
        if inspect.isclass(cls) and dataclasses.is_dataclass(cls)
    }
    for name, schema in document["components"]["schemas"].items():
        cls = classes.get(name)
        if cls is None:
            continue
        schema["description"] = inspect.cleandoc(cls.__doc__ or "").split("\n\nAttributes:")[0]
        for field, text in attribute_docs(cls).items():
            entry = schema.get("properties", {}).get(field)
            if entry is not None and "$ref" not in entry:
                entry["description"] = text
    return document


def install_openapi(app: FastAPI) -> None:
    """Serves the completed document at `/openapi.json`."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            raw = get_openapi(
                title=app.title,
                version=app.version,
                summary=app.summary,
                description=app.description,
                routes=app.routes,
            )
            app.openapi_schema = complete(raw)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def main(arguments: list[str]) -> int:
    """Writes the document, or with `--check` tells whether the file is up to date."""
    from services.planner.app import create_app
    from services.planner.settings import Settings

    path = Path(arguments[0])
    text = json.dumps(create_app(Settings()).openapi(), indent=1, sort_keys=True) + "\n"
    if "--check" not in arguments:
        path.write_text(text)
        return 0
    old = path.read_text() if path.is_file() else ""
    difference = list(difflib.unified_diff(old.splitlines(), text.splitlines(), str(path), "the service", lineterm=""))
    for line in difference[:100]:
        print(line)
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
